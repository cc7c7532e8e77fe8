"""Activations stored as int8: symmetric, with a float32 scale per token, or per token and group of features.

activation = integer * scale, in float32. The scales of array x are in array x.scale. Integers [..., D] have scales
[..., G]: one for every D / G neighbouring features.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Int, Int8

DTYPE = "int8"
MAX = 127


def scale_name(array: str) -> str:
    return f"{array}.scale"


def dequantised(integers: Int8[np.ndarray, "*n D"], scales: Float32[np.ndarray, "*n G"]) -> Float32[np.ndarray, "*n D"]:
    """Activations from stored integers and their scales."""
    grouped_shape = (*scales.shape, integers.shape[-1] // scales.shape[-1])
    values = integers.reshape(grouped_shape).astype(np.float32)
    values *= scales[..., None]
    return values.reshape(integers.shape)


@dataclass(frozen=True)
class Dequantised:
    """int8 activations of n tokens, dequantised when they are indexed."""

    integers: Int8[np.ndarray, "n D"]
    scales: Float32[np.ndarray, "n G"]

    def __getitem__(self, tokens: Int[np.ndarray, " m"]) -> Float32[np.ndarray, "m D"]:
        return dequantised(self.integers[tokens], self.scales[tokens])
