"""Sparse layers: a router sends each token to some of the experts, whose outputs are mixed (Shazeer et al., arXiv
1701.06538).

Experts have no capacity limit: no token is dropped, and a token's output does not depend on other tokens.

Letters: B rows, T positions, D model dim, E experts, A experts per token, M MLP dim of an expert,
R = B * T * A pairs of a token and one of its experts.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from pipeline.core.sites import Site
from pipeline.models.architecture import Activation, Architecture, Experts, Router
from pipeline.models.attention.arithmetic import float32_einsum, map_parts, mlp_positions, scaled
from pipeline.models.attention.flash import runs_triton
from pipeline.models.exchange.tokens import Order, by_expert, exchange_tokens
from pipeline.models.grouped_product import Matrices, RowBlocks, grouped_product
from pipeline.models.layers import (
    BlockWeights,
    gated,
    mlp_block,
    norm,
    norm_if_any,
    norm_without_weight,
    project,
)
from pipeline.models.partition import ExpertShare, Partition
from pipeline.models.quantised_weights import QuantisedWeight

_GROUPED = Router.groups, Router.sigmoid_groups
_EXPERTS = "experts_"  # prefix of their weights' names

_TRANSPOSED = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)
"""For a grouped product of [R, inputs] with [E, outputs, inputs]."""


class _Routing(NamedTuple):
    """The experts of each token, and the weights of their outputs."""

    indices: Int32[Array, "B T A"]
    weights: Float[Array, "B T A"]


class _Mixed(NamedTuple):
    """The experts' outputs and their weighted sum."""

    outputs: Float[Array, "B T A D"]
    mixture: Float[Array, "B T D"]


@jax.named_scope("experts")
def experts_block(
    x: Float[Array, "B T D"], weights: BlockWeights, arch: Architecture, partition: Partition
) -> dict[Site, Array]:
    """The sites of a sparse layer's MLP. `router_indices` are int32; `expert_out` has axes [B, T, A, D]."""
    stream, x = x, norm_if_any(x, weights, "norm", arch)
    sites = {Site.mlp_in: x}
    if arch.experts.beside_mlp:
        sites |= _dense(stream, weights, arch, partition)
        x = norm_if_any(stream, weights, "mixture_norm", arch)
    sites[Site.router_logits] = _logits(stream if "router_scale" in weights else x, weights, arch)
    route = partial(_route_in_groups if arch.experts.router in _GROUPED else _route, experts=arch.experts)
    corrections = [weights[name] for name in ("router_correction", "router_expert_scale") if name in weights]
    routing = partition.by_rows(route, sites[Site.router_logits], *corrections)
    sites |= {Site.router_weights: routing.weights, Site.router_indices: routing.indices}
    experts = {name.removeprefix(_EXPERTS): weights[name] for name in weights if name.startswith(_EXPERTS)}
    mixed = partition.over_experts(partial(_mix_rows, arch=arch), (x, routing), experts)
    mlp_out = mixed.mixture
    if "shared_down" in weights:
        mlp_out += _shared(x, weights, arch, partition)
    if Site.mlp_out in sites:
        mlp_out = sites[Site.mlp_out] + norm(mlp_out, weights, "mixture_post_norm", arch)
    return sites | {Site.expert_out: mixed.outputs, Site.mlp_out: norm_if_any(mlp_out, weights, "post_norm", arch)}


def _dense(
    x: Float[Array, "B T D"], weights: BlockWeights, arch: Architecture, partition: Partition
) -> dict[Site, Array]:
    """The sites of the MLP in a layer that also has experts. `mlp_out` is the MLP's share of the layer's `mlp_out`."""
    dense = {name: weights[name] for name in ("norm", "gate", "up", "down")}
    return mlp_block(x, dense | {"post_norm": weights["dense_post_norm"]}, arch, partition.context)


def _route(logits: Float[Array, "B T E"], scale: Float[Array, " E"] | None = None, *, experts: Experts) -> _Routing:
    """Chooses the experts with the largest logits; ties go to lower expert numbers. `scale` multiplies the experts'
    weights."""
    if experts.router is Router.top_softmax:
        chosen, indices = jax.lax.top_k(logits, experts.per_token)
        return _Routing(indices, jax.nn.softmax(chosen.astype(jnp.float32)).astype(logits.dtype))
    if experts.router is Router.sigmoid:
        chosen, indices = jax.lax.top_k(logits, experts.per_token)
        return _Routing(indices, jax.nn.sigmoid(chosen.astype(jnp.float32)).astype(logits.dtype))
    shares, indices = jax.lax.top_k(jax.nn.softmax(logits.astype(jnp.float32)), experts.per_token)
    if experts.sums_to_one:
        shares /= jnp.sum(shares, axis=-1, keepdims=True)
    if scale is not None:
        shares *= scale[indices]
    return _Routing(indices, shares.astype(logits.dtype) if experts.rounds_weights else shares)


