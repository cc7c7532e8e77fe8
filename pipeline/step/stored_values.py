"""Activations in their stored dtype, by a cast or with scales, and the statistics of what is stored. On the devices.

Letters: B rows, S slots of a row for activations, D features of an activation, G groups of features that share a scale,
W sum of the activations' widths."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Num, Shaped

from pipeline.store.format.layout import LARGEST


class Stored(NamedTuple):
    """Activations in their stored dtype; scaled ones have `scales`. `squared_error`, if requested, is summed over each
    row's finite tokens."""

    values: Shaped[Array, "B S D"]
    scales: Float32[Array, "B S G"] | None
    squared_error: Float32[Array, " B"] | None


def to_stored(x: Num[Array, "B S D"], dtype: str, group: int | None, with_error: bool) -> Stored:
    """Converts x to `dtype`. `group` is the number of features that share a scale; None: all of a token's features."""
    values, scales = _scaled(x, dtype, group or x.shape[-1]) if dtype in LARGEST else (x.astype(dtype), None)
    stored = Stored(values, scales, None)
    if not with_error:
        return stored
    token_errors = jnp.sum(jnp.square(numbers(stored) - x.astype(jnp.float32)), axis=-1)
    return stored._replace(squared_error=jnp.sum(jnp.where(is_finite(stored), token_errors, 0), axis=-1))


def _scaled(x: Float[Array, "B S D"], dtype: str, group: int) -> tuple[Num[Array, "B S D"], Float32[Array, "B S G"]]:
    grouped, largest = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, group), LARGEST[dtype]
    scales = jnp.max(jnp.abs(grouped), axis=-1) / largest  # NaN or infinite if a value is
    values = jnp.clip(grouped / jnp.where(scales > 0, scales, 1)[..., None], -largest, largest)
    values = jnp.where(jnp.isfinite(scales)[..., None], values, 0)
    rounded = jnp.round(values) if jnp.issubdtype(dtype, jnp.integer) else values  # a cast to floats rounds
    return rounded.astype(dtype).reshape(x.shape), scales


def is_finite(stored: Stored) -> Bool[Array, "B S"]:
    """Whether all of a token's values are finite."""
    return jnp.isfinite(stored.values if stored.scales is None else stored.scales).all(axis=-1)


def numbers(stored: Stored) -> Float32[Array, "B S D"]:
    """The numbers that are stored, in float32. Not a cast and its inverse, because XLA may remove both."""
    values = stored.values
    if stored.scales is not None:
        grouped = jax.lax.optimization_barrier(values).reshape(*stored.scales.shape, -1).astype(jnp.float32)
        return (grouped * stored.scales[..., None]).reshape(values.shape)
    if not jnp.issubdtype(values.dtype, jnp.floating):
        return values.astype(jnp.float32)
    info, wide = jnp.finfo(values.dtype), values.astype(jnp.float32)
    rounded = jax.lax.reduce_precision(wide, info.nexp, info.nmant)
    if info.nexp == jnp.finfo(jnp.float32).nexp:
        return rounded
    step = float(info.smallest_subnormal)  # reduce_precision makes subnormal numbers 0
    return jnp.where(jnp.abs(wide) < float(info.smallest_normal), jnp.round(wide / step) * step, rounded)


class RowStatistics(NamedTuple):
    """Statistics over each row's valid, finite tokens.

    The features of all keys are concatenated along W, since every additional output costs time on the host.
    """

    moments: Float32[Array, "B 2 W"]  # each feature's mean, and the sum of squared deviations from it
    norms: Float32[Array, "B keys S"]  # each token's norm; 0 in empty slots, NaN if a value is not finite
    squared_errors: Float32[Array, "B keys"] | None = None  # error of storing; for scaled dtypes only


def row_statistics(
    finished: Sequence[Stored], stored: Bool[Array, "B S"], finite: Sequence[Bool[Array, "B S"]]
) -> RowStatistics:
    """`finished` are the stored activations by key; `stored` marks the slots with a token; `finite` marks, per key, the
    slots whose values are all finite."""
    moments, norms = [], []
    for activation, is_finite in zip(finished, finite, strict=True):
        used = (stored & is_finite)[:, :, None]
        x = jnp.where(used, numbers(activation), 0)
        mean = jnp.sum(x, axis=1) / jnp.maximum(jnp.sum(used, axis=1), 1)
        m2 = jnp.sum(jnp.where(used, jnp.square(x - mean[:, None]), 0), axis=1)
        moments.append(jnp.stack([mean, m2], axis=1))
        norms.append(jnp.where(is_finite, jnp.linalg.norm(x, axis=-1), jnp.nan))
    errors = [activation.squared_error for activation in finished if activation.squared_error is not None]
    squared_errors = jnp.stack(errors, axis=1) if errors else None
    return RowStatistics(jnp.concatenate(moments, axis=-1), jnp.stack(norms, axis=1), squared_errors)
