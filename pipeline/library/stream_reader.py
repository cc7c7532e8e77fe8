"""The batches of a stream, and the state from which a reader continues."""

import hashlib
import json
import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any, Self

import numpy as np

from pipeline.data.documents import Cursor
from pipeline.data.feed import InTurn, StreamWork
from pipeline.extraction.loaded_step import LoadedStep
from pipeline.job.opening import Job
from pipeline.library.filling import FeedPosition, Filler, Waits
from pipeline.library.tee import StoreTee
from pipeline.store.format.int8 import scale_name
from pipeline.store.format.layout import MIB, SIDE_ARRAYS, ArraySpec
from pipeline.store.read.frameworks import Framework
from pipeline.store.read.gathering import AHEAD, Batch, Gatherer, Position, Reading, TokenMemory

log = logging.getLogger("pipeline")

_DIGEST = 16  # characters of a checksum in a state


class StreamReader(Iterator[Batch]):
    """Iterates over the batches of a stream, once over the data. One thread may use it at a time.

    `state()` contains a few numbers per stream of documents. A reader with this state continues after the last yielded
    batch. Dropping or closing the reader ends its threads.

    host_bytes: the peak host memory of activations: the buffer, steps in flight and batches gathered ahead.
    device_bytes: the peak memory of the stream on a device: the weights and a running step, as reported by the
    compiler, the activations of steps in flight, and with framework="jax" the batches.
    waits: the seconds that the training thread and the devices have waited for each other.
    """

    def __init__(
        self,
        job: Job,
        step: LoadedStep,
        reading: Reading,
        half_steps: int,
        state: Mapping[str, Any] | None,
        *,
        fills_store: bool,
    ) -> None:
        """half_steps: steps per half of the buffer. fills_store: whether to fill the job's store, too.

        Raises ValueError for the state of a different stream, and what opening the store raises.
        """
        memories = [TokenMemory(job.layout, reading, half_steps * job.plan.mesh.process_rows) for _ in range(2)]
        self.host_bytes = host_bytes(job, reading, half_steps, fills_store)
        self.device_bytes = device_bytes(job, step, reading)
        self.num_tokens = 0
        self._identity = _identity(job, reading, half_steps)
        work = job.work()
        begin, self._position = FeedPosition(InTurn(work)), Position()
        if state is not None:
            begin, self._position = _restored(state, self._identity, work)
        tee = StoreTee(job, step) if fills_store else None
        self._filler = Filler(job.plan, step, memories, reading, reading.options.rank, tee)
        self._filler.begins[self._position.buffer] = begin
        filled = self._filler.filled(begin, self._position.buffer)
        self._batches = Gatherer(reading, reading.options.drop_last).batches(filled, self._position)
        weakref.finalize(self, self._filler.stop).atexit = False  # the filler registers its own exit handler
        log.info(
            "batches from a buffer of %d token slots: up to %.1f MiB of activations on the host, up to %.1f MiB on "
            "each device",
            *(2 * memories[0].rows * job.layout.slots, self.host_bytes / MIB, self.device_bytes / MIB),
        )

    @property
    def waits(self) -> Waits:
        return self._filler.waits

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        """The next batch. Re-raises errors of the computation: NotFiniteError, InputError or another PipelineError."""
        batch, self._position = next(self._batches)
        self.num_tokens += len(batch.tokens)
        for index in [index for index in self._filler.begins if index < self._position.buffer]:
            del self._filler.begins[index]
        return batch

    def state(self) -> dict[str, Any]:
        """The position as JSON values: the batch, the filling and the token in it, where that filling begins in each
        stream of documents, and the values that the order depends on, by name."""
        work, row = self._filler.begins.get(self._position.buffer, FeedPosition(InTurn(())))
        if self._position.epoch:  # the data has ended
            work, row = InTurn(()), 0
        return asdict(self._position) | {"row": row, "streams": list(map(_entry, work.work)), "of": self._identity}

    def close(self) -> None:
        """Ends the reader's threads after the step in progress.

        If the stream fills a store, commits its complete blocks first. Re-raises errors of that unless a batch has
        raised them.
        """
        self._batches.close()
        self._filler.close()


