"""The batches of a stream, and the state from which a reader continues."""

import hashlib
import json
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from pipeline.core.arguments import require_not_forked
from pipeline.core.errors import ArgumentError
from pipeline.data.documents import Cursor
from pipeline.data.feed import InTurn, StreamWork
from pipeline.job.job import Job
from pipeline.job.loaded_step import LoadedStep
from pipeline.library.filling import FeedPosition, Filler, StoreTee
from pipeline.store.read.gathering import Batch, TokenMemory, gathered
from pipeline.store.read.iterating import Position, Reader, closed_at_end, sealed, unsealed
from pipeline.store.read.options import BatchArrays, BatchOptions

_DIGEST = 16  # characters of a checksum in a state


class StreamReader(Reader[Batch]):
    """Iterates over the batches of a stream. A pass goes once over the data; another pass computes everything again, in
    another order.

    `state()` contains a few numbers per stream of documents. A reader with this state continues after the last returned
    batch. Dropping or closing the reader ends its threads.
    """

    library = "JAX"

    def __init__(
        self,
        job: Job,
        step: LoadedStep,
        arrays: BatchArrays,
        options: BatchOptions,
        half_steps: int,
        state: Mapping[str, Any] | None,
        *,
        fills_store: bool,
    ) -> None:
        """half_steps: steps per half of the buffer. fills_store: whether to fill the job's store, too.

        Raises ArgumentError for the state of a different stream, and what opening the store raises.
        """
        self._job = job
        self._model_step = step
        self._arrays, self._options = arrays, options
        self._memory_rows = half_steps * job.plan.mesh.process_rows
        self._fills_store = fills_store
        self._filler: Filler | None = None
        self._identity = _identity(job, options, half_steps)
        position = Position() if state is None else _restored(unsealed(state), self._identity, job.work())
        is_at_end = position.begin is not None and not position.begin.work.work
        super().__init__(position, position.epoch + (not is_at_end), 1)
        self._batches = self._start()

    def _start(self) -> Iterator[tuple[Batch, Position]]:
        require_not_forked("JAX")
        if self._filler is not None:  # one at a time computes, and fills a store
            self._filler.close()
            self._finalizer.detach()
        memories = [TokenMemory([self._arrays], self._memory_rows) for _ in range(2)]
        tee = StoreTee(self._job, self._model_step) if self._fills_store else None
        begin, position = self._first_step(), self._position
        filler = Filler(self._job.plan, self._model_step, memories, self._options, position.epoch, tee)
        self._filler = filler
        self._finalizer = weakref.finalize(self, filler.stop)
        self._finalizer.atexit = False  # readers are closed before
        closed_at_end.add(filler)  # its thread computes on for a while after the reader was dropped
        filled = filler.filled(begin, position.buffer)
        return gathered(filled, position, [self._arrays], self._options)

    def _first_step(self) -> FeedPosition:
        """Where the filling of the reader's position begins."""
        if self._position.begin is not None:
            return self._position.begin
        return FeedPosition(InTurn(() if self._position.epoch == self._end else self._job.work()))

    def state(self) -> dict[str, Any]:
        """The position as JSON values: the batch, the filling and the token in it, where that filling begins in each
        stream of documents, the values that the order depends on, by name, and a checksum of all this."""
        work, row = self._first_step()
        streams = list(map(_entry, work.work))
        return sealed(self._position.numbers | {"row": row, "streams": streams, "of": self._identity})

    def close(self) -> None:
        """Ends the reader's threads after the step in progress.

        If the stream fills a store, commits its complete blocks first. Re-raises errors of that unless a batch has
        raised them.
        """
        super().close()
        if self._filler is not None:
            self._filler.close()


def _identity(job: Job, options: BatchOptions, half_steps: int) -> dict[str, int | str | None]:
    """The values, or checksums of values, that a stream's batches depend on, by name."""
    metadata = job.metadata
    sections = ("model", "tokenizer", "data", "batch")
    return {
        **{name: _checksum(getattr(metadata, name)) for name in sections},
        "capture": _checksum({key: value for key, value in metadata.capture.items() if key != "encode_index"}),
        "batch.rows": job.plan.step.rows,
        "rows_per_block": metadata.rows_per_block,
        "num_streams": metadata.num_streams,
        "max_tokens": job.plan.streams.max_tokens,
        "rank": options.rank,
        "world": options.world,
        "seed": options.order_seed,
        "batch_size": options.batch_size,
        "shuffle_buffer_tokens": 2 * half_steps * job.plan.mesh.process_rows * job.layout.slots,
        "token_filter": _checksum(
            {name: value for name, value in asdict(options.token_filter).items() if name != "labels" or value}
        ),
    }


def _checksum(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:_DIGEST]


def _entry(work: StreamWork) -> list[int | None]:
    """The remaining work of one stream of documents, as stored in a state."""
    start = work.start
    return [work.stream.stream, work.index, start.shard, start.document, start.token, start.ordinal, work.wanted]


def _restored(state: Mapping[str, Any], identity: Mapping[str, object], work: Sequence[StreamWork]) -> Position:
    """The position in an earlier reader's state. Raises ArgumentError for the state of a different stream."""
    if "of" not in state:
        raise ArgumentError("the state is not from a Stream, but from a store's reader. Start again without a state.")
    different = [
        f"{name} ({state['of'].get(name)!r} in the state, {value!r} here)"
        for name, value in identity.items()
        if state["of"].get(name) != value
    ]
    if different:
        raise ArgumentError(
            f"the state is from a stream that differs in {', '.join(different)}. Use the configuration and options of "
            "the reader that made the state, or start again without a state."
        )
    left, by_stream = [], {item.stream.stream: item for item in work}
    for stream, index, shard, document, token, ordinal, wanted in state["streams"]:
        start = Cursor(shard, document, token, ordinal)
        left.append(replace(by_stream[stream], start=start, index=index, wanted=wanted))
    begin = FeedPosition(InTurn(left), state["row"])
    return Position.of(state, begin)
