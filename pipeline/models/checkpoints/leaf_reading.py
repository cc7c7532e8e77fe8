"""A part of a leaf, read from a checkpoint in pieces, so that the host holds little more than the part."""

import math
from collections.abc import Iterator

import numpy as np

from pipeline.models.checkpoints.checkpoint import Checkpoint
from pipeline.models.int8_weights import quantise
from pipeline.models.leaves import Leaf

_PIECE_BYTES = 16 << 20  # of float32, read at a time

Index = tuple[slice, ...]
"""A part of a leaf: the index that `jax.make_array_from_callback` passes."""


def read_leaf(checkpoint: Checkpoint, leaf: Leaf, dtype: np.dtype, index: Index) -> np.ndarray:
    """A part of a leaf. Only the rows of HF's first axis that it covers are read."""
    values = _aligned(_shape(leaf.shape, index), dtype)
    for tensor, part in _tensors(leaf, index, values):
        for place, piece, chosen in _pieces(checkpoint, leaf, tensor, index):
            part[place] = piece[chosen]
    return values


def read_int8(checkpoint: Checkpoint, leaf: Leaf, index: Index) -> tuple[np.ndarray, np.ndarray]:
    """A part of a leaf as int8, and the scales of its output channels, each that of the whole channel."""
    values = _aligned(_shape(leaf.shape, index), np.dtype(np.int8))
    scale = np.empty(values.shape[: -leaf.num_inputs], np.float32)
    num_outputs = len(leaf.axes) - leaf.num_inputs
    for (tensor, part), (_, part_scale) in zip(
        _tensors(leaf, index, values), _tensors(leaf, index, scale), strict=True
    ):
        for place, piece, chosen in _pieces(checkpoint, leaf, tensor, index, whole_channels=True):
            piece, piece_scale = quantise(piece, leaf.num_inputs)
            part[place] = piece[chosen]
            part_scale[place[:num_outputs]] = piece_scale[chosen[:num_outputs]]
    return values, scale


def _shape(shape: tuple[int, ...], index: Index) -> tuple[int, ...]:
    return tuple(len(range(*part.indices(size))) for part, size in zip(index, shape, strict=True))


def _tensors(leaf: Leaf, index: Index, array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a part of the leaf, each with its slice of the part's array."""
    stack = leaf.stack_shape
    numbers = np.arange(len(leaf.tensors)).reshape(stack)[index[: len(stack)]]
    return ((leaf.tensors[number], array[place]) for place, number in np.ndenumerate(numbers))


def _pieces(
    checkpoint: Checkpoint, leaf: Leaf, tensor: str, index: Index, whole_channels: bool = False
) -> Iterator[tuple[Index, np.ndarray, Index]]:
    """The rows of HF's first axis that a part needs, a few at a time: their index in the tensor's part, their values in
    our order of axes, and the index of the part in them.

    With `whole_channels`, a piece has all inputs of its output channels: where HF's first axis is an input axis
    (GPT-2), the piece is the whole tensor.
    """
    index = index[len(leaf.stack_shape) :]
    axis = leaf.order.index(0)  # ours, of HF's first
    num_items = leaf.axes[0]
    rows_per_item = len(leaf.rows) // num_items
    item_bytes = 4 * rows_per_item * math.prod(leaf.hf_shape[1:])
    start, stop, items_per_piece = 0, num_items, num_items
    is_divided = not whole_channels or axis < len(index) - leaf.num_inputs
    if is_divided:
        start, stop, _ = index[axis].indices(num_items)
        piece_bytes = _PIECE_BYTES // 2 if whole_channels else _PIECE_BYTES  # quantising makes copies
        items_per_piece = max(1, piece_bytes // item_bytes)
    for first in range(start, stop, items_per_piece):
        last = min(first + items_per_piece, stop)
        rows = leaf.rows[first * rows_per_item : last * rows_per_item]
        values = checkpoint.rows(checkpoint.full_name(tensor), rows.start, rows.stop)
        piece = values[..., leaf.columns].reshape(last - first, *leaf.axes[1:]).transpose(leaf.order)
        if is_divided:
            place = tuple(slice(first - start, last - start) if i == axis else slice(None) for i in range(len(index)))
            chosen = tuple(slice(None) if i == axis else part for i, part in enumerate(index))
            yield place, piece, chosen
        else:
            yield (slice(None),) * len(index), piece, index


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An empty array aligned to 64 bytes, which JAX's CPU backend uses without a copy."""
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(num_bytes + 63, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + num_bytes].view(dtype).reshape(shape)
