"""The layers of a transformer, each a pure function of its input and its weights.

A layer has the norms, biases and gates that its weights contain (the families' `KEY_TABLE`):

    norm        before the block                 post_norm   after it, before its output is added to the stream
    q_norm      of queries, after projection     sum_norm    of the stream, after the addition (post-norm models)
    k_norm      of keys, after projection        *_bias      of the weight or norm with that name
    gate        in an MLP, multiplies the neurons; in attention, its sigmoid multiplies the heads' outputs

Letters: B rows, T positions, D model dim, N heads, K key-value heads, H head dim, W head dim of values, F MLP dim,
R rotary dims, C = 3 for q, k and v, p dims of per-layer inputs.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypedDict

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32, Num

from pipeline.core.sites import Site
from pipeline.models.architecture import Activation, Architecture, LatentAttention, LayerKind, Norm
from pipeline.models.attention.arithmetic import map_parts, mlp_positions, scaled
from pipeline.models.attention.latent import Latent
from pipeline.models.attention.pattern import attention_entropy, attention_pattern
from pipeline.models.attention.spec import Attend, AttentionInputs, AttentionSpec
from pipeline.models.quantised_weights import QuantisedWeight
from pipeline.models.rope import RopeTable, rotate_pairs

BlockWeights = Mapping[str, Array | QuantisedWeight]
"""One block's weights by our keys, without those that the family lacks. Matrices may be quantised."""


class Rows(NamedTuple):
    """A layer's inputs other than the residual stream. Segment 0 is padding."""

    segments: Int32[Array, "B T"]
    chunks: Int32[Array, "B T"]  # the segments of local layers: with chunked attention, each chunk is a segment
    ropes: tuple[RopeTable, RopeTable] | None  # for global layers, for local layers
    selected: Int32[Array, "B S"] | None = None  # query positions of `attn_pattern`, or -1; None: not captured
    shared: tuple[Float[Array, "B T K H"], Float[Array, "B T K W"]] | None = None  # an earlier layer's keys and values
    layer_input: Float[Array, "B T p"] | None = None  # the layer's per-layer input
    query_scales: Float32[Array, "B T 1 1"] | None = None  # of `Architecture.query_scaling`


class LayerWeights(TypedDict, total=False):
    """One layer's weights. A DeltaNet, Mamba 2 or a convolution takes the place of attention, except for its norm. A
    layer with one block has the norm before it in `attention`, also before an MLP."""

    attention: BlockWeights
    delta: BlockWeights
    conv: BlockWeights
    mlp: BlockWeights


ACTIVATIONS = {
    Activation.silu: jax.nn.silu,
    Activation.gelu: partial(jax.nn.gelu, approximate=False),
    Activation.gelu_tanh: partial(jax.nn.gelu, approximate=True),
    Activation.relu: jax.nn.relu,
    Activation.relu2: lambda x: jnp.square(jax.nn.relu(x)),
}


@jax.named_scope("norm")
def norm(x: Array, weights: BlockWeights, key: str, arch: Architecture) -> Array:
    """RMSNorm (Zhang & Sennrich, arXiv 1910.07467) or LayerNorm over the axes of `weights[key]`, in float32; over the
    last axis without that weight."""
    scale = weights.get(key)
    axes = (-1,) if scale is None else tuple(range(-scale.ndim, 0))
    wide = x.astype(jnp.float32)
    if arch.norm in (Norm.layer, Norm.layer_plain):
        wide -= jnp.mean(wide, axes, keepdims=True)
    wide = normalised(wide, axes, arch)
    match arch.norm:
        case Norm.rms:
            return wide.astype(x.dtype) * scale
        case Norm.rms_wide:
            wide *= scale
        case Norm.rms_plus_one:
            wide *= 1 + scale.astype(jnp.float32)
        case Norm.layer:
            wide, bias = wide * scale, weights.get(f"{key}_bias")
            wide = wide if bias is None else wide + bias
    return wide.astype(x.dtype)


