"""Parts of a leaf, read from a checkpoint in pieces, so that the host holds little more than the parts."""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np

from pipeline.core.host import aligned_empty
from pipeline.models.checkpoints.checkpoint import Checkpoint
from pipeline.models.leaves import Leaf
from pipeline.models.quantised_weights import grouped_shape, quantise

_PIECE_BYTES = 16 << 20  # read at a time, counted in float32
_MAX_REQUESTS = 16  # concurrent requests per leaf in remote files; up to four leaves are read at a time

Index = tuple[slice, ...]
"""A part of a leaf: the index that `jax.make_array_from_callback` passes."""


def read_leaf(checkpoint: Checkpoint, leaf: Leaf, dtype: np.dtype, indices: Sequence[Index]) -> list[list[np.ndarray]]:
    """Reads parts of a leaf in `dtype`. If the leaf is quantised, there is a second list: the parts' scales. A scale is
    that of the whole output channel or group, also if a part contains only some of its inputs.

    Only items (see `exchange.py`) that the parts cover are read, each once."""
    arrays = [_empty(_shape(leaf.shape, index), leaf, dtype) for index in indices]
    num_stacks, axis = len(leaf.stack_shape), leaf.order.index(0)  # our axis that is HF's first
    num_axes = len(leaf.scale_shape) - num_stacks  # of scales
    is_whole = divides_scales(leaf)  # GPT-2: only the whole tensor contains whole channels
    step = leaf.axes[0] if is_whole else _items_at_once(leaf)
    by_items: dict[str, list[int]] = {}  # the numbers of parts with the same items
    for number, index in enumerate(indices):
        by_items.setdefault(repr((index[:num_stacks], is_whole or index[num_stacks + axis])), []).append(number)
    for numbers in by_items.values():
        index = indices[numbers[0]]
        items = range(leaf.axes[0])[slice(None) if is_whole else index[num_stacks + axis]]
        tensors = np.arange(len(leaf.tensors)).reshape(leaf.stack_shape)[index[:num_stacks]]
        places = [(tensor, first) for tensor in np.ndindex(tensors.shape) for first in range(0, len(items), step)]
        pieces = [(int(tensors[tensor]), items[first : first + step]) for tensor, first in places]
        for (tensor, first), values in zip(places, _read_pieces(checkpoint, leaf, pieces), strict=True):
            converted = _converted(values, leaf)
            rows = (slice(None),) * axis + (slice(first, first + step),)
            for number in numbers:
                inside = list(indices[number][num_stacks:])
                inside[axis] = inside[axis] if is_whole else slice(None)
                for array, part, axes in zip(arrays[number], converted, (None, num_axes), strict=False):
                    array[tensor][rows[:axes]] = part[tuple(inside[:axes])]
    return [list(parts) for parts in zip(*arrays, strict=True)]


def read_items(checkpoint: Checkpoint, leaf: Leaf, dtype: np.dtype, items: range) -> list[np.ndarray]:
    """Reads items of a leaf (see `exchange.py`) [items, *other axes], in our order of axes: one array in `dtype`, and
    if the leaf is quantised, the scales."""
    size, axis = leaf.axes[0], leaf.order.index(0)
    shape = (len(items), *(leaf.axes[axis] for axis in leaf.order if axis != 0))
    arrays = _empty(_stored_shape(shape, leaf), leaf, dtype)
    pieces, start = [], items.start
    while start < items.stop:
        tensor, first = divmod(start, size)
        pieces.append((tensor, range(size)[first : first + min(_items_at_once(leaf), items.stop - start)]))
        start += len(pieces[-1][1])
    position = 0
    for values in _read_pieces(checkpoint, leaf, pieces):
        for array, part in zip(arrays, _converted(np.moveaxis(values, axis, 0), leaf), strict=True):
            array[position : position + len(part)] = part
        position += len(part)
    return arrays


def divides_scales(leaf: Leaf) -> bool:
    """Whether an item (see `exchange.py`) of a quantised leaf has only some of the inputs that share a scale."""
    return bool(leaf.quantised) and leaf.order.index(0) >= len(leaf.order) - leaf.inputs_per_scale


def _empty(shape: tuple[int, ...], leaf: Leaf, dtype: np.dtype) -> list[np.ndarray]:
    """The array of values; if the leaf is quantised, also of scales."""
    scales = [np.empty(shape[: -leaf.inputs_per_scale], np.float32)] if leaf.quantised else []
    return [aligned_empty(shape, dtype), *scales]


def _converted(values: np.ndarray, leaf: Leaf) -> Sequence[np.ndarray]:
    if not leaf.quantised:
        return [values]
    return quantise(values.reshape(_stored_shape(values.shape, leaf)), leaf.inputs_per_scale, leaf.quantised)


def _stored_shape(shape: tuple[int, ...], leaf: Leaf) -> tuple[int, ...]:
    return grouped_shape(shape) if leaf.is_grouped else shape


def _shape(shape: tuple[int, ...], index: Index) -> tuple[int, ...]:
    return tuple(len(range(*part.indices(size))) for part, size in zip(index, shape, strict=True))


def _items_at_once(leaf: Leaf) -> int:
    """Quantising makes copies, so its pieces are half as large."""
    item_bytes = 4 * leaf.item_rows * math.prod(leaf.hf_shape[1:])
    return max(1, (_PIECE_BYTES // 2 if leaf.quantised else _PIECE_BYTES) // item_bytes)


def _read_pieces(checkpoint: Checkpoint, leaf: Leaf, pieces: Iterable[tuple[int, range]]) -> Iterator[np.ndarray]:
    """The pieces' values, in order. A piece is a tensor's number and some of its items. Reads of remote files run
    concurrently."""
    reads = (partial(_read_items, checkpoint, leaf, *piece) for piece in pieces)
    if not checkpoint.is_remote:
        yield from (read() for read in reads)
        return
    with ThreadPoolExecutor(_MAX_REQUESTS, thread_name_prefix="weights") as pool:
        pending: deque[Future[np.ndarray]] = deque()
        for read in reads:
            pending.append(pool.submit(read))
            if len(pending) == _MAX_REQUESTS:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def _read_items(checkpoint: Checkpoint, leaf: Leaf, tensor: int, items: range) -> np.ndarray:
    """Consecutive items of the first of `leaf.axes`, in our order of axes."""
    first = 0 if leaf.num_outer else leaf.part.start
    start, stop = (first + item * leaf.item_rows for item in (items.start, items.stop))
    values = checkpoint.rows(checkpoint.full_name(leaf.tensors[tensor]), start, stop)
    if leaf.num_outer:
        outer = (len(items), *leaf.axes[1 : leaf.num_outer])
        values = values.reshape(*outer, leaf.item_size, -1)[..., leaf.part.start : leaf.part.stop, :]
    return values.reshape(len(items), *leaf.axes[1:]).transpose(leaf.order)
