"""The forward pass of a pre-norm decoder, as far as the last captured site.

Letters: B rows, T positions, D model dim, V vocabulary.
"""

from typing import TypedDict

import jax
from jaxtyping import Array, Float, Int32

from pipeline.models.architecture import Architecture
from pipeline.models.layers import Weights, attention_block, mlp_block, rms_norm
from pipeline.models.rope import rope_table
from pipeline.models.runs import layer_runs, residual_index
from pipeline.sites import ActivationKey, Site


class LayerWeights(TypedDict, total=False):
    """One layer's weights. The last layer has only those that its captured sites need."""

    attention: Weights
    mlp: Weights


class Params(TypedDict, total=False):
    """A decoder's weights. `final_norm` is absent unless it is captured.

    `runs` has one mapping per `LayerRun`; the weights of a run of several layers are stacked along a first axis.
    """

    embed: Float[Array, "V D"]
    runs: tuple[LayerWeights, ...]
    final_norm: Float[Array, " D"]


def forward(
    arch: Architecture,
    params: Params,
    tokens: Int32[Array, "B T"],
    segments: Int32[Array, "B T"],
    positions: Int32[Array, "B T"],
    keys: tuple[ActivationKey, ...],
    attention: str,
) -> dict[ActivationKey, Float[Array, "B T width"]]:
    """The activations of `keys`, in the weights' dtype. Pure, to be jitted; values at padding mean nothing.

    Params must be those that were loaded for the same keys.
    """
    rope = rope_table(arch.rope, arch.head_dim, positions)

    def layer(x: Array, weights: LayerWeights) -> tuple[Array, dict[Site, Array]]:
        sites = attention_block(x, weights["attention"], arch, rope, segments, attention)
        if Site.attn_out in sites:  # the capture may end before
            x = sites[Site.resid_mid] = x + sites[Site.attn_out]
        if "mlp" in weights:
            sites |= mlp_block(x, weights["mlp"], arch)
        return x + sites[Site.mlp_out] if Site.mlp_out in sites else x, sites

    with jax.named_scope("embed"):
        x = params["embed"][tokens]
    residuals = {0: x}
    inner: dict[ActivationKey, Array] = {}
    for run, weights in zip(layer_runs(keys, arch.num_layers), params["runs"], strict=True):
        with jax.named_scope(f"layers_{run.first}_to_{run.stop - 1}"):
            if len(run) == 1:
                x, sites = layer(x, weights)
                inner |= {ActivationKey(run.first, site): value for site, value in sites.items()}
            else:
                x, _ = jax.lax.scan(lambda x, weights: (layer(x, weights)[0], None), x, weights)
        residuals[run.stop] = x

    def captured(key: ActivationKey) -> Array:
        if key in inner:
            return inner[key].reshape(*tokens.shape, -1)  # heads side by side
        residual = residuals[residual_index(key, arch.num_layers)]
        return rms_norm(residual, params["final_norm"], arch.norm_eps) if key.site is Site.final_norm else residual

    return {key: captured(key) for key in keys}