def _logits(x: Float[Array, "B T D"], weights: BlockWeights, arch: Architecture) -> Float[Array, "B T E"]:
    if "router_scale" in weights:
        x = scaled(norm_without_weight(x, arch) * weights["router_scale"], arch.d_model**-0.5)
    if arch.experts.router in _GROUPED:
        return float32_einsum("BTD,ED->BTE", x.astype(jnp.float32), weights["router"].astype(jnp.float32))
    return project(x, weights, "router")


def _route_in_groups(
    logits: Float32[Array, "B T E"], correction: Float32[Array, " E"] | None = None, *, experts: Experts
) -> _Routing:
    """DeepSeek's routing (V2: arXiv 2405.04434, V3: arXiv 2412.19437). Ties go to lower group and expert numbers. A
    token's experts are sorted by weight, largest first."""
    is_sigmoid = experts.router is Router.sigmoid_groups
    scores = jax.nn.sigmoid(logits) if is_sigmoid else jax.nn.softmax(logits)
    preference = scores if correction is None else scores + correction
    if experts.groups_per_token < experts.num_groups:
        groups = preference.reshape(*preference.shape[:2], experts.num_groups, -1)
        largest, _ = jax.lax.top_k(groups, 2 if is_sigmoid else 1)
        _, chosen = jax.lax.top_k(jnp.sum(largest, axis=-1), experts.groups_per_token)
        is_chosen = jnp.any(chosen[..., None] == jnp.arange(experts.num_groups), axis=-2)
        preference = jnp.where(is_chosen[..., None], groups, -jnp.inf if is_sigmoid else 0).reshape(scores.shape)
    _, indices = jax.lax.top_k(preference, experts.per_token)
    weights, order = jax.lax.top_k(jnp.take_along_axis(scores, indices, axis=-1), experts.per_token)
    if experts.sums_to_one:
        weights /= jnp.sum(weights, axis=-1, keepdims=True) + 1e-20
    return _Routing(jnp.take_along_axis(indices, order, axis=-1), weights * experts.scaling)


def _shared(
    x: Float[Array, "B T D"], weights: BlockWeights, arch: Architecture, partition: Partition
) -> Float[Array, "B T D"]:
    """The output of the shared expert, multiplied by its gate if the model has one."""
    shared = {name: weights[f"shared_{name}"] for name in ("gate", "up", "down")}
    output = mlp_block(x, shared, arch, partition.context)[Site.mlp_out]
    return jax.nn.sigmoid(project(x, weights, "shared_router")) * output if "shared_router" in weights else output


def _mix_rows(
    inputs: tuple[Float[Array, "B T D"], _Routing], weights: BlockWeights, share: ExpertShare, arch: Architecture
) -> _Mixed:
    """`_mix`, one part at a time for very long rows, because it copies each token once per expert."""
    mix = partial(_mix, weights=weights, share=share, arch=arch)
    return map_parts(mix, inputs, mlp_positions(inputs[0].shape[1]))


def _mix(
    inputs: tuple[Float[Array, "B T D"], _Routing], weights: BlockWeights, share: ExpertShare, arch: Architecture
) -> _Mixed:
    """The contribution of the share's experts to the layer's output. Other experts contribute 0. `weights` are those of
    the experts on this device."""
    x, routing = inputs
    num_experts = jax.tree.leaves(weights)[0].shape[0] * share.group
    experts = routing.indices.ravel() - share.first
    is_here = (experts >= 0) & (experts < num_experts)
    order = by_expert(jnp.where(is_here, experts, num_experts), num_experts)
    if arch.experts.scales_inputs:
        x = x[:, :, None] * routing.weights[..., None]
    x = x.reshape(-1, x.shape[-1])
    platform = share.device.platform
    compute = _in_groups if platform == "tpu" else _in_blocks
    compute = partial(_in_one_kernel if runs_triton(share.device) else compute, weights=weights, arch=arch)
    if share.group > 1:
        outputs = exchange_tokens(compute, x, order, share.axis, share.mesh_axes, platform == "gpu")
    else:
        outputs = compute(x, order)
    outputs = outputs.reshape(*routing.indices.shape, -1)
    outputs = jnp.where(is_here.reshape(*routing.indices.shape, 1), outputs, 0)
    wide = outputs.astype(jnp.float32)
    mixture = jnp.sum(wide if arch.experts.scales_inputs else wide * routing.weights[..., None], axis=2)
    return _Mixed(outputs, mixture.astype(x.dtype))


