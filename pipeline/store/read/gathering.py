"""Memory for token slots, and the batches gathered from it ahead of training.

The memory is filled from a store or by a model; `TokenMemory.order` then contains the slots to use, in order.
Shapes: n tokens per batch, K keys, D features per activation, k features stored per token, S slots of a memory (slots
per row times rows).
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes  # noqa: F401  numpy then knows "bfloat16"
import numpy as np
from jaxtyping import Bool, Int32, Int64

from pipeline.core.memory import aligned_empty
from pipeline.store.format.int8 import Dequantised, dequantised, scale_name
from pipeline.store.format.layout import SIDE_ARRAYS, StoreLayout
from pipeline.store.format.statistics import Statistics, merge, token_statistics
from pipeline.store.read.batch_options import Reading
from pipeline.store.read.features import FeatureBatch, feature_batches
from pipeline.store.read.filters import TokenFilter
from pipeline.store.read.frameworks import converter
from pipeline.store.read.order import Buffer

AHEAD = 4  # how many batches are gathered ahead
GATHERING_THREADS = 2

STACKED = "stacked"  # the name of the memory [S, K, D] shared by arrays of the same width


@dataclass(frozen=True)
class Batch:
    """n tokens, without padding, as arrays of numpy, JAX or torch.

    activations: [n, D] if `keys` was one activation; else by array name, or [n, K, D] if stacked.
    segments: the number of the token's document window in its row. positions: start at 0 in each window.
    documents: the document's number; with JAX this is a numpy array, since JAX has no int64 by default.
    outputs: those requested by `BatchOptions.outputs`, [n] or [n, k] by array name.
    features: with `BatchOptions.features`, by the SAE's name: "blocks.5.resid_post" if one SAE encodes that array.
    """

    activations: Any
    tokens: Int32[np.ndarray, " n"]
    segments: Int32[np.ndarray, " n"]
    positions: Int32[np.ndarray, " n"]
    documents: Int64[np.ndarray, " n"]
    outputs: Mapping[str, Any] = field(default_factory=dict)
    features: Mapping[str, FeatureBatch] = field(default_factory=dict)


@dataclass(frozen=True)
class Position:
    """A reader's position: after `batch` batches of epoch `epoch`; the next batch begins at `token` of `buffer`."""

    epoch: int = 0
    batch: int = 0
    buffer: int = 0
    token: int = 0


class TokenMemory:
    """Memory for some rows of each array that is read.

    targets: the memory to fill by array name: [rows, slots, D] of activations, their scales (int8), and features.
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
        return {name: aligned_empty((num_tokens, *values.shape[1:]), values.dtype) for name, values in slots}

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
                    after = Position(buffer.epoch, batch, buffer.index, stop)
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
        convert = converter(options.framework)

        def normalised(name: str, values: np.ndarray) -> np.ndarray:
            if name in reading.normalisation:
                return reading.normalisation[name].apply(values, options.dtype)
            return values if options.dtype is None else values.astype(options.dtype, copy=False)

        def finish(parts: Sequence[Future[None]], out: dict[str, np.ndarray], num_tokens: int) -> Batch:
            for part in parts:
                part.result()
            out = {name: values[:num_tokens] for name, values in out.items()}
            for name in [name for name in out if scale_name(name) in out]:
                out[name] = dequantised(out[name], out.pop(scale_name(name)))
            side_arrays = {spec.name: convert(out.pop(spec.name)) for spec in SIDE_ARRAYS}
            more = {name: convert(out.pop(name)) for name in {*reading.sparse, *reading.outputs}}
            side_arrays["outputs"] = {name: more[name] for name in options.outputs}
            side_arrays["features"] = feature_batches(reading.features, more, options.framework)
            if not options.stack:
                activations = {name: convert(normalised(name, values)) for name, values in out.items()}
                return Batch(activations[reading.names[0]] if reading.single else activations, **side_arrays)
            stacked = out[STACKED]
            if reading.normalisation:
                keys = [normalised(name, stacked[:, k]) for k, name in enumerate(reading.names)]
                stacked = np.stack(keys, axis=1)
            elif options.dtype is not None:
                stacked = stacked.astype(options.dtype, copy=False)
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
        raise ValueError("no token passes the filter, so there is nothing to sample")
    return {name: merge(part[name] for part in parts) for name in parts[0]}


def _done(started: tuple[Future[Batch], Position]) -> tuple[Batch, Position]:
    return started[0].result(), started[1]
