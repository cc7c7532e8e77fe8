"""Memory for token slots, and the batches gathered from it ahead of training.

The memory is filled from a store or by a model; `TokenMemory.order` then contains the slots to use, in order.
Shapes: n tokens per batch, K keys, D features per activation, k features stored per token, S slots of a memory (slots
per row times rows).
"""

import json
import operator
import traceback
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Self, TypeVar

import ml_dtypes  # noqa: F401  numpy then knows "bfloat16"
import numpy as np
from crc32c import crc32c
from jaxtyping import Bool, Int32, Int64

from pipeline.core.arguments import require_not_forked, shown
from pipeline.core.errors import ArgumentError
from pipeline.core.memory import aligned_empty
from pipeline.core.sites import ByName
from pipeline.store.format.layout import SIDE_ARRAYS, StoreLayout
from pipeline.store.format.scaled import Dequantised, dequantised, scale_name
from pipeline.store.format.statistics import Statistics, merge, token_statistics
from pipeline.store.read.batch_options import Reading
from pipeline.store.read.features import FeatureBatch, feature_batches
from pipeline.store.read.filters import TokenFilter
from pipeline.store.read.frameworks import STORED, converter
from pipeline.store.read.order import Buffer

AHEAD = 4  # how many batches are gathered ahead
GATHERING_THREADS = 2

B = TypeVar("B")

STACKED = "stacked"  # the name of the memory [S, K, D] shared by arrays of the same width


@dataclass(frozen=True)
class Batch:
    """n tokens, without padding, as arrays of numpy, JAX or torch.

    activations: [n, D] if `keys` was one activation; else by array name, or [n, K, D] if stacked.
    segments: the number of the token's document window in its row. positions: start at 0 in each window.
    documents: the document's number; with JAX this is a numpy array, since JAX has no int64 by default.
    outputs: those requested by the argument `outputs`, [n] or [n, k] by array name.
    features: with `features=True`, by the SAE's name: "blocks.5.resid_post" if one SAE encodes that array.
    """

    activations: Any
    tokens: Int32[np.ndarray, " n"]
    segments: Int32[np.ndarray, " n"]
    positions: Int32[np.ndarray, " n"]
    documents: Int64[np.ndarray, " n"]
    outputs: Mapping[str, Any] = field(default_factory=dict)
    features: Mapping[str, FeatureBatch] = field(default_factory=dict)


class Position(NamedTuple):
    """A reader's position: after `batch` batches of epoch `epoch`; the next batch begins at `token` of `buffer`, which
    has this `begin`."""

    epoch: int = 0
    batch: int = 0
    buffer: int = 0
    token: int = 0
    begin: Any = None

    @property
    def numbers(self) -> dict[str, int]:
        """The position without `begin`, as JSON values."""
        return {name: getattr(self, name) for name in self._fields[:-1]}


class Reader(Iterator[B], Generic[B]):
    """Iterates over batches. One thread may use it at a time.

    All that a reader keeps is its position: after the last batch that `__next__` returned. Every `for` goes on from
    there, also after Ctrl-C, an error (which is raised again if it persists) or `close`. After a complete pass, the
    next `for` begins another one.
    """

    library = "TensorStore"  # what does not survive a fork

    def __init__(self, position: Position, end: int | None, epochs: int | None) -> None:
        """end: the epoch before which the pass ends; None for no end. epochs: per pass."""
        self._position = position
        self._end = end
        self._epochs = epochs
        self._batches: Iterator[tuple[B, Position]] | None = None
        self._is_complete = self._is_closed = False

    @abstractmethod
    def _start(self) -> Iterator[tuple[B, Position]]:
        """The batches from the reader's position to the end of the pass, each with the position after it."""

    def __iter__(self) -> Self:
        if self._is_complete:
            begin, end = Position(self._end), self._end + self._epochs
            self._position, self._end, self._is_complete = begin, end, False
        self._is_closed = False
        return self

    def __next__(self) -> B:
        require_not_forked(self.library)
        if self._is_complete or self._is_closed:
            raise StopIteration
        # A signal may raise an exception after any call. Then this iterator is not used again, and the next one begins
        # at the position, which is set when nothing can keep the batch from being returned.
        batches, self._batches = self._batches, None
        try:
            batches = self._start() if batches is None else batches
            batch, after = next(batches, (None, None))
        except BaseException as error:
            batches = None
            traceback.clear_frames(error.__traceback__)  # a notebook keeps it, and with it the memory of buffers
            raise
        if after is None:
            self._is_complete = True
            raise StopIteration
        self._batches, self._position = batches, after
        return batch

    def close(self) -> None:
        """Ends the reader's threads after their current reads. Dropping the reader does the same."""
        batches, self._batches = self._batches, None
        self._is_closed = True
        if batches is not None:
            batches.close()


