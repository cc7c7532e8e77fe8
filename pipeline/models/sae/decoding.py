"""An SAE's decoder, and the error of its reconstruction.

Letters: n tokens, D, F and O as in `spec`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from pipeline.models.sae.params import SAEParams
from pipeline.models.sae.spec import InputScaling, SAESpec


class Reconstruction(NamedTuple):
    """Per token: |x - out|^2, and the cosine similarity of the two, which is 0 if one of them is 0."""

    squared_error: Float32[Array, " *n"]
    cosine: Float32[Array, " *n"]


def decode(
    sae: SAESpec, params: SAEParams, x: Float[Array, "n D"], values: Float32[Array, "n F"], axis: str | None = None
) -> Float32[Array, "n O"]:
    """Decodes the values of all features. If the mesh's `axis` divides the features, `params` and `values` contain this
    device's part."""
    if "feature_scale" in params:
        scale = params["feature_scale"]
        values = jnp.where(scale > 0, values / jnp.where(scale > 0, scale, 1), 0)
    out = jnp.einsum("nF,FO->nO", values.astype(x.dtype), params["w_dec"], preferred_element_type=jnp.float32)
    if axis:
        out = jax.lax.psum(out, axis)
    if "b_out" in params:
        out += params["b_out"]
    wide = x.astype(jnp.float32)
    if sae.undo_scaling:
        match sae.input_scaling:
            case InputScaling.centred:
                out += jnp.mean(wide, axis=-1, keepdims=True)
            case InputScaling.constant_norm:
                out *= jnp.linalg.norm(wide, axis=-1, keepdims=True) / jnp.sqrt(sae.d_in)
            case InputScaling.layer_norm:
                out *= jnp.std(wide, axis=-1, keepdims=True, ddof=1)
                out += jnp.mean(wide, axis=-1, keepdims=True)
    if "w_skip" in params:
        out += jnp.einsum("nD,DO->nO", x, params["w_skip"], preferred_element_type=jnp.float32)
    return out


def measure_reconstruction(x: Float[Array, "n D"], out: Float32[Array, "n D"]) -> Reconstruction:
    """Compares the decoder's output with x."""
    x = x.astype(jnp.float32)
    squared_error = jnp.sum(jnp.square(x - out), axis=-1)
    lengths = jnp.linalg.norm(x, axis=-1) * jnp.linalg.norm(out, axis=-1)
    return Reconstruction(squared_error, jnp.where(lengths > 0, jnp.sum(x * out, axis=-1) / lengths, 0))
