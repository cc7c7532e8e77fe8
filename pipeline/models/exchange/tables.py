"""Vectors of token ids, from a table whose rows are divided over devices, inside `shard_map`.

Letters: B rows and T positions on a device, V entries of the table on a device, n devices, c entries.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

_PART_BYTES = 128 << 20  # of the table, gathered at a time


def look_up(
    table: Float[Array, " V *D"], ids: Int32[Array, "B T"], axis: str, columns: slice = slice(None)
) -> Float[Array, "B T *columns"]:
    """The `columns` of each id's vector. `table` is this device's part, along the mesh's `axis`. An id outside of all
    parts has the vector 0. Exact: each vector is copied from one device.

    With few tokens the devices exchange vectors, otherwise parts of the table, whichever are fewer.
    """
    if ids.size > len(table):
        return _from_parts(table, ids, axis, columns)
    rows = jax.lax.all_gather(ids, axis, tiled=True) - jax.lax.axis_index(axis) * len(table)
    vectors = _where((rows >= 0) & (rows < len(table)), table[rows, columns], 0)
    return jax.lax.psum_scatter(vectors, axis, tiled=True)


def _from_parts(
    table: Float[Array, " V *D"], ids: Int32[Array, "B T"], axis: str, columns: slice
) -> Float[Array, "B T *columns"]:
    """All devices gather c entries of each at a time."""
    num_rows, devices = len(table), jax.lax.axis_size(axis)
    entry_bytes = math.prod(table.shape[1:]) * table.dtype.itemsize
    size = max(1, min(num_rows, _PART_BYTES // (entry_bytes * devices)))
    device, row = ids // num_rows, ids % num_rows

    def copy_found(number: Int32[Array, ""], vectors: Array) -> Array:
        first = jnp.minimum(number * size, num_rows - size)
        part = jax.lax.all_gather(jax.lax.dynamic_slice_in_dim(table, first, size), axis)
        is_here = (device >= 0) & (device < devices) & (row >= first) & (row < first + size)
        return _where(is_here, part[device, row - first, columns], vectors)

    vectors = jnp.zeros_like(table[ids, columns])
    return jax.lax.fori_loop(0, -(-num_rows // size), copy_found, vectors)


def _where(mask: Array, vectors: Array, others: Array | int) -> Array:
    return jnp.where(mask.reshape(*mask.shape, *[1] * (vectors.ndim - mask.ndim)), vectors, others)
