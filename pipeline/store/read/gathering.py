"""Memory for token slots, and the batches gathered from it ahead of training.

The memory is filled from stores or by a model; `TokenMemory.order` then contains the slots to use, in order.
Shapes: n tokens per batch, K keys, D features per activation, k features stored per token, S slots per row.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

import ml_dtypes  # noqa: F401  numpy then knows "bfloat16"
import numpy as np
from jaxtyping import Bool, Int32, Int64

from pipeline.core.errors import ArgumentError
from pipeline.core.host import aligned_empty
from pipeline.core.sites import ByName
from pipeline.store.format.layout import LABELS_ARRAY, SIDE_ARRAYS, dequantised, scale_name
from pipeline.store.format.statistics import Statistics, l2_norms, merge, token_statistics
from pipeline.store.read.frameworks import STORED, FeatureBatch, converter, feature_batches
from pipeline.store.read.iterating import Position
from pipeline.store.read.options import BatchArrays, BatchOptions, TokenFilter

AHEAD = 4  # how many batches are gathered ahead
GATHERING_THREADS = 2

_TOKENS_AT_A_TIME = 1024  # few enough for the processor's caches

STACKED = "stacked"  # the name of a batch's memory [n, K, D], of which the activations' memory is parts


@dataclass(frozen=True)
class Batch:
    """n tokens, without padding, as arrays of numpy, JAX or torch.

    activations: [n, D] if `keys` was one activation; else by array name, or [n, K, D] if stacked.
    segments: the number of the token's document window in its row. positions: start at 0 in each window.
    documents: the document's number; with JAX this is a numpy array, since JAX has no int64 by default.
    outputs: those requested by the argument `outputs`, [n] or [n, k] by array name.
    features: with `features=True`, by the SAE's name: "blocks.5.resid_post" if one SAE encodes that array.
    labels: with `labels=True`, [n, 5]: message, exchange, role, part, and whether the assistant wrote the token.

    From aligned stores, `activations`, `outputs` and `features` are tuples with one entry per store.
    """

    activations: Any
    tokens: Int32[np.ndarray, " n"]
    segments: Int32[np.ndarray, " n"]
    positions: Int32[np.ndarray, " n"]
    documents: Int64[np.ndarray, " n"]
    outputs: Mapping[str, Any] = field(default_factory=dict)
    features: Mapping[str, FeatureBatch] = field(default_factory=dict)
    labels: Any = None


class TokenMemory:
    """Memory for some rows of the arrays of one store or stream, or of several with the same tokens.

    arrays: the memory to fill, [rows, S, ...], for each store by array name; the side arrays are the first store's.
    start: the position of a reader before the first token of what was filled. is_last: whether this ends its epoch.
    order: the slots that batches use, in order. users: the tasks that still read the memory.
    """

    start = Position()
    is_last = False

    def __init__(self, stores: Sequence[BatchArrays], rows: int) -> None:
        """Allocates the memory, whose pages are used only when it is filled."""
        self.rows = rows
        self._stores = stores
        self.arrays: list[dict[str, np.ndarray]] = []
        for number, arrays in enumerate(stores):
            specs = {spec.name: spec for spec in arrays.layout.all_arrays}
            sides = [spec.name for spec in SIDE_ARRAYS] if number == 0 else []
            shapes = {
                name: (rows, arrays.layout.slots, *specs[name].token_shape)
                for name in (*arrays.by_piece, *arrays.by_block, *sides)
            }
            self.arrays.append({name: np.empty(shape, specs[name].dtype) for name, shape in shapes.items()})
        self.order: Int64[np.ndarray, " n"] = np.empty(0, np.int64)
        self.users: list[Future[None]] = []

    def wait_for_users(self) -> None:
        """Waits until no task uses the memory, so that it can be filled again."""
        for user in self.users:
            with suppress(CancelledError):
                user.exception()  # waits; the error is raised with the task's result
        self.users = []

    def chosen(
        self, token_filter: TokenFilter, num_rows: int, more: Mapping[str, Bool[np.ndarray, "rows S"]] | None = None
    ) -> Int64[np.ndarray, " n"]:
        """The slots in the first `num_rows` rows that pass the filter's conditions on side arrays. `more`: further side
        arrays for the filter."""
        inputs = self.arrays[0] | dict(more or {})
        return np.flatnonzero(token_filter.keeps({name: side[:num_rows] for name, side in inputs.items()}))

    def within_norms(self, token_filter: TokenFilter, slots: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " kept"]:
        """Those of `slots` whose activations pass the filter's condition on norms."""
        flat = {name: values.reshape(-1, *values.shape[2:]) for name, values in self.arrays[0].items()}
        for name, (least, greatest) in token_filter.norms.items():
            norms = np.empty(len(slots), np.float32)
            for start in range(0, len(slots), _TOKENS_AT_A_TIME):
                some = slots[start : start + _TOKENS_AT_A_TIME]
                values = flat[name][some]
                if scale_name(name) in flat:
                    values = dequantised(values, flat[scale_name(name)][some])
                norms[start : start + len(some)] = l2_norms(values)
            slots = slots[(norms >= least) & (norms <= greatest)]
        return slots

    def like(self, num_tokens: int, stack: bool) -> list[dict[str, np.ndarray]]:
        """New memory for a batch of `num_tokens` tokens, for each store by name. stack: that of activations is a part
        of `STACKED`."""
        memory: list[dict[str, np.ndarray]] = []
        for store, arrays in zip(self._stores, self.arrays, strict=True):
            batch = {}
            if stack:
                first, shape = arrays[store.names[0]], (num_tokens, len(store.names))
                batch[STACKED] = aligned_empty((*shape, *first.shape[2:]), first.dtype)
                batch |= {name: batch[STACKED][:, k] for k, name in enumerate(store.names)}
            for name in arrays.keys() - batch.keys():
                batch[name] = aligned_empty((num_tokens, *arrays[name].shape[2:]), arrays[name].dtype)
            memory.append(batch)
        return memory

    def gather(self, start: int, stop: int, out: Sequence[Mapping[str, np.ndarray]], at: int) -> None:
        """Copies the tokens `order[start:stop]` to `out[at:]`."""
        slots = self.order[start:stop]
        for arrays, batch in zip(self.arrays, out, strict=True):
            for name, values in arrays.items():
                # As integers, for which numpy releases the GIL. mode="raise" would copy twice.
                integers = values.reshape(-1, *values.shape[2:]).view(f"u{values.itemsize}")
                part = batch[name][at : at + len(slots)].view(integers.dtype)
                if part.flags.c_contiguous:
                    np.take(integers, slots, axis=0, out=part, mode="clip")
                    continue
                for first in range(0, len(slots), _TOKENS_AT_A_TIME):  # numpy would copy all of a stacked part
                    some = slice(first, first + _TOKENS_AT_A_TIME)
                    part[some] = np.take(integers, slots[some], axis=0, mode="clip")


