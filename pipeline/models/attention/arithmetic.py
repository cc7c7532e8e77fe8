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


def map_parts(compute: Callable[[PyTree], PyTree], inputs: PyTree, size: int, axis: int = 1) -> PyTree:
    """`compute(inputs)` for arrays of the same length along `axis`, called on parts of `size` in sequence. The last
    part is padded with zeros."""
    length = jax.tree.leaves(inputs)[0].shape[axis]
    if length <= size:
        return compute(inputs)
    padding = -length % size

    def split(x: Array) -> Array:
        x = jnp.pad(x, [(0, padding if number == axis else 0) for number in range(x.ndim)])
        return jnp.moveaxis(x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :]), axis, 0)

    def join(x: Array) -> Array:
        x = jnp.moveaxis(x, 0, axis)
        x = x.reshape(*x.shape[:axis], length + padding, *x.shape[axis + 2 :])
        return jax.lax.slice_in_dim(x, 0, length, axis=axis)

    return jax.tree.map(join, jax.lax.map(compute, jax.tree.map(split, inputs)))


def mlp_positions(length: int) -> int:
    """The number of a row's positions that an MLP processes at a time: all up to 32,768, else equal parts of at most
    16,384."""
    return length if length <= _LONG_ROW else -(-length // -(-length // _LONGEST_PART))
