"""What an SAE's decoder makes of its features, and how near that is to the activations.

Letters: n tokens, D, F and O as in `spec`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from pipeline.models.sae.params import SAEParams
from pipeline.models.sae.spec import InputScaling, SAESpec


class Reconstruction(NamedTuple):
    """Of each token: |x - out|^2, and the cosine of the angle between the two, 0 where one has no length."""

    squared_error: Float32[Array, " *n"]
    cosine: Float32[Array, " *n"]


def decode(
    sae: SAESpec, params: SAEParams, x: Float[Array, "n D"], values: Float32[Array, "n F"], axis: str | None = None
) -> Float32[Array, "n O"]:
    """What the decoder makes of the values of all features. `params` and `values` are those of this device's features
    where the mesh's `axis` divides them."""
    if "feature_scale" in params:
        scale = params["feature_scale"]
        values = jnp.where(scale > 0, values / jnp.where(scale > 0, scale, 1), 0)
    out = jnp.einsum("nF,FO->nO", values.astype(x.dtype), params["w_dec"], preferred_element_type=jnp.float32)
    if axis:
        out = jax.lax.psum(out, axis)
    if "b_out" in params:
        out += params["b_out"]
    given = x.astype(jnp.float32)
    if sae.undo_scaling:
        match sae.input_scaling:
            case InputScaling.constant_norm:
                out *= jnp.linalg.norm(given, axis=-1, keepdims=True) / jnp.sqrt(sae.d_in)
            case InputScaling.layer_norm:
                out *= jnp.std(given, axis=-1, keepdims=True, ddof=1)
                out += jnp.mean(given, axis=-1, keepdims=True)
    if "w_skip" in params:
        out += jnp.einsum("nD,DO->nO", x, params["w_skip"], preferred_element_type=jnp.float32)
    return out


def reconstruction_of(x: Float[Array, "n D"], out: Float32[Array, "n D"]) -> Reconstruction:
    """How near `out` is to x."""
    x = x.astype(jnp.float32)
    squared_error = jnp.sum(jnp.square(x - out), axis=-1)
    lengths = jnp.linalg.norm(x, axis=-1) * jnp.linalg.norm(out, axis=-1)
    return Reconstruction(squared_error, jnp.where(lengths > 0, jnp.sum(x * out, axis=-1) / lengths, 0))
