"""Rows whose positions are divided over the devices along the mesh's `context` axis.

With N devices, a row is divided into 2N chunks, and device i holds chunks i and 2N - 1 - i, so that causal attention is
as much work on every device. In arrays on the devices, the chunks of a row are in this order.

Letters: B rows, T positions, t = T / N positions of a device.
"""

from collections.abc import Iterable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int32, PyTree, Shaped

MESH_AXES = ("data", "context", "tensor")
_AXIS = "context"


def context_axis(mesh: Mesh | AbstractMesh, length: int) -> str | None:
    """The mesh axis that divides `length` slots of each row; None if they are not divisible into chunks of one size."""
    context = mesh.shape[_AXIS]
    return _AXIS if context > 1 and length % (2 * context) == 0 else None


def device_chunks(context: int, length: int) -> list[slice]:
    """The chunks of a row of `length` slots, in the order in which they are on the devices."""
    numbers = (number for device in range(context) for number in (device, 2 * context - 1 - device))
    return _slices(numbers, length // (2 * context))


def row_chunks(context: int, length: int) -> list[slice]:
    """The inverse of `device_chunks`: where each chunk of a row is in an array on the devices."""
    return _slices((*range(0, 2 * context, 2), *range(2 * context - 1, 0, -2)), length // (2 * context))


def _slices(numbers: Iterable[int], size: int) -> list[slice]:
    return [slice(number * size, (number + 1) * size) for number in numbers]


def in_row_order(x: Shaped[Array, "B T ..."], mesh: Mesh) -> Shaped[Array, "B T ..."]:
    """Traced: the values of all positions in the order of the rows, on every device along `context`."""
    context = mesh.shape[_AXIS]
    if context == 1:
        return x
    x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec("data")))
    return reordered(x, row_chunks(context, x.shape[1]))


def in_device_order(x: Shaped[Array, "B T ..."], mesh: Mesh) -> Shaped[Array, "B T ..."]:
    """Traced: the inverse of `in_row_order`."""
    context = mesh.shape[_AXIS]
    if context == 1:
        return x
    x = reordered(x, device_chunks(context, x.shape[1]))
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec("data", _AXIS)))


def take_positions(x: Shaped[Array, "B T *D"], positions: Int32[Array, "B S"], mesh: Mesh) -> Shaped[Array, "B S *D"]:
    """Traced: the values at some positions of each row. The slots are divided along `context` if they are divisible."""
    if mesh.shape[_AXIS] == 1:
        return _take(x, positions)
    divides = context_axis(mesh, positions.shape[1]) is not None

    def on_device(x: Array, positions: Array) -> Array:
        if divides:
            positions = jax.lax.all_gather(positions, _AXIS, axis=1, tiled=True)
        size = x.shape[1] // 2
        first, second = ((positions - number * size, positions // size == number) for number in chunk_numbers())
        indices = jnp.where(first[1], first[0], second[0] + size)
        is_here = (first[1] | second[1]).reshape(*positions.shape, *[1] * (x.ndim - 2))
        taken = jnp.where(is_here, _take(x, jnp.clip(indices, 0, 2 * size - 1)), 0)
        if divides:
            return jax.lax.psum_scatter(taken, _AXIS, scatter_dimension=1, tiled=True)
        return jax.lax.psum(taken, _AXIS)

    by_context, slots = PartitionSpec(None, _AXIS), PartitionSpec(None, _AXIS if divides else None)
    mapped = jax.shard_map(
        on_device, mesh=mesh, axis_names={_AXIS}, in_specs=(by_context, slots), out_specs=slots, check_vma=False
    )
    if x.dtype == bool:
        return mapped(x.astype(jnp.int32), positions) != 0
    return mapped(x, positions)


def _take(x: Shaped[Array, "B T *D"], positions: Int32[Array, "B S"]) -> Shaped[Array, "B S *D"]:
    return jnp.take_along_axis(x, positions[:, :, None] if x.ndim == 3 else positions, axis=1)


def reordered(x: Shaped[Array, "B T ..."], chunks: Sequence[slice]) -> Shaped[Array, "B T ..."]:
    """Traced: x with its chunks in another order."""
    return jnp.concatenate([x[:, chunk] for chunk in chunks], axis=1)


def chunk_numbers() -> tuple[Int32[Array, ""], Int32[Array, ""]]:
    """Traced, on a device: the numbers of its two chunks."""
    number = jax.lax.axis_index(_AXIS)
    return number, 2 * jax.lax.axis_size(_AXIS) - 1 - number


def gathered_halves(x: PyTree) -> tuple[PyTree, PyTree]:
    """Traced, on a device: the halves of the rows, [B, T / 2, ...], from the devices' arrays [B, t, ...]. Second chunks
    are gathered in reverse order of the devices."""
    order = list(range(jax.lax.axis_size(_AXIS)))

    def gather(x: Shaped[Array, "B chunk ..."], order: list[int]) -> Shaped[Array, "B half ..."]:
        return jax.lax.all_gather(x, _AXIS, axis_index_groups=[order], axis=1, tiled=True)

    first, second = halves(x)
    return jax.tree.map(partial(gather, order=order), first), jax.tree.map(partial(gather, order=order[::-1]), second)


def chunk_ends(x: PyTree, size: int) -> tuple[PyTree, PyTree]:
    """Traced, on a device: the last `size` positions before each of its chunks, [B, size, ...]; 0 before the row."""
    context = jax.lax.axis_size(_AXIS)
    forward = [(device, device + 1) for device in range(context - 1)]
    backward = [(to, source) for source, to in forward]
    is_last = jax.lax.axis_index(_AXIS) == context - 1  # its two chunks are neighbours
    first, second = (jax.tree.map(lambda x: x[:, x.shape[1] - size :], half) for half in halves(x))

    def before_second(first: Array, second: Array) -> Array:
        return jnp.where(is_last, first, jax.lax.ppermute(second, _AXIS, backward))

    return jax.lax.ppermute(first, _AXIS, forward), jax.tree.map(before_second, first, second)


def halves(x: PyTree) -> tuple[PyTree, PyTree]:
    """The two halves of arrays [B, T, ...] along T: of a device's arrays, its two chunks."""
    size = jax.tree.leaves(x)[0].shape[1] // 2
    return jax.tree.map(lambda x: x[:, :size], x), jax.tree.map(lambda x: x[:, size:], x)


def joined(first: PyTree, second: PyTree) -> PyTree:
    """Concatenates arrays along their positions."""
    return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), first, second)
