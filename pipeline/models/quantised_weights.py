"""Layers' matrices as integers with float32 scales, in int8 one per output channel, in int4 one per group of inputs.

Symmetric: w = values * scale. In int8 the scale maps the channel's largest |w| to 127, in int4 the group's to 7. Norms,
biases and embeddings stay in the compute dtype: norms and biases are small, and rounding an embedding would add its
error to the residual stream before the first layer.

An int4 matrix has the groups of its last input axis as an axis of their own. So TPUs multiply by the scales while they
read the values for a product: compiled for v5e, 8 rows of 1024 with a matrix of [8192, 8192], it needs no temporary
memory, and 256 MiB if the values have the matrix's own shape.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Sharding
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Num

_GROUP = 128  # at most as many neighbouring inputs share a scale; a TPU's vector has 128 lanes
LARGEST = {"int8": 127, "int4": 7}
"""The largest value, by the dtype of the weights."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantisedWeight:
    """A matrix. Its first axes are outputs, its last axes inputs; in a stack, the layer axis comes first."""

    values: Num[Array, "*outputs_inputs"]  # int8, or int4 of `grouped_shape`
    scale: Float32[Array, "..."]  # [*outputs], or of groups: as `values`, without the last axis
    is_grouped: bool = field(default=False, metadata={"static": True})

    def dequantised(self, dtype: DTypeLike) -> Float[Array, "*outputs_inputs"]:
        """Traced: the matrix in a float dtype, of the same shape as `values`."""
        inputs = range(self.scale.ndim, self.values.ndim)
        return (self.values.astype(jnp.float32) * jnp.expand_dims(self.scale, inputs)).astype(dtype)


def stored_dtype(dtype: np.dtype, sharding: Sharding) -> np.dtype:
    """The dtype of a leaf's values: int8 in place of int4 on CPUs, where JAX cannot pass int4 arrays to programs."""
    is_on_cpu = next(iter(sharding.addressable_devices)).platform == "cpu"
    return np.dtype(np.int8) if dtype == ml_dtypes.int4 and is_on_cpu else dtype


def grouped_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a matrix as int4: the last axis becomes groups, as few as there can be, of the same size."""
    size = shape[-1]
    groups = next(number for number in range(-(-size // _GROUP), size + 1) if size % number == 0)
    return (*shape[:-1], groups, size // groups)


def quantise(
    weight: Array | np.ndarray, num_inputs: int, dtype: str = "int8"
) -> tuple[Array | np.ndarray, Array | np.ndarray]:
    """The values of this dtype, as int8, and the scales (float32), which the last `num_inputs` axes share.

    NumPy or JAX arrays, like the weight. A scale is not finite if one of its values is not.
    """
    xp = weight.__array_namespace__()
    inputs = tuple(range(-num_inputs, 0))
    wide = weight.astype(np.float32)
    largest = xp.maximum(wide.max(inputs, keepdims=True), -wide.min(inputs, keepdims=True))
    scale = xp.where(largest == 0, np.float32(1), largest / np.float32(LARGEST[dtype]))
    with np.errstate(invalid="ignore"):
        return xp.rint(wide / scale).astype(np.int8), scale.squeeze(inputs)
