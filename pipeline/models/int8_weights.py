"""int8: a layer's matrices as integers, with one scale per output channel.

Symmetric: w = values * scale, where the scale maps the channel's largest |w| to 127. Norms, biases and embeddings
stay in the compute dtype: norms and biases are small, and rounding an embedding would add its error to the residual
stream before the first layer.
"""

from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Array, Float32, Int8


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Int8Weight:
    """A matrix. Its first axes are outputs, its last axes inputs; in a stack, the layer axis comes first."""

    values: Int8[Array, "*outputs_inputs"]
    scale: Float32[Array, "*outputs"]


def quantise(weight: Array | np.ndarray, num_inputs: int) -> tuple[Array | np.ndarray, Array | np.ndarray]:
    """The values (int8) and the scale (float32) of a weight whose last `num_inputs` axes are inputs.

    NumPy or JAX arrays, like the weight. A channel with a non-finite value gets a non-finite scale.
    """
    xp = weight.__array_namespace__()
    inputs = tuple(range(-num_inputs, 0))
    wide = weight.astype(np.float32)
    largest = xp.maximum(wide.max(inputs, keepdims=True), -wide.min(inputs, keepdims=True))
    scale = xp.where(largest == 0, np.float32(1), largest / np.float32(127))
    with np.errstate(invalid="ignore"):
        return xp.rint(wide / scale).astype(np.int8), scale.squeeze(inputs)
