"""Parts of a leaf, read from a checkpoint in pieces, so that the host holds little more than the parts."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import numpy as np

from pipeline.core.memory import aligned_empty
from pipeline.models.checkpoints.checkpoint import Checkpoint
from pipeline.models.int8_weights import quantise
from pipeline.models.leaves import Leaf

_PIECE_BYTES = 16 << 20  # read at a time, counted in float32
_MAX_REQUESTS = 16  # concurrent requests per leaf in remote files; up to four leaves are read at a time

Index = tuple[slice, ...]
"""A part of a leaf: the index that `jax.make_array_from_callback` passes."""


def read_leaf(
    checkpoint: Checkpoint, leaf: Leaf, dtype: np.dtype | None, indices: Sequence[Index]
) -> list[list[np.ndarray]]:
    """Reads parts of a leaf in `dtype`; if it is None, as int8, with a second list: the scales of the parts' output
    channels. A scale is that of the whole channel, also if a part contains only some of its inputs.

    Only rows of HF's first axis that the parts cover are read, each row once."""
    arrays = [_empty(_shape(leaf.shape, index), leaf, dtype) for index in indices]
    num_axes = len(leaf.axes) - leaf.num_inputs  # of scales
    for piece in _pieces(checkpoint, leaf, indices, whole_channels=dtype is None):
        converted = _converted(piece.values, leaf, dtype)
        for number, index in piece.by_part.items():
            for array, part, axes in zip(arrays[number], converted, (None, num_axes), strict=False):  # values, scales
                array[piece.tensor][piece.rows[:axes]] = part[index[:axes]]
    return [list(parts) for parts in zip(*arrays, strict=True)]


def read_items(checkpoint: Checkpoint, leaf: Leaf, dtype: np.dtype | None, items: range) -> list[np.ndarray]:
    """Reads items of a leaf (see `exchange.py`) [items, *other axes], in our order of axes: one array in `dtype`, or if
    it is None, int8 values and their scales."""
    size, axis = leaf.axes[0], leaf.order.index(0)
    sizes = [leaf.axes[axis] for axis in leaf.order if axis != 0]
    arrays = _empty((len(items), *sizes), leaf, dtype)
    step = max(1, (_PIECE_BYTES if dtype else _PIECE_BYTES // 2) // _item_bytes(leaf))
    pieces, start = [], items.start
    while start < items.stop:
        tensor, first = divmod(start, size)
        pieces.append((tensor, range(size)[first : min(first + step, first + items.stop - start)]))
        start += len(pieces[-1][1])
    position, reads = 0, (partial(_read_items, checkpoint, leaf, *piece) for piece in pieces)
    for values in _call_in_order(reads, checkpoint.is_remote):
        for array, part in zip(arrays, _converted(np.moveaxis(values, axis, 0), leaf, dtype), strict=True):
            array[position : position + len(part)] = part
        position += len(part)
    return arrays


def _empty(shape: tuple[int, ...], leaf: Leaf, dtype: np.dtype | None) -> list[np.ndarray]:
    """The array of values; for int8, also of scales."""
    scales = [] if dtype else [np.empty(shape[: -leaf.num_inputs], np.float32)]
    return [aligned_empty(shape, dtype or np.int8), *scales]


def _converted(values: np.ndarray, leaf: Leaf, dtype: np.dtype | None) -> Sequence[np.ndarray]:
    return [values] if dtype else quantise(values, leaf.num_inputs)


def _shape(shape: tuple[int, ...], index: Index) -> tuple[int, ...]:
    return tuple(len(range(*part.indices(size))) for part, size in zip(index, shape, strict=True))


class _Piece(NamedTuple):
    """Consecutive rows of one tensor, in our order of axes, for the parts that need them."""

    values: np.ndarray
    tensor: tuple[int, ...]  # the tensor's index in the parts' stacks
    rows: Index  # the rows' index in a part of that tensor
    by_part: dict[int, Index]  # part number -> the index of its values in `values`


def _pieces(
    checkpoint: Checkpoint, leaf: Leaf, indices: Sequence[Index], whole_channels: bool = False
) -> Iterator[_Piece]:
    """Reads the rows of HF's first axis that the parts need, a few at a time.

    With `whole_channels`, a piece contains all inputs of its output channels. If HF's first axis is an input axis
    (GPT-2), the piece is then the whole tensor.
    """
    num_stacks, axis = len(leaf.stack_shape), leaf.order.index(0)  # our axis that is HF's first
    is_whole = whole_channels and axis >= len(leaf.axes) - leaf.num_inputs
    piece_bytes = _PIECE_BYTES // 2 if whole_channels else _PIECE_BYTES  # quantising makes copies
    step = leaf.axes[0] if is_whole else max(1, piece_bytes // _item_bytes(leaf))
    by_rows: dict[str, list[int]] = {}  # the numbers of parts with the same rows
    for number, index in enumerate(indices):
        by_rows.setdefault(repr((index[:num_stacks], is_whole or index[num_stacks + axis])), []).append(number)
    for numbers in by_rows.values():
        index = indices[numbers[0]]
        items = range(leaf.axes[0])[slice(None) if is_whole else index[num_stacks + axis]]
        tensors = np.arange(len(leaf.tensors)).reshape(leaf.stack_shape)[index[:num_stacks]]
        starts = [(tensor, first) for tensor in np.ndindex(tensors.shape) for first in range(0, len(items), step)]
        read = partial(_read_items, checkpoint, leaf)
        reads = (partial(read, tensors[tensor], items[first : first + step]) for tensor, first in starts)
        for (tensor, first), values in zip(starts, _call_in_order(reads, checkpoint.is_remote), strict=True):
            rows = (slice(None),) * axis + (slice(first, first + step),)
            by_part = {number: list(indices[number][num_stacks:]) for number in numbers}
            for part in by_part.values():
                part[axis] = part[axis] if is_whole else slice(None)
            yield _Piece(values, tensor, rows, {number: tuple(part) for number, part in by_part.items()})


def _item_bytes(leaf: Leaf) -> int:
    """Bytes of an item in float32."""
    return 4 * len(leaf.rows) * math.prod(leaf.hf_shape[1:]) // leaf.axes[0]


def _read_items(checkpoint: Checkpoint, leaf: Leaf, tensor: int, items: range) -> np.ndarray:
    """Consecutive items of the first of `leaf.axes`, in our order of axes."""
    rows_per_item = len(leaf.rows) // leaf.axes[0]
    rows = leaf.rows[items.start * rows_per_item : items.stop * rows_per_item]
    values = checkpoint.rows(checkpoint.full_name(leaf.tensors[tensor]), rows.start, rows.stop)
    if leaf.item_rows is not None:
        values = values.reshape(len(items), leaf.item_rows, -1)[:, leaf.item_part]
    return values[..., leaf.columns].reshape(len(items), *leaf.axes[1:]).transpose(leaf.order)


def _call_in_order(reads: Iterable[Callable[[], np.ndarray]], is_remote: bool) -> Iterator[np.ndarray]:
    """The results of the reads, in order. Reads of remote files run concurrently."""
    if not is_remote:
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
