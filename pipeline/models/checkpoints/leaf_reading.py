"""Parts of a leaf, read from a checkpoint in pieces, so that the host holds little more than the parts.

Leaves that fsdp divides along another axis than a file's first are read without reading all rows in every process: each
reads other items, and the devices exchange their parts. An item is an index of the first axis of a tensor in the file;
items are numbered through all tensors of the leaf.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array

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

    Only items that the parts cover are read, each once."""
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
    """Reads items of a leaf [items, *other axes], in our order of axes: one array in `dtype`, and
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
    """Whether an item of a quantised leaf has only some of the inputs that share a scale."""
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


@dataclass(frozen=True)
class Exchange:
    """How the processes share the items of a leaf. The processes of a group hold the whole leaf together."""

    leaf: Leaf
    mesh: Mesh  # the leaf's, as groups, processes of a group, and the devices of a process along data and tensor
    split: int  # the axis that fsdp divides, after the leaf's item axis was moved to the front

    @classmethod
    def of(cls, leaf: Leaf, sharding: Sharding) -> Self | None:
        """None if each process can read just what its devices hold: with one process per group, or if the items
        themselves are divided. Also if an item has only some of the inputs that share a scale, and for experts of
        devices that exchange tokens: those that divide one expert are not neighbours."""
        if not isinstance(sharding, NamedSharding) or "data" not in tuple(sharding.spec):
            return None
        if sharding.mesh.axis_names[-2:] != ("data", "tensor"):
            return None
        devices = sharding.mesh.devices
        group, tensor = devices.shape[-2:]
        local = sum(device.process_index == devices.flat[0].process_index for device in devices.flat) // tensor
        axis = tuple(sharding.spec).index("data") - len(leaf.stack_shape)
        item_axis = leaf.order.index(0)
        if group % local or group == local or axis < 0 or axis == item_axis or divides_scales(leaf):
            return None
        mesh = Mesh(devices.reshape(-1, group // local, local, tensor), ("copies", "process", "data", "tensor"))
        return cls(leaf, mesh, axis + (axis < item_axis))

    @property
    def num_items(self) -> int:
        """The items of each process; the last ones may be fewer."""
        return -(-len(self.leaf.tensors) * self.leaf.axes[0] // self.mesh.shape["process"])

    def items(self, process: int) -> range:
        """The items that a process reads."""
        processes = dict.fromkeys(device.process_index for device in self.mesh.devices.flat)
        first = list(processes).index(process) % self.mesh.shape["process"] * self.num_items
        return range(len(self.leaf.tensors) * self.leaf.axes[0])[first : first + self.num_items]

    def on_devices(self, values: np.ndarray) -> Array:
        """The items of all processes, from this process's items [items, *other axes], divided by process."""
        sizes, parts, local = list(values.shape[1:]), self.mesh.shape["process"], self.mesh.shape["data"]
        spec = ["process", *[None] * len(sizes)]
        if self.split < values.ndim:  # not for scales whose inputs are divided
            sizes[self.split - 1 : self.split] = parts, local, sizes[self.split - 1] // (parts * local)
            spec[self.split : self.split + 1] = None, "data", None
        missing = self.num_items - len(values)
        values = np.pad(values, [(0, missing), *[(0, 0)] * (values.ndim - 1)]).reshape(-1, *sizes)
        by_items = NamedSharding(self.mesh, PartitionSpec(*spec))
        shape = (parts * self.num_items, *sizes)
        return jax.make_array_from_callback(shape, by_items, lambda index: values[(slice(None), *index[1:])])

    def exchanged(self, items: Array, sharding: NamedSharding) -> Array:
        """The leaf, or its scales, from the result of `on_devices`. Every process must call it for the same leaves in
        the same order."""
        leaf, split = self.leaf, self.split if "data" in tuple(items.sharding.spec) else None
        shape = (*leaf.stack_shape, leaf.axes[0])
        return _exchange(self.mesh, sharding, shape, leaf.order.index(0), split)(items)


@cache
def _exchange(
    mesh: Mesh, sharding: NamedSharding, shape: tuple[int, ...], item_axis: int, split: int | None
) -> Callable[[Array], Array]:
    """The compiled exchange, from items divided by process to a leaf's sharding. `shape` is that of all items."""

    @jax.jit
    def exchange(x: Array) -> Array:
        if split is not None:
            by_split = PartitionSpec(*[None] * split, "process", "data")
            x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, by_split))
            x = x.reshape(*x.shape[:split], -1, *x.shape[split + 3 :])
        x = x[: math.prod(shape)].reshape(*shape, *x.shape[1:])
        return jax.lax.with_sharding_constraint(jnp.moveaxis(x, len(shape) - 1, len(shape) - 1 + item_axis), sharding)

    return exchange
