"""The forward pass of a transformer, as far as the last captured site.

Letters: B rows, T positions, D model dim, V vocabulary, P learned positions, Y token types.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32

from pipeline.core.sites import ActivationKey, Site
from pipeline.models.architecture import Architecture
from pipeline.models.attention.choosing import Attend
from pipeline.models.layers import LayerWeights, attention_block, mlp_block, norm, norm_if_any
from pipeline.models.partition import Partition
from pipeline.models.rope import RopeTable, rope_table
from pipeline.models.runs import layer_runs, residual_index


class Params(TypedDict, total=False):
    """A transformer's weights. `final_norm` is absent unless it is captured, others where a family lacks them.

    `runs` has one mapping per `LayerRun`; the weights of a run of several layers are stacked along a first axis.
    """

    embed: Float[Array, "V D"]
    position_embed: Float[Array, "P D"]
    type_embed: Float[Array, "Y D"]
    embed_norm: Float[Array, " D"]
    embed_norm_bias: Float[Array, " D"]
    runs: tuple[LayerWeights, ...]
    final_norm: Float[Array, " D"]
    final_norm_bias: Float[Array, " D"]
    head: Float[Array, "V D"]  # for generation only, and absent where the embedding is the head, too


STREAM_SITES = (Site.attn_out, Site.resid_mid, Site.mlp_out)
"""The sites inside a layer that are as wide as the residual stream. A tuple, since all processes must trace them in one
order, and that of a set of strings changes from process to process."""


def forward(
    arch: Architecture,
    params: Params,
    tokens: Int32[Array, "B T"],
    segments: Int32[Array, "B T"],
    positions: Int32[Array, "B T"],
    keys: tuple[ActivationKey, ...],
    attend: Attend | Sequence[Attend],
    partition: Partition,
    finish: Callable[[Float[Array, "B T width"]], Array] = lambda activation: activation,
) -> dict[ActivationKey, Array]:
    """What `finish` makes of the activations of `keys`, in the weights' dtype; values at padding mean nothing.

    Pure, to be jitted. Params must be those that were loaded for the same keys, and lie as `partition` says. `attend`
    may be one for each layer, where `keys` make each layer a run of its own.
    """
    captured: dict[ActivationKey, Array] = {}

    def capture(x: Array, here: dict[ActivationKey, Array]) -> Array:
        """Finishes activations before the layers go on with x: else the compiler may keep them beside what they become.

        Compiled for v5e, 16 rows of 1024 of Qwen2.5-0.5B's shape: 225 -> 154 MiB of temporary memory with three layers
        captured, 606 -> 206 MiB with all 24.
        """
        if not here:
            return x
        finished = {key: finish(value.reshape(*tokens.shape, -1)) for key, value in here.items()}  # heads side by side
        x, finished = jax.lax.optimization_barrier((x, finished))
        captured.update(finished)
        return x

    def residuals(x: Array, index: int) -> dict[ActivationKey, Array]:
        """The keys that are captured where the stream has passed `index` layers."""
        here = [key for key in keys if residual_index(key, arch.num_layers) == index]
        normed = partial(norm, x, params, "final_norm", arch)
        return {key: partition.residual(normed()) if key.site is Site.final_norm else x for key in here}

    ropes = rope_tables(arch, positions)

    def layer(
        x: Array, weights: LayerWeights, is_local: bool | Bool[Array, ""], attend: Attend
    ) -> tuple[Array, dict[Site, Array]]:
        x, sites = layer_sites(arch, x, partition.gather(weights), ropes, segments, is_local, attend)
        sites |= {site: partition.residual(sites[site]) for site in STREAM_SITES if site in sites}
        return partition.residual(x), sites

    with jax.named_scope("embed"):
        x = partition.residual(embed(arch, params, tokens, positions))
    x = capture(x, residuals(x, 0))
    for run, weights in zip(layer_runs(keys, arch.num_layers), params["runs"], strict=True):
        are_local = [arch.is_local(number) for number in range(run.first, run.stop)]
        with jax.named_scope(f"layers_{run.first}_to_{run.stop - 1}"):
            if len(run) == 1:
                own = attend if callable(attend) else attend[run.first]
                x, sites = layer(x, weights, are_local[0], own)
                inner = {ActivationKey(run.first, site): value for site, value in sites.items()}
                x = capture(x, {key: inner[key] for key in keys if key in inner})
            elif len(set(are_local)) == 1:
                x, _ = jax.lax.scan(
                    lambda x, weights, kind=are_local[0]: (layer(x, weights, kind, attend)[0], None), x, weights
                )
            else:
                of_each = weights, np.array(are_local)
                x, _ = jax.lax.scan(lambda x, each: (layer(x, *each, attend)[0], None), x, of_each)
        x = partition.residual(x)
        x = capture(x, residuals(x, run.stop))
    return {key: captured[key] for key in keys}


def layer_sites(
    arch: Architecture,
    x: Float[Array, "B T D"],
    weights: LayerWeights,
    ropes: tuple[RopeTable, RopeTable] | None,
    segments: Int32[Array, "B T"],
    is_local: bool | Bool[Array, ""],
    attend: Attend,
) -> tuple[Float[Array, "B T D"], dict[Site, Array]]:
    """The residual stream after a layer, and the layer's sites as far as there are weights for them.

    `ropes` are those of `rope_tables`; in a scan over local and global layers, `is_local` is data.
    """
    own, mlp = weights.get("attention", {}), weights.get("mlp", {})
    sites = attention_block(x, own, arch, ropes, segments, is_local, attend)
    stream = x
    if Site.attn_out in sites:  # the capture may end before
        stream = norm_if_any(x + sites[Site.attn_out], own, "sum_norm", arch)
        sites[Site.resid_mid] = stream
    sites |= mlp_block(x if arch.parallel else stream, mlp, arch)
    if Site.mlp_out in sites:
        stream = norm_if_any(stream + sites[Site.mlp_out], mlp, "sum_norm", arch)
    return stream, sites


def embed(
    arch: Architecture, params: Params, tokens: Int32[Array, "B T"], positions: Int32[Array, "B T"]
) -> Float[Array, "B T D"]:
    """What enters layer 0. All tokens are of type 0."""
    x = params["embed"][tokens]
    if arch.embed_scale != 1.0:
        x *= jnp.asarray(arch.embed_scale, x.dtype)
    if "type_embed" in params:
        x += params["type_embed"][0]
    if "position_embed" in params:
        x += params["position_embed"][positions]
    return norm_if_any(x, params, "embed_norm", arch)


def rope_tables(arch: Architecture, positions: Int32[Array, "B T"]) -> tuple[RopeTable, RopeTable] | None:
    """The tables of global and of local layers; one object where they are the same."""
    if arch.rope is None:
        return None
    dim = arch.rotary_dim or arch.head_dim
    everywhere = rope_table(arch.rope, dim, positions)
    if arch.local is None or arch.local.rope == arch.rope:
        return everywhere, everywhere
    return everywhere, rope_table(arch.local.rope, dim, positions)
