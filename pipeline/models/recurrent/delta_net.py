"""Gated DeltaNet: linear attention whose state decays and is updated by the delta rule (Yang et al., arXiv 2412.06464;
transformers' `Qwen3_5GatedDeltaNet`); and Mamba 2, whose state only decays (Dao & Gu, arXiv 2405.21060; transformers'
`NemotronHMamba2Mixer`). In Mamba 2, a group is a key head, with the outputs of C as queries and those of B as keys; its
heads are value heads.

Convolutions and states start over at each segment, so documents in a row do not see each other.

Letters: B rows, T positions, D model dim, J key heads, O value heads per key head, k and v dims of a key head and a
value head, c convolution taps, n chunks of C positions in a row.
"""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pipeline.core.sites import Site
from pipeline.models.architecture import DELTA_CHUNK, Architecture, Norm
from pipeline.models.attention.arithmetic import float32_einsum
from pipeline.models.layers import ACTIVATIONS, BlockWeights, norm, norm_if_any, normalised, project
from pipeline.models.partition import Partition
from pipeline.models.recurrent.recur import Heads, Recur, Rule


@jax.named_scope("delta_net")
def delta_block(
    x: Float[Array, "B T D"],
    attention: BlockWeights,
    weights: BlockWeights,
    arch: Architecture,
    segments: Int32[Array, "B T"],
    partition: Partition,
    recur: Recur,
) -> dict[Site, Array]:
    """The sites of a gated DeltaNet or Mamba 2 on the residual stream x. `attention` contains the norm before it."""
    x = norm_if_any(x, attention, "norm", arch)
    heads = _heads(x, weights, arch, segments, recur)
    gate = jax.nn.silu(project(x, weights, "z").astype(jnp.float32))
    if arch.delta.is_mamba:
        out = recur.outputs(DECAY_RULE, segments, heads, partition) + heads.v * weights["skip"][..., None]
        out = normalised(out * gate, (-2, -1), arch) * weights["z_norm"].astype(jnp.float32)  # of each group
    else:
        out = recur.outputs(DELTA_RULE, segments, heads, partition).astype(x.dtype)
        out = norm(out, weights, "z_norm", replace(arch, norm=Norm.rms)).astype(jnp.float32) * gate
    return {Site.attn_in: x, Site.attn_out: project(out.astype(x.dtype), weights, "o")}


def _heads(
    x: Float[Array, "B T D"], weights: BlockWeights, arch: Architecture, segments: Int32[Array, "B T"], recur: Recur
) -> Heads:
    activation = jax.nn.silu if arch.delta.is_mamba else ACTIVATIONS[arch.activation]

    def project_and_convolve(name: str) -> Float32[Array, "B T *heads"]:
        y = recur.convolve(name, project(x, weights, name), weights[f"{name}_taps"], segments)
        return activation(y + weights.get(f"{name}_taps_bias", 0))

    q, k, v = map(project_and_convolve, "qkv")
    rate = jnp.exp(weights["decay_log_rate"])
    time = jax.nn.softplus(project(x, weights, "decay").astype(jnp.float32) + weights["decay_offset"])
    if arch.delta.is_mamba:
        time = jnp.maximum(time, arch.delta.min_time)
        return Heads(q, k, v, write=time, log_decay=-rate * time)
    write = jax.nn.sigmoid(project(x, weights, "write").astype(jnp.float32))
    return Heads(_unit(q) * arch.delta.key_dim**-0.5, _unit(k), v, write, log_decay=-rate * time)


def _unit(x: Float32[Array, "*heads k"]) -> Float32[Array, "*heads k"]:
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


class _Chunks(NamedTuple):
    """The quantities of a row's chunks that do not depend on the state. A position writes `values` minus `reads` times
    the state at the start of the chunk."""

    q: Float32[Array, "n B J C k"]
    k: Float32[Array, "n B J C k"]
    values: Float32[Array, "n B J O C v"]
    reads: Float32[Array, "n B J O C k"] | None  # None: there is no delta
    scores: Float32[Array, "n B J O C C"]  # queries times the chunk's keys, decayed
    from_state: Float32[Array, "n B J O C"]  # decay since the chunk began; 0 in documents that begin in it
    to_state: Float32[Array, "n B J O C"]  # decay until the chunk ends; 0 in documents that end in it


def chunkwise(
    segments: Int32[Array, "B T"], heads: Heads, has_delta: bool
) -> tuple[Float32[Array, "B T J O v"], Float32[Array, "B 1 J O k v"]]:
    """The outputs of all value heads, and the states at the end of the rows.

    As in transformers' `torch_chunk_gated_delta_rule`, each document starts with a state S = 0, and each position
    computes S *= decay; S += write * k (v - S^T k)^T; output = S^T q. Within a chunk, solving a triangular system
    replaces these steps, so that the work is matrix products. Without `has_delta`, as in `mamba2_chunk_scan`, positions
    add write * k v^T, and chunks need no such system.
    """
    num_rows, length = segments.shape
    segments, heads = _chunked(segments, mode="edge"), jax.tree.map(_chunked, heads)  # padding keeps the state

    def step(state: Float32[Array, "B J O k v"], chunk: _Chunks) -> tuple[Array, Float32[Array, "B J O C v"]]:
        values = chunk.values
        if chunk.reads is not None:
            values -= float32_einsum("BJOCk,BJOkv->BJOCv", chunk.reads, state)
        outputs = float32_einsum("BJCk,BJOkv->BJOCv", chunk.q, state) * chunk.from_state[..., None]
        outputs += float32_einsum("BJOCS,BJOSv->BJOCv", chunk.scores, values)
        written = float32_einsum("BJCk,BJOCv->BJOkv", chunk.k, values * chunk.to_state[..., None])
        return state * chunk.from_state[..., -1, None, None] + written, outputs

    chunks = _within_chunks(segments, heads, has_delta)
    state = jnp.zeros((*chunks.values.shape[1:4], chunks.k.shape[-1], chunks.values.shape[-1]), jnp.float32)
    state, outputs = jax.lax.scan(step, state, chunks)  # outputs: nBJOCv
    outputs = outputs.transpose(1, 0, 4, 2, 3, 5).reshape(num_rows, -1, *outputs.shape[2:4], outputs.shape[-1])
    return outputs[:, :length], state[:, None]


