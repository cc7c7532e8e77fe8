"""Converts activations to their stored dtype on the devices, by a cast or by rounding to int8 with scales.

Letters: B rows, S slots of a row, D features of an activation, G groups of features that share a scale.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int8, Num, Shaped

from pipeline.store.format.int8 import DTYPE as INT8
from pipeline.store.format.int8 import MAX


class Stored(NamedTuple):
    """Activations in their stored dtype. `scales` belong to int8. `squared_error`, if requested, is summed over each
    row's finite tokens."""

    values: Shaped[Array, "B S D"]
    scales: Float32[Array, "B S G"] | None
    squared_error: Float32[Array, " B"] | None


def to_stored(x: Num[Array, "B S D"], dtype: str, group: int | None, with_error: bool) -> Stored:
    """Converts x to `dtype`. `group` is the number of features that share an int8 scale; None: all of a token's
    features."""
    stored = Stored(*_int8(x, group or x.shape[-1]), None) if dtype == INT8 else Stored(x.astype(dtype), None, None)
    if not with_error:
        return stored
    token_errors = jnp.sum(jnp.square(numbers(stored) - x.astype(jnp.float32)), axis=-1)
    return stored._replace(squared_error=jnp.sum(jnp.where(is_finite(stored), token_errors, 0), axis=-1))


def _int8(x: Float[Array, "B S D"], group: int) -> tuple[Int8[Array, "B S D"], Float32[Array, "B S G"]]:
    grouped = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, group)
    scales = jnp.max(jnp.abs(grouped), axis=-1) / MAX  # NaN or infinite if a value is
    integers = jnp.round(grouped / jnp.where(scales > 0, scales, 1)[..., None])
    integers = jnp.where(jnp.isfinite(scales)[..., None], jnp.clip(integers, -MAX, MAX), 0)
    return integers.astype(jnp.int8).reshape(x.shape), scales


def is_finite(stored: Stored) -> Bool[Array, "B S"]:
    """Whether all of a token's values are finite."""
    return jnp.isfinite(stored.values if stored.scales is None else stored.scales).all(axis=-1)


def numbers(stored: Stored) -> Float32[Array, "B S D"]:
    """The numbers that are stored, in float32. Not a cast and its inverse, because XLA may remove both."""
    values = stored.values
    if stored.scales is not None:
        grouped = values.reshape(*stored.scales.shape, -1).astype(jnp.float32)
        return (grouped * stored.scales[..., None]).reshape(values.shape)
    if not jnp.issubdtype(values.dtype, jnp.floating):
        return values.astype(jnp.float32)
    info = jnp.finfo(values.dtype)
    if info.bits == 8:  # not all 8-bit formats follow IEEE 754, as reduce_precision assumes
        return jax.lax.optimization_barrier(values).astype(jnp.float32)
    return jax.lax.reduce_precision(values.astype(jnp.float32), info.nexp, info.nmant)