def sealed(state: Mapping[str, Any]) -> dict[str, Any]:
    """A reader's state with a checksum, as JSON values."""
    return {**state, "checksum": _checksum(state)}


def unsealed(state: object) -> dict[str, Any]:
    """The state that was sealed. Raises ArgumentError if it was changed, or is no state."""
    content = dict(state) if isinstance(state, Mapping) else {}
    try:
        is_intact = content.pop("checksum", None) == _checksum(content)
    except (TypeError, ValueError):  # not JSON
        is_intact = False
    if not is_intact:
        raise ArgumentError(
            f"state is {shown(state)}, not a state as a reader's state() returned it: it was changed or cut, or comes "
            "from an earlier version. Use an unchanged one, or start again without a state."
        )
    return content


def _checksum(content: Mapping[str, Any]) -> int:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False, default=operator.index)
    return crc32c(canonical.encode())


class TokenMemory:
    """Memory for some rows of each array that is read.

    targets: the memory to fill by array name: [rows, slots, D] of activations, their scales if any, and features.
    side_arrays: the same for side arrays and outputs, [rows, slots] or [rows, slots, k].
    order: the slots that batches use, in order. users: the tasks that still read the memory.

    Batches are gathered from the same memory by slot: [S, D], or [S, K, D] for `STACKED` activations, [S] or [S, k].
    """

    def __init__(self, layout: StoreLayout, reading: Reading, rows: int) -> None:
        """Allocates the memory, whose pages are used only when it is filled."""
        slots, stack, names = layout.slots, reading.options.stack, list(reading.names)
        specs = {spec.name: spec for spec in (*layout.arrays, *layout.scales, *layout.outputs)}
        self.rows = rows
        self.targets: dict[str, np.ndarray] = {}
        self._slots: dict[str, np.ndarray] = {}
        groups = {STACKED: names}
        if layout.scales:
            groups[scale_name(STACKED)] = [scale_name(name) for name in names]
        separate = [] if stack else [name for group in groups.values() for name in group]
        for stacked, group in groups.items() if stack else ():
            first = specs[group[0]]
            memory = np.empty((rows, slots, len(group), first.width), first.dtype)
            self.targets |= {name: memory[:, :, k] for k, name in enumerate(group)}
            self._slots[stacked] = memory.reshape(-1, *memory.shape[2:])
        for name in (*separate, *reading.sparse):
            self.targets[name] = np.empty((rows, slots, specs[name].width), specs[name].dtype)
            self._slots[name] = self.targets[name].reshape(-1, specs[name].width)
        self.side_arrays = {spec.name: np.empty((rows, slots), spec.dtype) for spec in SIDE_ARRAYS}
        for spec in (spec for spec in layout.outputs if spec.name in reading.outputs):
            self.side_arrays[spec.name] = np.empty((rows, *layout.shard_shape(spec)[1:]), spec.dtype)
        self._slots |= {name: side.reshape(-1, *side.shape[2:]) for name, side in self.side_arrays.items()}
        self.order: Int64[np.ndarray, " n"] = np.empty(0, np.int64)
        self.users: list[Future[None]] = []

    @property
    def num_bytes(self) -> int:
        return sum(values.nbytes for values in self._slots.values())

    def wait_for_users(self) -> None:
        """Waits until no task uses the memory, so that it can be filled again."""
        for user in self.users:
            with suppress(CancelledError):
                user.exception()  # waits; the error is raised with the task's result
        self.users = []

    def chosen(
        self, token_filter: TokenFilter, num_rows: int, more: Mapping[str, Bool[np.ndarray, "rows slots"]] | None = None
    ) -> Int64[np.ndarray, " n"]:
        """The slots in the first `num_rows` rows that pass the filter's conditions on side arrays. `more`: further side
        arrays for the filter."""
        inputs = self.side_arrays | dict(more or {})
        return np.flatnonzero(token_filter.keeps({name: side[:num_rows] for name, side in inputs.items()}))

    def within_norms(self, token_filter: TokenFilter, slots: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " kept"]:
        """Those of `slots` whose activations pass the filter's condition on norms."""
        flat = {name: target.reshape(-1, target.shape[2]) for name, target in self.targets.items()}
        for name in [name for name in flat if scale_name(name) in flat]:
            flat[name] = Dequantised(flat[name], flat.pop(scale_name(name)))
        return token_filter.within_norms(slots, flat)

    def like(self, num_tokens: int) -> dict[str, np.ndarray]:
        """New memory for a batch of `num_tokens` tokens, by name."""
        slots = self._slots.items()
        try:
            return {name: aligned_empty((num_tokens, *values.shape[1:]), values.dtype) for name, values in slots}
        except (MemoryError, ValueError) as error:
            raise ArgumentError(f"batch_size is {num_tokens}: a batch would not fit into memory. Lower it.") from error

    def gather(self, start: int, stop: int, out: Mapping[str, np.ndarray], at: int) -> None:
        """Copies the tokens `order[start:stop]` to `out[at:]`."""
        slots = self.order[start:stop]
        for name, values in self._slots.items():
            # As integers, for which numpy releases the GIL. mode="raise" would copy twice.
            integers = f"u{values.itemsize}"
            target = out[name][at : at + len(slots)]
            np.take(values.view(integers), slots, axis=0, out=target.view(integers), mode="clip")