def gathered(
    filled: Iterator[TokenMemory],
    start: Position,
    stores: Sequence[BatchArrays],
    options: BatchOptions,
    limit: Callable[[int], int | None] = lambda epoch: None,
) -> Iterator[tuple[Batch, Position]]:
    """The batches from position `start` on, each with the position after it. `AHEAD` of them are gathered ahead.

    filled: memory filled from that position on. When the next one is requested, it may be filled again, after its
    `users` are complete. limit: the maximum number of batches of an epoch.
    """
    gatherers = ThreadPoolExecutor(GATHERING_THREADS, thread_name_prefix="gather")
    ahead: deque[tuple[Future[Batch], Position]] = deque()
    try:
        for batch in _submitted(gatherers, filled, start, _batch_maker(stores, options), options, limit):
            ahead.append(batch)
            if len(ahead) > AHEAD:
                gathered, after = ahead.popleft()
                yield gathered.result(), after
        for gathered, after in ahead:
            yield gathered.result(), after
    finally:  # without waiting, since a dropped reader may be garbage-collected in one of these threads
        gatherers.shutdown(wait=False, cancel_futures=True)


def _submitted(
    gatherers: ThreadPoolExecutor,
    filled: Iterator[TokenMemory],
    begin: Position,
    make_batch: Callable[..., Batch],
    options: BatchOptions,
    limit: Callable[[int], int | None],
) -> Iterator[tuple[Future[Batch], Position]]:
    """Batches whose gathering has been started, each with the position after it."""
    size, batch, start, most = options.batch_size, begin.batch, begin.token, limit(begin.epoch)
    parts, num_tokens, out = [], 0, []
    for memory in filled:
        stop = start
        while stop < len(memory.order) and batch != most:
            start, stop = stop, min(stop + size - num_tokens, len(memory.order))
            out = out or memory.like(size, options.stack)
            parts.append(gatherers.submit(memory.gather, start, stop, out, num_tokens))
            memory.users.append(parts[-1])
            num_tokens += stop - start
            if num_tokens == size:
                batch += 1
                after = memory.start._replace(batch=batch, token=stop)
                yield gatherers.submit(make_batch, parts, out, num_tokens), after
                parts, num_tokens, out = [], 0, []
        start = 0
        if memory.is_last:
            following = Position(memory.start.epoch + 1)
            if num_tokens and not options.drop_last:
                yield gatherers.submit(make_batch, parts, out, num_tokens), following
            elif not batch and options.epochs is None:  # it would never end
                refuse_epoch(num_tokens, options)
            parts, num_tokens, out, batch = [], 0, [], 0
            most = limit(following.epoch)


