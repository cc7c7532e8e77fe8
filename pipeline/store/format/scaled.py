"""Activations stored in one byte: symmetric, with a float32 scale per token, or per token and group of features.

activation = value * scale, in float32. The scales of array x are in array x.scale. Values [..., D] have scales
[..., G]: one for every D / G neighbouring features.
"""

import numpy as np
from jaxtyping import Float32, Num

LARGEST = {"int8": 127, "float8_e4m3fn": 448}
"""The scaled dtypes, and the value that the greatest magnitude of a group becomes."""


def scale_name(array: str) -> str:
    return f"{array}.scale"


def dequantised(values: Num[np.ndarray, "*n D"], scales: Float32[np.ndarray, "*n G"]) -> Float32[np.ndarray, "*n D"]:
    """Activations from stored values and their scales."""
    grouped_shape = (*scales.shape, values.shape[-1] // scales.shape[-1])
    activations = values.reshape(grouped_shape).astype(np.float32)
    activations *= scales[..., None]
    return activations.reshape(values.shape)