def normalised(x: Float32[Array, "*B D"], axes: tuple[int, ...], arch: Architecture) -> Float32[Array, "*B D"]:
    """x divided by its root mean square over these axes."""
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axes, keepdims=True) + arch.norm_eps)


def norm_without_weight(x: Float[Array, "*B D"], arch: Architecture) -> Float[Array, "*B D"]:
    """RMSNorm over the last axis, in float32."""
    return normalised(x.astype(jnp.float32), (-1,), arch).astype(x.dtype)


def norm_if_any(x: Array, weights: BlockWeights, key: str, arch: Architecture) -> Array:
    is_plain = arch.norm is Norm.layer_plain and key == "norm"
    return norm(x, weights, key, arch) if is_plain or key in weights else x


def project(x: Float[Array, "B T *inputs"], weights: BlockWeights, key: str) -> Float[Array, "B T *outputs"]:
    """Multiplies x by `weights[key]`, [*outputs, *inputs], and adds the bias if there is one."""
    y, bias = _multiply(x, weights[key], _product), weights.get(f"{key}_bias")
    return y if bias is None else y + bias


def _multiply(x: Array, weight: Array | QuantisedWeight, product: Callable[..., Array]) -> Array:
    """`product` of x [B, T, ...] and a weight. Scales of output channels broadcast over the product's last axes."""
    if not isinstance(weight, QuantisedWeight):
        return product(x, weight)
    if weight.is_grouped:
        return product(x.reshape(*x.shape[:-1], *weight.values.shape[-2:]), weight.dequantised(x.dtype))
    # int8 values are exact in every float dtype; the scale is float32
    return (product(x, weight.values.astype(x.dtype), jnp.float32) * weight.scale).astype(x.dtype)


def _product_of_heads(
    z: Num[Array, "B T N *W"], weight: Num[Array, "D N *W"], dtype: DTypeLike | None = None
) -> Num[Array, "B T N D"]:
    """Each head's contribution to the output of attention, before the bias."""
    z, weight = z.reshape(*z.shape[:3], -1), weight.reshape(*weight.shape[:2], -1)
    return jnp.einsum("BTNW,DNW->BTND", z, weight, preferred_element_type=dtype)


def _product(
    x: Num[Array, "B T *inputs"], weight: Num[Array, "*outputs_inputs"], dtype: DTypeLike | None = None
) -> Num[Array, "B T *outputs"]:
    """On TPUs heads and groups stay separate axes, since merging them would first copy them into a different layout.

    On other backends this is a product of two matrices: with more axes, XLA's CPU backend transposes the weight in
    every layer of every step. Measured on two cores with GPT-2's shape: 1.02 times as fast, and 1.4 times when decoding
    8 rows.
    """
    outputs = weight.shape[: weight.ndim - (x.ndim - 2)]

    def of_matrices(x: Array, weight: Array) -> Array:
        matrix, x = weight.reshape(math.prod(outputs), -1), x.reshape(*x.shape[:2], -1)
        # With one position per row the weight comes first, to be read once: 1.09 -> 0.38 ms for [3072, 768], 8 rows.
        operands = ("OI,BTI->BTO", matrix, x) if x.shape[1] == 1 else ("BTI,OI->BTO", x, matrix)
        return jnp.einsum(*operands, preferred_element_type=dtype).reshape(*x.shape[:2], *outputs)

    if x.ndim == 3:
        return of_matrices(x, weight)
    axes = tuple(range(2, x.ndim)), tuple(range(len(outputs), weight.ndim))
    by_axes = partial(jnp.tensordot, axes=axes, preferred_element_type=dtype)
    return jax.lax.platform_dependent(x, weight, tpu=by_axes, default=of_matrices)


