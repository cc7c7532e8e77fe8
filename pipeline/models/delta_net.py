"""Gated DeltaNet: a linear attention whose state decays, and forgets what is written anew (Yang et al., arXiv
2412.06464; transformers' `Qwen3_5GatedDeltaNet`).

Documents of a row do not see each other: convolutions and states begin anew with each segment.

Letters: B rows, T positions, D model dim, J key heads, O value heads of each, k and v dims of a key and of a value
head, c taps of the convolutions; a row has n chunks of C positions.
"""

from dataclasses import replace
from functools import partial
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pipeline.core.sites import Site
from pipeline.models.architecture import DELTA_CHUNK, Architecture, Norm
from pipeline.models.layers import ACTIVATIONS, Weights, norm, norm_if_any, project
from pipeline.models.partition import Partition


class Heads(NamedTuple):
    """What the delta rule computes with, in float32."""

    q: Float32[Array, "B T J k"]
    k: Float32[Array, "B T J k"]
    v: Float32[Array, "B T J O v"]
    write: Float32[Array, "B T J O"]  # 0: the state stays as it is, 1: what the key finds is replaced
    log_decay: Float32[Array, "B T J O"]  # of the state, before the position writes


class Recur(Protocol):
    """How the positions of a DeltaNet get at what comes before them."""

    def convolved(
        self,
        name: str,
        x: Float[Array, "B T *heads"],
        taps: Float[Array, "*heads 1 c"],
        segments: Int32[Array, "B T"],
    ) -> Float32[Array, "B T *heads"]:
        """Each feature of x (`name`: q, k or v) with those before it of the same document, the last tap for itself."""

    def outputs(self, segments: Int32[Array, "B T"], heads: Heads, partition: Partition) -> Float32[Array, "B T J O v"]:
        """Those of the delta rule."""


class WholeRows:
    """`Recur` of rows that have all that comes before: documents begin with nothing."""

    def convolved(self, name: str, x: Array, taps: Array, segments: Array) -> Array:
        return convolution(x, taps, segments)

    def outputs(self, segments: Array, heads: Heads, partition: Partition) -> Array:
        return partition.by_rows_and_heads(delta_rule, segments, heads)[0]


@jax.named_scope("delta_net")
def delta_block(
    x: Float[Array, "B T D"],
    attention: Weights,
    weights: Weights,
    arch: Architecture,
    segments: Int32[Array, "B T"],
    partition: Partition,
    recur: Recur = WholeRows(),  # noqa: B008  it has no state
) -> dict[Site, Array]:
    """The sites of a gated DeltaNet on the residual stream x. `attention` has the norm before it."""
    x = norm_if_any(x, attention, "norm", arch)
    heads = _heads(x, weights, arch, segments, recur)
    out = recur.outputs(segments, heads, partition).astype(x.dtype)
    out = norm(out, weights, "z_norm", replace(arch, norm=Norm.rms)).astype(jnp.float32)
    out *= jax.nn.silu(project(x, weights, "z").astype(jnp.float32))
    return {Site.attn_in: x, Site.attn_out: project(out.astype(x.dtype), weights, "o")}


def _heads(
    x: Float[Array, "B T D"], weights: Weights, arch: Architecture, segments: Int32[Array, "B T"], recur: Recur
) -> Heads:
    def convolved(name: str) -> Float32[Array, "B T *heads"]:
        y = recur.convolved(name, project(x, weights, name), weights[f"{name}_taps"], segments)
        return ACTIVATIONS[arch.activation](y)

    rate = jnp.exp(weights["decay_log_rate"])
    time = jax.nn.softplus(project(x, weights, "decay").astype(jnp.float32) + weights["decay_offset"])
    return Heads(
        q=_unit(convolved("q")) * arch.delta.key_dim**-0.5,
        k=_unit(convolved("k")),
        v=convolved("v"),
        write=jax.nn.sigmoid(project(x, weights, "write").astype(jnp.float32)),
        log_decay=-rate * time,
    )


