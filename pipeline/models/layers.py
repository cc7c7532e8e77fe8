"""The layers of a pre-norm decoder, each a pure function of its input and its weights.

Letters: B rows, T positions, D model dim, N heads, K key-value heads, H head dim, F MLP dim.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pipeline.models.architecture import Architecture
from pipeline.models.attention import attention
from pipeline.models.rope import RopeTable, apply_rope
from pipeline.sites import Site

Weights = Mapping[str, Array]
"""One block's weights by our keys (the families' `KEY_TABLE`). A bias that a family lacks is absent."""


@jax.named_scope("norm")
def rms_norm(x: Float[Array, "B T D"], scale: Float[Array, " D"], eps: float) -> Float[Array, "B T D"]:
    """RMSNorm (Zhang & Sennrich, arXiv 1910.07467); normalised in float32, scaled in x's dtype, as HF does."""
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean_square + eps)).astype(x.dtype) * scale


def project(subscripts: str, x: Array, weights: Weights, key: str) -> Array:
    """A linear map by `weights[key]`, with its bias where there is one."""
    y = jnp.einsum(subscripts, x, weights[key])
    bias = weights.get(f"{key}_bias")
    return y if bias is None else y + bias


@jax.named_scope("attention")
def attention_block(
    x: Float[Array, "B T D"],
    weights: Weights,
    arch: Architecture,
    rope: RopeTable,
    segments: Int32[Array, "B T"],
    impl: str,
) -> dict[Site, Array]:
    """Attention's sites for the residual stream x, as far as there are weights; heads in axes [N or K, H]."""
    x = rms_norm(x, weights["norm"], arch.norm_eps)
    sites = {}
    if "q" in weights:
        sites[Site.q] = apply_rope(project("BTD,NHD->BTNH", x, weights, "q"), rope)
    if "k" in weights:
        sites[Site.k] = apply_rope(project("BTD,KHD->BTKH", x, weights, "k"), rope)
    if "v" in weights:
        sites[Site.v] = project("BTD,KHD->BTKH", x, weights, "v")
    if sites.keys() >= {Site.q, Site.k, Site.v}:
        z = attention(sites[Site.q], sites[Site.k], sites[Site.v], segments, causal=True, impl=impl)
        sites[Site.attn_z] = z
        if "o" in weights:
            sites[Site.attn_out] = project("BTNH,DNH->BTD", z, weights, "o")
    return sites


@jax.named_scope("mlp")
def mlp_block(x: Float[Array, "B T D"], weights: Weights, arch: Architecture) -> dict[Site, Array]:
    """The sites of the gated MLP (SwiGLU; Shazeer, arXiv 2002.05202) as far as there are weights."""
    x = rms_norm(x, weights["norm"], arch.norm_eps)
    neurons = jax.nn.silu(project("BTD,FD->BTF", x, weights, "gate")) * project("BTD,FD->BTF", x, weights, "up")
    sites = {Site.mlp_post: neurons}
    if "down" in weights:
        sites[Site.mlp_out] = project("BTF,DF->BTD", neurons, weights, "down")
    return sites
