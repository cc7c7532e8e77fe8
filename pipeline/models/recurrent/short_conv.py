"""Gated short convolutions in place of attention (transformers' `Lfm2ShortConv`). They start over at each segment.

Letters: B rows, T positions, D model dim, G channels, c convolution taps.
"""

import jax
from jaxtyping import Array, Float, Int32

from pipeline.core.sites import Site
from pipeline.models.architecture import Architecture
from pipeline.models.layers import BlockWeights, norm_if_any, project
from pipeline.models.recurrent.recur import Recur


@jax.named_scope("short_conv")
def conv_block(
    x: Float[Array, "B T D"],
    attention: BlockWeights,
    weights: BlockWeights,
    arch: Architecture,
    segments: Int32[Array, "B T"],
    recur: Recur,
) -> dict[Site, Array]:
    """The sites of a short convolution on the residual stream x. `attention` contains the norm before it."""
    x = norm_if_any(x, attention, "norm", arch)
    inputs = project(x, weights, "in_gate") * project(x, weights, "in")
    y = recur.convolve("in", inputs, weights["taps"], segments) + weights.get("taps_bias", 0)
    outputs = project(x, weights, "out_gate") * y.astype(x.dtype)
    return {Site.attn_in: x, Site.attn_out: project(outputs, weights, "o")}