def _unit(x: Float32[Array, "*heads k"]) -> Float32[Array, "*heads k"]:
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


def convolution(
    x: Float[Array, "B T *heads"], taps: Float[Array, "*heads 1 c"], segments: Int32[Array, "B T"]
) -> Float32[Array, "B T *heads"]:
    """Each feature with those before it of the same document, the last tap for itself."""
    num_taps = taps.shape[-1]
    total = jnp.zeros(x.shape, jnp.float32)
    for back in range(num_taps):
        is_same = segments == _shifted(segments, back)
        earlier = jnp.where(is_same.reshape(*segments.shape, *[1] * (x.ndim - 2)), _shifted(x, back), 0)
        total += earlier.astype(jnp.float32) * taps[..., 0, num_taps - 1 - back].astype(jnp.float32)
    return total


def _shifted(x: Array, back: int) -> Array:
    """The value `back` positions earlier, 0 before the row."""
    return jnp.pad(x[:, : x.shape[1] - back], [(0, 0), (back, 0), *[(0, 0)] * (x.ndim - 2)])


class _Chunks(NamedTuple):
    """A row's chunks, as far as they do not depend on the state. `values` and `reads` are a position's write into the
    state, of which `reads` times the state is subtracted."""

    q: Float32[Array, "n B J C k"]
    k: Float32[Array, "n B J C k"]
    values: Float32[Array, "n B J O C v"]
    reads: Float32[Array, "n B J O C k"]
    scores: Float32[Array, "n B J O C C"]  # of queries and the keys of the chunk, decayed
    from_state: Float32[Array, "n B J O C"]  # decay of the state; 0 in documents that begin in the chunk
    to_state: Float32[Array, "n B J O C"]  # decay until the chunk's end; 0 in documents that end in it


def delta_rule(
    segments: Int32[Array, "B T"], heads: Heads
) -> tuple[Float32[Array, "B T J O v"], Float32[Array, "B 1 J O k v"]]:
    """The outputs of all value heads, as transformers' `torch_chunk_gated_delta_rule`: for each position in turn, with
    a state S of each document that is 0 before it, S *= decay; S += write * k (v - S^T k)^T; S^T q is the output. And
    the states after the rows.

    Within a chunk a triangular system takes the place of these steps, so that matrices are multiplied.
    """
    num_rows, length = segments.shape
    segments, heads = _chunked(segments, mode="edge"), jax.tree.map(_chunked, heads)  # they do not change the state

    def step(state: Float32[Array, "B J O k v"], chunk: _Chunks) -> tuple[Array, Float32[Array, "B J O C v"]]:
        values = chunk.values - jnp.einsum("BJOCk,BJOkv->BJOCv", chunk.reads, state)
        outputs = jnp.einsum("BJCk,BJOkv->BJOCv", chunk.q, state) * chunk.from_state[..., None]
        outputs += jnp.einsum("BJOCS,BJOSv->BJOCv", chunk.scores, values)
        written = jnp.einsum("BJCk,BJOCv->BJOkv", chunk.k, values * chunk.to_state[..., None])
        return state * chunk.from_state[..., -1, None, None] + written, outputs

    chunks = _within_chunks(segments, heads)
    state = jnp.zeros((*chunks.values.shape[1:4], chunks.k.shape[-1], chunks.values.shape[-1]), jnp.float32)
    state, outputs = jax.lax.scan(step, state, chunks)  # outputs: nBJOCv
    outputs = outputs.transpose(1, 0, 4, 2, 3, 5).reshape(num_rows, -1, *outputs.shape[2:4], outputs.shape[-1])
    return outputs[:, :length], state[:, None]