class Gatherer:
    """Makes batches from filled memory."""

    def __init__(
        self,
        reading: Reading,
        drop_last: bool,
        limit: Callable[[int], int | None] = lambda epoch: None,
        refuse_empty: Callable[[int], None] = lambda tokens: None,
    ) -> None:
        """drop_last: drop the last batch of an epoch if it is not full. limit: the maximum number of batches of an
        epoch. refuse_empty: called with the number of tokens of an epoch that has no batch."""
        self._reading = reading
        self._drop_last = drop_last
        self._limit = limit
        self._refuse_empty = refuse_empty

    def batches(
        self, filled: Iterator[tuple[Buffer, TokenMemory, bool]], start: Position
    ) -> Iterator[tuple[Batch, Position]]:
        """The batches from position `start` on, each with the position after it. `AHEAD` of them are gathered ahead.

        filled: the buffers from that position on, each with its filled memory and whether it is the epoch's last. When
        the next one is requested, the memory's `users` are complete.
        """
        gatherers = ThreadPoolExecutor(GATHERING_THREADS, thread_name_prefix="gather")
        ahead: deque[tuple[Future[Batch], Position]] = deque()
        try:
            for batch in self._submitted(gatherers, filled, start):
                ahead.append(batch)
                if len(ahead) > AHEAD:
                    yield _done(ahead.popleft())
            while ahead:
                yield _done(ahead.popleft())
        finally:  # without waiting, since a dropped reader may be garbage-collected in one of these threads
            gatherers.shutdown(wait=False, cancel_futures=True)

    def _submitted(
        self, gatherers: ThreadPoolExecutor, filled: Iterator[tuple[Buffer, TokenMemory, bool]], begin: Position
    ) -> Iterator[tuple[Future[Batch], Position]]:
        """Batches whose gathering has been started, each with the position after it."""
        size = self._reading.batch_size
        finish = self._finisher()
        batch, start = begin.batch, begin.token
        limit = self._limit(begin.epoch)
        parts, num_tokens, out = [], 0, {}
        for buffer, memory, is_last in filled:
            stop = start
            while stop < len(memory.order) and batch != limit:
                start, stop = stop, min(stop + size - num_tokens, len(memory.order))
                out = out or memory.like(size)
                parts.append(gatherers.submit(memory.gather, start, stop, out, num_tokens))
                memory.users.append(parts[-1])
                num_tokens += stop - start
                if num_tokens == size:
                    batch += 1
                    after = Position(buffer.epoch, batch, buffer.index, stop, buffer.begin)
                    yield gatherers.submit(finish, parts, out, num_tokens), after
                    parts, num_tokens, out = [], 0, {}
            start = 0
            if is_last:
                after = Position(buffer.epoch + 1)
                if num_tokens and not self._drop_last:
                    yield gatherers.submit(finish, parts, out, num_tokens), after
                elif not batch:
                    self._refuse_empty(num_tokens)
                parts, num_tokens, out, batch = [], 0, {}, 0
                limit = self._limit(buffer.epoch + 1)

    def _finisher(self) -> Callable[[Sequence[Future[None]], dict[str, np.ndarray], int], Batch]:
        """A function that turns gathered memory into a batch: normalises, casts, and converts to the framework."""
        reading, options = self._reading, self._reading.options
        convert = converter(options.framework, options.dtype, options.pin_memory)
        convert_side = converter(options.framework, STORED if options.dtype == STORED else None, options.pin_memory)

        def normalised(name: str, values: np.ndarray) -> np.ndarray:
            if name not in reading.normalisation:
                return values
            result = reading.normalisation[name].apply(values)
            return result.astype(values.dtype) if options.dtype == STORED else result

        def finish(parts: Sequence[Future[None]], out: dict[str, np.ndarray], num_tokens: int) -> Batch:
            for part in parts:
                part.result()
            out = {name: values[:num_tokens] for name, values in out.items()}
            for name in [name for name in out if scale_name(name) in out]:
                out[name] = dequantised(out[name], out.pop(scale_name(name)))
            side_arrays = {spec.name: convert_side(out.pop(spec.name)) for spec in SIDE_ARRAYS}
            more = {name: convert_side(out.pop(name)) for name in {*reading.sparse, *reading.outputs}}
            side_arrays["outputs"] = {name: more[name] for name in options.outputs}
            side_arrays["features"] = feature_batches(reading.features, more, options.framework)
            if not options.stack:
                activations = ByName((name, convert(normalised(name, values))) for name, values in out.items())
                return Batch(activations[reading.names[0]] if reading.single else activations, **side_arrays)
            stacked = out[STACKED]
            if reading.normalisation:
                stacked = np.stack([normalised(name, stacked[:, k]) for k, name in enumerate(reading.names)], axis=1)
            return Batch(convert(stacked), **side_arrays)

        return finish


def sample_statistics(batches: Iterator[Batch], num_tokens: int) -> dict[str, Statistics]:
    """Statistics over the first `num_tokens` tokens, by array name. The batches' activations must be by name.

    Raises ValueError if there are no tokens.
    """
    parts: list[dict[str, Statistics]] = []
    while num_tokens > 0 and (batch := next(batches, None)) is not None:
        parts.append({name: token_statistics(values[:num_tokens]) for name, values in batch.activations.items()})
        num_tokens -= len(batch.tokens)
    if not parts:
        raise ArgumentError("no token passes the filter, so there is nothing to sample")
    return {name: merge(part[name] for part in parts) for name in parts[0]}


def _done(started: tuple[Future[Batch], Position]) -> tuple[Batch, Position]:
    return started[0].result(), started[1]
