"""Arithmetic in float32, for models of any dtype."""

from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Float

float32_einsum = partial(jnp.einsum, precision="highest")
"""A product of float32 arrays. At the default precision, accelerators would round its inputs."""


def scaled(x: Float[Array, "*D"], factor: float) -> Float[Array, "*D"]:
    """x * factor, rounded once. In `x * factor`, JAX would first round the factor to x's dtype."""
    return (x.astype(jnp.float32) * factor).astype(x.dtype)