def delta_step(
    state: Float32[Array, "B J O k v"], heads: Heads
) -> tuple[Float32[Array, "B 1 J O v"], Float32[Array, "B J O k v"]]:
    """The delta rule of one position: the outputs, and the states after it."""
    q, k, v, write, log_decay = (x[:, 0] for x in heads)
    state = state * jnp.exp(log_decay)[..., None, None]
    found = jnp.einsum("BJk,BJOkv->BJOv", k, state)
    state += jnp.einsum("BJk,BJOv->BJOkv", k, write[..., None] * (v - found))
    return jnp.einsum("BJk,BJOkv->BJOv", q, state)[:, None], state


def _chunked(x: Array, mode: str = "constant") -> Array:
    """[B, T, ...] -> [n, B, C, ...]; positions after the row are padding."""
    x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % DELTA_CHUNK), *[(0, 0)] * (x.ndim - 2)], mode=mode)
    return jnp.moveaxis(x.reshape(x.shape[0], -1, DELTA_CHUNK, *x.shape[2:]), 1, 0)


def _within_chunks(segments: Int32[Array, "n B C"], heads: Heads) -> _Chunks:
    """`heads` have the axes [n, B, C, ...], too."""
    q, k = (jnp.moveaxis(x, 2, 3) for x in (heads.q, heads.k))  # nBJCk
    write, log_decay = (jnp.moveaxis(x, 2, -1) for x in (heads.write, heads.log_decay))  # nBJOC
    of_state = jnp.pad(segments[:-1, :, -1], [(1, 0), (0, 0)], constant_values=-1)  # the document whose state comes in
    is_continued = (segments == of_state[:, :, None])[:, :, None, None]
    is_same = segments[..., :, None] == segments[..., None, :]
    is_seen = (is_same & jnp.tri(DELTA_CHUNK, dtype=bool))[:, :, None, None]

    passed = jnp.cumsum(log_decay, axis=-1)
    decays = jnp.exp(jnp.where(is_seen, passed[..., :, None] - passed[..., None, :], -jnp.inf))
    from_state = jnp.where(is_continued, jnp.exp(passed), 0)
    similarities = jnp.einsum("nBJCk,nBJSk->nBJCS", k, k)[:, :, :, None]
    # What each position writes, as a sum over its own value and those before it.
    sums = _inverse(similarities * decays * write[..., None]) * write[..., None, :]
    return _Chunks(
        q=q,
        k=k,
        values=jnp.einsum("nBJOCS,nBSJOv->nBJOCv", sums, heads.v),
        reads=jnp.einsum("nBJOCS,nBJSk->nBJOCk", sums * from_state[..., None, :], k),
        scores=jnp.einsum("nBJCk,nBJSk->nBJCS", q, k)[:, :, :, None] * decays,
        from_state=from_state,
        to_state=decays[..., -1, :],
    )


def _inverse(system: Float32[Array, "*batch C C"]) -> Float32[Array, "*batch C C"]:
    """Of the matrix with ones on the diagonal and `system` below it, row by row.

    Chunks and heads are the last axis, which fills a TPU's lanes. A quarter of the rows at a time, so that loops do not
    read those that are still empty. Unlike a series of powers this does not cancel where keys are alike.
    """
    size = system.shape[-1]
    rows = jnp.where(jnp.tri(size, k=-1, dtype=bool), system, 0).reshape(-1, size, size).transpose(1, 2, 0)
    inverse = jnp.zeros((0, 0, rows.shape[-1]))
    for start in range(0, size, size // 4):
        stop = start + size // 4
        ones = jnp.eye(stop) * (jnp.arange(stop) >= start)
        inverse = jnp.pad(inverse, [(0, size // 4), (0, size // 4), (0, 0)]) + ones[..., None]
        inverse = jax.lax.fori_loop(start, stop, partial(_substituted, rows[:, :stop]), inverse)
    return inverse.transpose(2, 0, 1).reshape(system.shape)


def _substituted(
    rows: Float32[Array, "C S N"], row: Int32[Array, ""], inverse: Float32[Array, "S S N"]
) -> Float32[Array, "S S N"]:
    """The inverse with a further row."""
    return inverse.at[row].add(-jnp.sum(rows[row][:, None] * inverse, axis=0))
