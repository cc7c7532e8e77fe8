"""Mamba 2: linear attention whose state decays (Dao & Gu, arXiv 2405.21060; transformers' `NemotronHMamba2Mixer`).

In the words of `delta_net`: a group is a key head, with the outputs of C as queries and those of B as keys; its heads
are value heads. Without the delta rule, each position adds its value at its key.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pipeline.core.sites import Site
from pipeline.models.architecture import Architecture
from pipeline.models.layers import BlockWeights, norm_if_any, normalised, project
from pipeline.models.partition import Partition
from pipeline.models.recurrent.delta_net import DECAY_RULE
from pipeline.models.recurrent.recur import Heads, Recur


@jax.named_scope("mamba")
def mamba_block(
    x: Float[Array, "B T D"],
    attention: BlockWeights,
    weights: BlockWeights,
    arch: Architecture,
    segments: Int32[Array, "B T"],
    partition: Partition,
    recur: Recur,
) -> dict[Site, Array]:
    """The sites of a Mamba 2 block on the residual stream x. `attention` contains the norm before it."""
    x = norm_if_any(x, attention, "norm", arch)
    heads = _heads(x, weights, arch, segments, recur)
    out = recur.outputs(DECAY_RULE, segments, heads, partition) + heads.v * weights["skip"][..., None]
    out *= jax.nn.silu(project(x, weights, "z").astype(jnp.float32))
    out = normalised(out, (-2, -1), arch) * weights["z_norm"].astype(jnp.float32)  # of each group
    return {Site.attn_in: x, Site.attn_out: project(out.astype(x.dtype), weights, "o")}


def _heads(
    x: Float[Array, "B T D"], weights: BlockWeights, arch: Architecture, segments: Int32[Array, "B T"], recur: Recur
) -> Heads:
    def project_and_convolve(name: str) -> Float32[Array, "B T *heads"]:
        y = recur.convolve(name, project(x, weights, name), weights[f"{name}_taps"], segments)
        return jax.nn.silu(y + weights.get(f"{name}_taps_bias", 0))

    time = jax.nn.softplus(project(x, weights, "decay").astype(jnp.float32) + weights["decay_offset"])
    time = jnp.maximum(time, arch.delta.min_time)
    return Heads(
        q=project_and_convolve("q"),
        k=project_and_convolve("k"),
        v=project_and_convolve("v"),
        write=time,
        log_decay=-jnp.exp(weights["decay_log_rate"]) * time,
    )
