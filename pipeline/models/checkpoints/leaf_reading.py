"""Parts of a leaf, read from a checkpoint in pieces, so that the host holds little more than the parts."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np

from pipeline.core.memory import aligned_empty
from pipeline.models.checkpoints.checkpoint import Checkpoint
from pipeline.models.int8_weights import quantise
from pipeline.models.leaves import Leaf

_PIECE_BYTES = 16 << 20  # of float32, read at a time
_REQUESTS_AT_ONCE = 16  # for pieces of a leaf in remote files; up to four leaves are read at a time

Index = tuple[slice, ...]
"""A part of a leaf: the index that `jax.make_array_from_callback` passes."""


def read_leaf(checkpoint: Checkpoint, leaf: Leaf, dtype: np.dtype, indices: Sequence[Index]) -> list[np.ndarray]:
    """Parts of a leaf. Only the rows of HF's first axis that they cover are read, those of several parts once."""
    parts = [aligned_empty(_shape(leaf.shape, index), dtype) for index in indices]
    for at, place, piece, chosen in _pieces(checkpoint, leaf, indices):
        for number, part in chosen.items():
            parts[number][at][place] = piece[part]
    return parts


def read_int8(
    checkpoint: Checkpoint, leaf: Leaf, indices: Sequence[Index]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Parts of a leaf as int8, and the scales of their output channels, each that of the whole channel."""
    values = [aligned_empty(_shape(leaf.shape, index), np.int8) for index in indices]
    scales = [np.empty(part.shape[: -leaf.num_inputs], np.float32) for part in values]
    num_outputs = len(leaf.axes) - leaf.num_inputs
    for at, place, piece, chosen in _pieces(checkpoint, leaf, indices, whole_channels=True):
        piece, piece_scale = quantise(piece, leaf.num_inputs)
        for number, part in chosen.items():
            values[number][at][place] = piece[part]
            scales[number][at][place[:num_outputs]] = piece_scale[part[:num_outputs]]
    return values, scales


def _shape(shape: tuple[int, ...], index: Index) -> tuple[int, ...]:
    return tuple(len(range(*part.indices(size))) for part, size in zip(index, shape, strict=True))


def _pieces(
    checkpoint: Checkpoint, leaf: Leaf, indices: Sequence[Index], whole_channels: bool = False
) -> Iterator[tuple[tuple[int, ...], Index, np.ndarray, dict[int, Index]]]:
    """The rows of HF's first axis that the parts need, a few at a time: the index of their tensor in these parts'
    stacks, and theirs in the tensor's part; their values in our order of axes; by a part's number its index in them.

    With `whole_channels`, a piece has all inputs of its output channels: where HF's first axis is an input axis
    (GPT-2), the piece is the whole tensor.
    """
    num_stacks, axis = len(leaf.stack_shape), leaf.order.index(0)  # ours, of HF's first
    is_whole = whole_channels and axis >= len(leaf.axes) - leaf.num_inputs
    piece_bytes = _PIECE_BYTES // 2 if whole_channels else _PIECE_BYTES  # quantising makes copies
    item_bytes = 4 * len(leaf.rows) * math.prod(leaf.hf_shape[1:]) // leaf.axes[0]
    step = leaf.axes[0] if is_whole else max(1, piece_bytes // item_bytes)
    with_same_rows: dict[str, list[int]] = {}
    for number, index in enumerate(indices):
        with_same_rows.setdefault(repr((index[:num_stacks], is_whole or index[num_stacks + axis])), []).append(number)
    for numbers in with_same_rows.values():
        index = indices[numbers[0]]
        items = range(leaf.axes[0])[slice(None) if is_whole else index[num_stacks + axis]]
        tensors = np.arange(len(leaf.tensors)).reshape(leaf.stack_shape)[index[:num_stacks]]
        places = [(at, first) for at in np.ndindex(tensors.shape) for first in range(0, len(items), step)]
        read = partial(_read_items, checkpoint, leaf)
        reads = (partial(read, tensors[at], items[first : first + step]) for at, first in places)
        for (at, first), piece in zip(places, _called(reads, checkpoint.is_remote), strict=True):
            place = (slice(None),) * axis + (slice(first, first + step),)
            chosen = {number: list(indices[number][num_stacks:]) for number in numbers}
            for part in chosen.values():
                part[axis] = part[axis] if is_whole else slice(None)
            yield at, place, piece, {number: tuple(part) for number, part in chosen.items()}


def _read_items(checkpoint: Checkpoint, leaf: Leaf, tensor: int, items: range) -> np.ndarray:
    """Consecutive items of the first of HF's axes, taken apart, in our order of axes."""
    rows_per_item = len(leaf.rows) // leaf.axes[0]
    rows = leaf.rows[items.start * rows_per_item : items.stop * rows_per_item]
    values = checkpoint.rows(checkpoint.full_name(leaf.tensors[tensor]), rows.start, rows.stop)
    if leaf.item_rows is not None:
        values = values.reshape(len(items), leaf.item_rows, -1)[:, leaf.item_part]
    return values[..., leaf.columns].reshape(len(items), *leaf.axes[1:]).transpose(leaf.order)


def _called(reads: Iterable[Callable[[], np.ndarray]], is_remote: bool) -> Iterator[np.ndarray]:
    """What the reads return, in order; of remote files several are under way."""
    if not is_remote:
        yield from (read() for read in reads)
        return
    with ThreadPoolExecutor(_REQUESTS_AT_ONCE, thread_name_prefix="weights") as pool:
        under_way: deque[Future[np.ndarray]] = deque()
        for read in reads:
            under_way.append(pool.submit(read))
            if len(under_way) == _REQUESTS_AT_ONCE:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