def host_bytes(job: Job, reading: Reading, half_steps: int, fills_store: bool) -> int:
    """The peak host memory of activations and side arrays: both halves of the buffer, steps in flight, batches gathered
    ahead and, if the stream fills a store, the memory for that."""
    slot_bytes = sum(spec.position_bytes for spec in _read_arrays(job, reading))
    buffer_slots = 2 * half_steps * job.plan.mesh.process_rows * job.layout.slots
    memory = job.plan.memory
    in_flight = memory.inflight_steps * (memory.step_bytes + memory.step_statistics_bytes)
    storing = memory.host_bytes if fills_store else 0
    return (buffer_slots + (AHEAD + 1) * reading.batch_size) * slot_bytes + in_flight + storing


def device_bytes(job: Job, step: LoadedStep, reading: Reading) -> int:
    """The peak device memory of weights, steps and batches, without features that are made dense."""
    program = step.compiled.memory.resident_bytes(job.plan.memory.inflight_steps)
    if reading.options.framework is not Framework.jax:
        return program
    widened = np.dtype(reading.options.dtype or "float32").itemsize  # int8 becomes float32
    arrays = _read_arrays(job, reading)
    widths = {spec.name: spec.width for spec in arrays if spec.name in reading.names}
    token_bytes = sum(max(spec.position_bytes, widths.get(spec.name, 0) * widened) for spec in arrays)
    return program + (AHEAD + 1) * reading.batch_size * token_bytes


def _read_arrays(job: Job, reading: Reading) -> list[ArraySpec]:
    names = {*reading.names, *map(scale_name, reading.names), *reading.sparse, *reading.outputs}
    return [*SIDE_ARRAYS, *(spec for spec in job.layout.all_arrays if spec.name in names)]


def _identity(job: Job, reading: Reading, half_steps: int) -> dict[str, int | str | None]:
    """The values, or checksums of values, that a stream's batches depend on, by name."""
    metadata, options = job.metadata, reading.options
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
        "seed": reading.seed,
        "batch_size": reading.batch_size,
        "shuffle_buffer_tokens": 2 * half_steps * job.plan.mesh.process_rows * job.layout.slots,
        "token_filter": _checksum(asdict(options.token_filter)),
    }


def _checksum(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:_DIGEST]


def _entry(work: StreamWork) -> list[int | None]:
    """The remaining work of one stream of documents, as stored in a state."""
    start = work.start
    return [work.stream.stream, work.index, start.shard, start.document, start.token, start.ordinal, work.wanted]


def _restored(
    state: Mapping[str, Any], identity: Mapping[str, object], work: Sequence[StreamWork]
) -> tuple[FeedPosition, Position]:
    """The position in an earlier reader's state. Raises ValueError for the state of a different stream."""
    try:
        stored_identity = dict(state["of"])
        different = [
            f"{name} ({stored_identity.get(name)!r} in the state, {value!r} here)"
            for name, value in identity.items()
            if stored_identity.get(name) != value
        ]
        position = Position(**{field.name: int(state[field.name]) for field in fields(Position)})
        row, left, by_stream = int(state["row"]), [], {item.stream.stream: item for item in work}
        for stream, index, shard, document, token, ordinal, wanted in state["streams"] if not different else ():
            start = Cursor(shard, document, token, ordinal)
            left.append(replace(by_stream[stream], start=start, index=index, token_budget=wanted, wanted=wanted))
        if min(row, *asdict(position).values()) < 0:
            raise ValueError("a negative position")
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"the state is not from a Stream ({error!r}). Start again without a state.") from error
    if different:
        raise ValueError(
            f"the state is from a stream that differs in {', '.join(different)}. Use the configuration and options of "
            "the reader that made the state, or start again without a state."
        )
    return FeedPosition(InTurn(left), row), position
