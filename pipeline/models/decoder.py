"""The forward pass of a pre-norm decoder, as far as the last captured site.

Letters: B rows, T positions, D model dim, V vocabulary.
"""

from collections.abc import Mapping
from typing import TypedDict

import jax
from jaxtyping import Array, Float, Int32

from pipeline.models.architecture import Architecture
from pipeline.models.layers import Weights, attention_block, mlp_block, rms_norm
from pipeline.models.rope import rope_table
from pipeline.models.runs import layer_runs, residual_index
from pipeline.sites import ActivationKey, Site


class LayerWeights(TypedDict, total=False):
    """One layer's weights. `mlp` is absent from the last layer if only its attention is needed."""

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
) -> dict[ActivationKey, Float[Array, "B T D"]]:
    """The activations of `keys`, in the weights' dtype. Pure, to be jitted; values at padding mean nothing.

    Params must be those that were loaded for the same keys.
    """
    rope = rope_table(arch.rope, arch.head_dim, positions)

    def layer(x: Array, weights: LayerWeights) -> tuple[Array, Mapping[Site, Array]]:
        attn_out = attention_block(x, weights["attention"], arch, rope, segments, attention)
        resid_mid = x + attn_out
        inner = {Site.attn_out: attn_out, Site.resid_mid: resid_mid}
        if "mlp" not in weights:  # the capture ends here
            return resid_mid, inner
        mlp_out = mlp_block(resid_mid, weights["mlp"], arch)
        return resid_mid + mlp_out, inner | {Site.mlp_out: mlp_out}

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
            return inner[key]
        residual = residuals[residual_index(key, arch.num_layers)]
        return rms_norm(residual, params["final_norm"], arch.norm_eps) if key.site is Site.final_norm else residual

    return {key: captured(key) for key in keys}