def _step(
    state: Float32[Array, "B J O k v"], heads: Heads, has_delta: bool
) -> tuple[Float32[Array, "B 1 J O v"], Float32[Array, "B J O k v"]]:
    """`chunkwise` for one position: its outputs, and the states after it."""
    q, k, v, write, log_decay = (x[:, 0] for x in heads)
    state = state * jnp.exp(log_decay)[..., None, None]
    if has_delta:
        v = v - float32_einsum("BJk,BJOkv->BJOv", k, state)
    state += float32_einsum("BJk,BJOv->BJOkv", k, write[..., None] * v)
    return float32_einsum("BJk,BJOkv->BJOv", q, state)[:, None], state


DELTA_RULE, DECAY_RULE = (
    Rule(partial(chunkwise, has_delta=has_delta), partial(_step, has_delta=has_delta)) for has_delta in (True, False)
)


def _chunked(x: Array, mode: str = "constant") -> Array:
    """[B, T, ...] -> [n, B, C, ...], padded to whole chunks."""
    x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % DELTA_CHUNK), *[(0, 0)] * (x.ndim - 2)], mode=mode)
    return jnp.moveaxis(x.reshape(x.shape[0], -1, DELTA_CHUNK, *x.shape[2:]), 1, 0)


def _within_chunks(segments: Int32[Array, "n B C"], heads: Heads, has_delta: bool) -> _Chunks:
    """`heads` have axes [n, B, C, ...], too."""
    q, k = (jnp.moveaxis(x, 2, 3) for x in (heads.q, heads.k))  # nBJCk
    write, log_decay = (jnp.moveaxis(x, 2, -1) for x in (heads.write, heads.log_decay))  # nBJOC
    last_segments = jnp.pad(segments[:-1, :, -1], [(1, 0), (0, 0)], constant_values=-1)  # of the previous chunk
    is_continued = (segments == last_segments[:, :, None])[:, :, None, None]
    is_same = segments[..., :, None] == segments[..., None, :]
    is_seen = (is_same & jnp.tri(DELTA_CHUNK, dtype=bool))[:, :, None, None]

    total = jnp.cumsum(log_decay, axis=-1)
    decays = jnp.exp(jnp.where(is_seen, total[..., :, None] - total[..., None, :], -jnp.inf))
    from_state = jnp.where(is_continued, jnp.exp(total), 0)
    if has_delta:
        similarities = float32_einsum("nBJCk,nBJSk->nBJCS", k, k)[:, :, :, None]
        # Each position writes a weighted sum of the values up to its own.
        sums = _inverse(similarities * decays * write[..., None]) * write[..., None, :]
        values = float32_einsum("nBJOCS,nBSJOv->nBJOCv", sums, heads.v)
        reads = float32_einsum("nBJOCS,nBJSk->nBJOCk", sums * from_state[..., None, :], k)
    else:
        values, reads = jnp.moveaxis(heads.v, 2, 4) * write[..., None], None
    return _Chunks(
        q=q,
        k=k,
        values=values,
        reads=reads,
        scores=float32_einsum("nBJCk,nBJSk->nBJCS", q, k)[:, :, :, None] * decays,
        from_state=from_state,
        to_state=decays[..., -1, :],
    )


def _inverse(system: Float32[Array, "*batch C C"]) -> Float32[Array, "*batch C C"]:
    """The inverse of the matrix with ones on the diagonal and `system` below it, by forward substitution.

    Chunks and heads form the last axis, which fills a TPU's lanes. The loop runs over a quarter of the rows at a time,
    so that it reads fewer rows that are still empty. Unlike a power series, this does not cancel when keys are similar.
    """
    size = system.shape[-1]
    rows = jnp.where(jnp.tri(size, k=-1, dtype=bool), system, 0).reshape(-1, size, size).transpose(1, 2, 0)
    inverse = jnp.zeros((0, 0, rows.shape[-1]))
    for start in range(0, size, size // 4):
        stop = start + size // 4
        ones = jnp.eye(stop) * (jnp.arange(stop) >= start)
        inverse = jnp.pad(inverse, [(0, size // 4), (0, size // 4), (0, 0)]) + ones[..., None]
        inverse = jax.lax.fori_loop(start, stop, partial(_substitute_row, rows[:, :stop]), inverse)
    return inverse.transpose(2, 0, 1).reshape(system.shape)


def _substitute_row(
    rows: Float32[Array, "C S N"], row: Int32[Array, ""], inverse: Float32[Array, "S S N"]
) -> Float32[Array, "S S N"]:
    """Completes one row of the inverse."""
    return inverse.at[row].add(-jnp.sum(rows[row][:, None] * inverse, axis=0))