@jax.named_scope("attention")
def attention_block(
    x: Float[Array, "B T D"],
    weights: BlockWeights,
    arch: Architecture,
    rows: Rows,
    kind: LayerKind,
    attend: Attend,
    entropy: Attend = attention_entropy,
) -> dict[Site, Array]:
    """The sites of attention on the residual stream x. Heads are axes [N or K, H or W]."""
    x = norm_if_any(x, weights, "norm", arch)
    if arch.latent is None:
        heads, latent = _heads(x, weights, arch, rows, kind), None
    else:
        heads, latent = _latent_heads(x, weights, arch, arch.latent, rows.ropes[kind.is_local])
    sites = {Site.attn_in: x, **heads}
    segments = rows.chunks if kind.is_local else rows.segments
    inputs = AttentionInputs(sites[Site.q], sites[Site.k], sites[Site.v], segments, weights.get("sinks"), latent=latent)
    spec = _attention_spec(arch, kind, rows.segments.shape[1])
    sites[Site.attn_entropy] = entropy(inputs, spec)
    if rows.selected is not None:
        sites[Site.attn_pattern] = attention_pattern(inputs, rows.segments, rows.selected, spec)
    z = attend(inputs, spec)
    if "gate" in weights:
        z *= jax.nn.sigmoid(project(x, weights, "gate"))
    sites[Site.attn_z] = z
    sites[Site.head_out] = _multiply(z, weights["o"], _product_of_heads)
    sites[Site.attn_out] = norm_if_any(project(z, weights, "o"), weights, "post_norm", arch)
    return sites


def _heads(
    x: Float[Array, "B T D"],
    weights: BlockWeights,
    arch: Architecture,
    rows: Rows,
    kind: LayerKind,
) -> dict[Site, Array]:
    """The queries, keys and values. Keys and values may come from an earlier layer."""
    sites = _projected(x, weights)
    if Site.k in sites and Site.v not in sites:
        sites[Site.v] = sites[Site.k]  # values are the keys, before their norm and rotation
    if arch.norms_values and Site.v in sites:
        sites[Site.v] = norm_without_weight(sites[Site.v], arch)
    if Site.v in sites:
        sites[Site.v] = _clipped(sites[Site.v], arch)
    for site, key in ((Site.q, "q_norm"), (Site.k, "k_norm")):
        if site in sites:
            sites[site] = _clipped(norm_if_any(sites[site], weights, key, arch), arch)
            if kind.is_rotated:
                sites[site] = rotate_pairs(sites[site], rows.ropes[kind.is_local], arch.rotary_pairs)
                if arch.norms_rotated:
                    sites[site] = norm_without_weight(sites[site], arch)
    if rows.query_scales is not None and kind.is_rotated is arch.query_scaling.of_rotated:
        sites[Site.q] = (sites[Site.q].astype(jnp.float32) * rows.query_scales).astype(x.dtype)
    if rows.shared is not None:
        sites[Site.k], sites[Site.v] = rows.shared
    return sites


def _clipped(x: Float[Array, "B T N H"], arch: Architecture) -> Float[Array, "B T N H"]:
    return x if arch.clip_qkv is None else jnp.clip(x, -arch.clip_qkv, arch.clip_qkv)


def _projected(x: Float[Array, "B T D"], weights: BlockWeights) -> dict[Site, Array]:
    sites = (Site.q, Site.k, Site.v)
    if "qkv" not in weights:
        return {site: project(x, weights, site) for site in sites if site in weights}
    qkv = project(x, weights, "qkv")  # BTNCH
    return {site: qkv[:, :, :, number] for number, site in enumerate(sites)}


