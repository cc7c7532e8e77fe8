"""Statistics of each row, which the devices compute with the activations.

Letters: B rows, D width of a key, W sum of the keys' widths, S slots of a row for activations.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32

from pipeline.step.storage_dtypes import Stored, numbers


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
