"""Norms of activations, and bringing these to zero mean and unit variance. Shapes: n tokens, D features."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32
from numpy.typing import DTypeLike


@dataclass(frozen=True)
class Normalisation:
    """activation -> (activation - mean) * scale, in float32. mean, scale: [D] or scalars."""

    mean: Float32[np.ndarray, "*D"]
    scale: Float32[np.ndarray, "*D"]

    def apply(self, activations: np.ndarray, dtype: DTypeLike = None) -> np.ndarray:
        """Normalised activations [n, D], in float32 unless `dtype` is given."""
        values = activations.astype(np.float32)
        values -= self.mean
        values *= self.scale
        return values if dtype is None else values.astype(dtype, copy=False)


def l2_norms(activations: np.ndarray) -> Float32[np.ndarray, " n"]:
    """The L2 norm of each row of [n, D], in float32."""
    values = activations.astype(np.float32)
    return np.sqrt(np.einsum("nd,nd->n", values, values))