def _latent_heads(
    x: Float[Array, "B T D"], weights: BlockWeights, arch: Architecture, latent: LatentAttention, table: RopeTable
) -> tuple[dict[Site, Array], Latent]:
    """The queries, keys and values of latent attention, and the latents. Only the last dimensions of queries and keys
    rotate."""
    num_unrotated, latent_arch = arch.head_dim - arch.rotary_dim, replace(arch, norm_eps=latent.norm_eps)

    def project_down(name: str) -> Array:
        return norm(project(x, weights, f"{name}_down"), weights, f"{name}_down_norm", latent_arch)

    q = project(x, weights, "q") if latent.q_rank is None else project(project_down("q"), weights, "q_up")
    q, q_rotary = jnp.split(q, [num_unrotated], axis=-1)
    values, up = project_down("kv"), weights["kv_up"]
    if isinstance(up, QuantisedWeight):
        up = up.dequantised(x.dtype).reshape(*up.values.shape[:2], -1)
    k, v = jnp.split(project(values, weights, "kv_up"), [num_unrotated], axis=-1)
    k_rotary = rotate_pairs(project(x, weights, "k_rotary")[:, :, None], table, latent.pairs)  # BT1R
    latent_keys = Latent(values, k_rotary[:, :, 0], up)
    k_rotary = jnp.broadcast_to(k_rotary, (*k.shape[:3], arch.rotary_dim))
    heads = {
        Site.q: jnp.concatenate([q, rotate_pairs(q_rotary, table, latent.pairs)], axis=-1),
        Site.k: jnp.concatenate([k, k_rotary], axis=-1),
        Site.v: v,
    }
    return heads, latent_keys


def _attention_spec(arch: Architecture, kind: LayerKind, length: int) -> AttentionSpec:
    """How a layer's scores are computed in rows of `length`. Chunks are segments; a cache knows its layer's window."""
    scale = arch.head_dim**-0.5 if arch.attention_scale is None else arch.attention_scale
    spec = AttentionSpec(arch.causal, scale, arch.softcap)
    if not kind.is_local or arch.local.chunked or arch.local.window >= length:
        return spec
    return replace(spec, window=arch.local.window)


def gated(gate: Float[Array, "*F"], up: Float[Array, "*F"], arch: Architecture) -> Float[Array, "*F"]:
    """The neurons of a gated MLP or expert."""
    if arch.experts is None or arch.experts.limit is None:
        return ACTIVATIONS[arch.activation](gate) * up
    alpha, limit = arch.experts.alpha, arch.experts.limit
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1) * (gate * jax.nn.sigmoid(scaled(gate, alpha)))


@jax.named_scope("mlp")
def mlp_block(
    x: Float[Array, "B T D"], weights: BlockWeights, arch: Architecture, context: int = 1
) -> dict[Site, Array]:
    """The sites of an MLP, with a gate (Shazeer, arXiv 2002.05202) or without. `context` devices divide the positions.

    Very long rows are computed in parts: all neurons of such a row would not fit a TPU's memory, and XLA would compute
    them twice. For Qwen2.5-7B's shape, 1 x 131,072 on v5e: 11.0 -> 2.8 GiB of temporary memory, 479 -> 457 ms per layer
    by XLA's estimate, without attention.
    """
    size = mlp_positions(x.shape[1] // context)
    return map_parts(partial(_mlp, weights=weights, arch=arch), x, size, devices=context)


def _mlp(x: Float[Array, "B T D"], weights: BlockWeights, arch: Architecture) -> dict[Site, Array]:
    x = norm_if_any(x, weights, "norm", arch)
    up = project(x, weights, "up")
    if arch.gated:
        gate = project(x, weights, "gate")
        sites = {Site.mlp_pre: gate, Site.mlp_pre_linear: up, Site.mlp_post: gated(gate, up, arch)}
    else:
        sites = {Site.mlp_pre: up, Site.mlp_post: ACTIVATIONS[arch.activation](up)}
    mlp_out = norm_if_any(project(sites[Site.mlp_post], weights, "down"), weights, "post_norm", arch)
    return sites | {Site.mlp_in: x, Site.mlp_out: mlp_out}


@jax.named_scope("layer_out")
def layer_out(
    x: Float[Array, "B T D"], weights: BlockWeights, arch: Architecture, layer_input: Float[Array, "B T p"] | None
) -> Float[Array, "B T D"]:
    """The stream after a layer: adds the gated per-layer input and multiplies by the layer's scale, if it has them."""
    if "input_gate" in weights:
        neurons = ACTIVATIONS[arch.activation](project(x, weights, "input_gate")) * layer_input
        x += norm(project(neurons, weights, "input_out"), weights, "input_norm", arch)
    return x * weights["layer_scale"] if "layer_scale" in weights else x
