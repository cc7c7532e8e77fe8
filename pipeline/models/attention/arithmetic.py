"""Arithmetic in float32, for models of any dtype; and in parts, so that intermediate arrays are small."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

_LONG_ROW, _LONGEST_PART = 32768, 16384  # positions

float32_einsum = partial(jnp.einsum, precision="highest")
"""A product of float32 arrays. At the default precision, accelerators would round its inputs."""


def scaled(x: Float[Array, "*D"], factor: float) -> Float[Array, "*D"]:
    """x * factor, rounded once. In `x * factor`, JAX would first round the factor to x's dtype."""
    return (x.astype(jnp.float32) * factor).astype(x.dtype)


def map_parts(
    compute: Callable[[PyTree], PyTree], inputs: PyTree, size: int, axis: int = 1, devices: int = 1
) -> PyTree:
    """`compute(inputs)` for arrays of the same length along `axis`, called on parts of `size` in sequence. The last
    part is padded with zeros. If several `devices` divide the axis, each part contains `size` of each device."""
    length = jax.tree.leaves(inputs)[0].shape[axis] // devices
    if length <= size:
        return compute(inputs)
    num_parts = -(-length // size)

    def split(x: Array) -> Array:
        x = x.reshape(*x.shape[:axis], devices, length, *x.shape[axis + 1 :])
        x = jnp.pad(x, [(0, num_parts * size - length if number == axis + 1 else 0) for number in range(x.ndim)])
        x = jnp.moveaxis(x.reshape(*x.shape[: axis + 1], num_parts, size, *x.shape[axis + 2 :]), axis + 1, 0)
        return x.reshape(*x.shape[: axis + 1], devices * size, *x.shape[axis + 3 :])

    def join(x: Array) -> Array:
        x = x.reshape(*x.shape[: axis + 1], devices, size, *x.shape[axis + 2 :])
        x = jnp.moveaxis(x, 0, axis + 1)
        x = x.reshape(*x.shape[: axis + 1], num_parts * size, *x.shape[axis + 3 :])
        x = jax.lax.slice_in_dim(x, 0, length, axis=axis + 1)
        return x.reshape(*x.shape[:axis], devices * length, *x.shape[axis + 2 :])

    return jax.tree.map(join, jax.lax.map(compute, jax.tree.map(split, inputs)))


def mlp_positions(length: int) -> int:
    """The number of a row's positions that an MLP processes at a time: all up to 32,768, else equal parts of at most
    16,384."""
    return length if length <= _LONG_ROW else -(-length // -(-length // _LONGEST_PART))
