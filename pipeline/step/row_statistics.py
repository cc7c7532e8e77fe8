"""Statistics that the devices compute with the activations: those of each row.

Letters: B rows, D width of a key, W widths of all keys together, S slots of a row for activations.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32

from pipeline.step.storage_dtypes import Stored, numbers


class RowStatistics(NamedTuple):
    """Of each row's valid, finite tokens: the part of the statistics that the devices compute.

    The keys' features lie one after the other in W. In one array each, since every output costs the host time.
    """

    moments: Float32[Array, "B 2 W"]  # of each feature the mean, and the sum of squared deviations from it
    norms: Float32[Array, "B keys S"]  # of each token; 0 where there is none, NaN where a value is not finite
    squared_errors: Float32[Array, "B keys"] | None = None  # of dtypes of one byte: what storing changes


def row_statistics(
    finished: Sequence[Stored], stored: Bool[Array, "B S"], finite: Sequence[Bool[Array, "B S"]]
) -> RowStatistics:
    """`finished`: what is stored of each key; `stored`: the slots that hold a token; `finite`, of each key: those of
    them whose values are all finite."""
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