def _in_groups(x: Float[Array, "S D"], order: Order, weights: BlockWeights, arch: Architecture) -> Float[Array, "R D"]:
    """For TPUs: one grouped product for all experts."""
    x, sizes = x[order.tokens(slice(None), len(x))], jnp.diff(order.ends, prepend=0)
    weights = _ungrouped(weights, x.dtype)

    def product(x: Float[Array, "R inputs"], name: str) -> Float[Array, "R outputs"]:
        weight, bias = weights[name], weights.get(f"{name}_bias")
        if isinstance(weight, QuantisedWeight):
            y = jax.lax.ragged_dot_general(
                x, weight.values.astype(x.dtype), sizes, _TRANSPOSED, preferred_element_type=jnp.float32
            )
            y = (y * per_token(weight.scale)).astype(x.dtype)
        else:
            y = jax.lax.ragged_dot_general(x, weight, sizes, _TRANSPOSED, preferred_element_type=x.dtype)
        return y if bias is None else y + per_token(bias)

    def per_token(values: Float[Array, "E outputs"]) -> Float[Array, "R outputs"]:
        return jnp.repeat(values, sizes, axis=0, total_repeat_length=len(x))

    return product(gated(product(x, "gate"), product(x, "up"), arch), "down")[order.inverse]


def _ungrouped(weights: BlockWeights, dtype: DTypeLike) -> BlockWeights:
    """The experts' weights with those in float that have a scale per group of inputs."""
    return {
        name: weight.dequantised(dtype).reshape(*weight.values.shape[:2], -1)
        if isinstance(weight, QuantisedWeight) and weight.is_grouped
        else weight
        for name, weight in weights.items()
    }


def _in_one_kernel(
    x: Float[Array, "S D"], order: Order, weights: BlockWeights, arch: Architecture, interpret: bool = False
) -> Float[Array, "R D"]:
    """For NVIDIA's GPUs: two calls of a kernel of ours, the first for the neurons. Int4 weights are converted first."""
    rows, weights = order.tokens(slice(None), len(x)), _ungrouped(weights, x.dtype)
    blocks = RowBlocks.of(order.ends, len(rows))

    def product(x: Array, *names: str, combine: Callable[..., Array] = lambda y: y, **places: Array) -> Array:
        matrices = [Matrices(weights[name], weights.get(f"{name}_bias")) for name in names]
        return grouped_product(x, len(order.order), matrices, blocks, combine, interpret=interpret, **places)

    if arch.activation is Activation.gelu:  # Triton's Pallas has no error function
        neurons = gated(product(x, "gate", read_rows=rows), product(x, "up", read_rows=rows), arch)
    else:
        neurons = product(x, "gate", "up", combine=partial(gated, arch=arch), read_rows=rows)
    return product(neurons, "down", written_rows=order.order)


def _in_blocks(x: Float[Array, "S D"], order: Order, weights: BlockWeights, arch: Architecture) -> Float[Array, "R D"]:
    """For other backends: a loop over blocks of tokens of one expert. An expert's last block may be partly empty.

    On these backends a grouped product computes every expert for every token. Measured on two cores, 4,096 tokens and
    16 experts of [192, 256]: 117 ms and 67 MiB with a grouped product, 16 ms and 11 MiB in blocks.
    """
    x = x[order.tokens(slice(None), len(x))]
    blocks = RowBlocks.of(order.ends, len(x))
    experts, starts, stops = blocks.blocks
    indices = starts[:, None] + jnp.arange(blocks.size)
    indices = jnp.where(indices < stops[:, None], indices, len(x))

    def compute(inputs: tuple[Int32[Array, " block"], Int32[Array, ""]]) -> Float[Array, "block D"]:
        indices, expert = inputs
        tokens = x.at[indices].get(mode="fill", fill_value=0)
        return mlp_block(tokens[None], jax.tree.map(lambda weight: weight[expert], weights), arch)[Site.mlp_out][0]

    outputs = jax.lax.map(compute, (indices, experts))
    return jnp.zeros_like(x).at[indices].set(outputs, mode="drop")[order.inverse]