def _batch_maker(
    stores: Sequence[BatchArrays], options: BatchOptions
) -> Callable[[Sequence[Future[None]], list[dict[str, np.ndarray]], int], Batch]:
    """A function that turns gathered memory into a batch: normalises, casts, and converts to the framework."""
    convert = converter(options.framework, options.dtype, options.pin_memory)
    convert_side = converter(options.framework, STORED if options.dtype == STORED else None, options.pin_memory)

    def activations(arrays: BatchArrays, out: Mapping[str, np.ndarray]) -> Any:
        if options.stack and not (arrays.layout.scales or arrays.normalisation):
            return convert(out[STACKED])
        values = {name: out[name] for name in arrays.names}
        if arrays.layout.scales:
            values = {name: dequantised(values[name], out[scale_name(name)]) for name in values}
        for name, normalisation in arrays.normalisation.items():
            normalised = normalisation.apply(values[name])
            values[name] = normalised.astype(values[name].dtype) if options.dtype == STORED else normalised
        if options.stack:
            return convert(np.stack(list(values.values()), axis=1))
        values = ByName((name, convert(array)) for name, array in values.items())
        return values[arrays.names[0]] if arrays.is_single else values

    def make_batch(parts: Sequence[Future[None]], out: list[dict[str, np.ndarray]], num_tokens: int) -> Batch:
        for part in parts:
            part.result()
        out = [{name: values[:num_tokens] for name, values in arrays.items()} for arrays in out]
        contents = []
        for arrays, values in zip(stores, out, strict=True):
            names = {*arrays.sparse, *arrays.by_block} - {LABELS_ARRAY.name}
            more = {name: convert_side(values[name]) for name in names}
            outputs = {name: more[name] for name in arrays.outputs}
            features = feature_batches(arrays.features, more, options.framework)
            contents.append((activations(arrays, values), outputs, features))
        parts = contents[0] if len(stores) == 1 else zip(*contents, strict=True)
        names = [spec.name for spec in (*SIDE_ARRAYS, LABELS_ARRAY) if spec.name in out[0]]
        side_arrays = {name: convert_side(out[0][name]) for name in names}
        return Batch(**dict(zip(("activations", "outputs", "features"), parts, strict=True)), **side_arrays)

    return make_batch


def refuse_epoch(num_tokens: int, options: BatchOptions) -> NoReturn:
    """Raises ArgumentError for an epoch with so few tokens that it has no batch."""
    raise ArgumentError(
        f"an epoch has {num_tokens} tokens for one of {options.world} readers, less than one batch of "
        f"{options.batch_size}. Use fewer readers, a smaller batch_size, or a token_filter that passes more."
    )


def sample_statistics(batches: Iterator[Batch], num_tokens: int) -> dict[str, Statistics]:
    """Statistics over the first `num_tokens` tokens, by array name. The batches' activations must be by name.

    Raises ValueError if there are no tokens.
    """
    parts: list[dict[str, Statistics]] = []
    while num_tokens > 0 and (batch := next(batches, None)) is not None:
        parts.append({name: token_statistics(values[:num_tokens]) for name, values in batch.activations.items()})
        num_tokens -= len(batch.tokens)
    if not parts:
        raise ArgumentError("no token passes the filter: nothing to sample. Allow more tokens.")
    return {name: merge(part[name] for part in parts) for name in parts[0]}
