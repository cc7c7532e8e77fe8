"""Attention as matrix products over the keys that a query's segment reaches, for packed rows on CPUs.

It rounds differently from `attend_xla`, so `auto` does not choose it: a resumed store must get the same values.

Letters: B rows, T positions, N heads, K key-value heads, G = N / K, H head dim, W head dim of values, Q blocks of a
row, P = 256 positions.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int32

from pipeline.models.architecture import Architecture
from pipeline.models.attention.dividing import divide_attention, obstacle_to_dividing
from pipeline.models.attention.segment_blocks import reached_blocks
from pipeline.models.attention.spec import AttentionSpec
from pipeline.models.attention.xla import sink_scores

_BLOCK = 256
_MASKED = jnp.finfo(jnp.float32).min / 2  # half, so that the sum with a score is finite


def obstacle(arch: Architecture, mesh: Mesh, length: int, dtype: str) -> str | None:
    """Why the model cannot use it, as a clause for messages; None if it can."""
    return obstacle_to_dividing(arch, mesh, length, _BLOCK)


@jax.named_scope("xla_segments")
def attend_xla_segments(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K W"],
    segments: Int32[Array, "B T"],
    spec: AttentionSpec,
    sinks: Float[Array, " N"] | None = None,
    *,
    mesh: Mesh,
) -> Float[Array, "B T N W"]:
    """`Attend` with rows divided along the mesh's `data` axis and heads along `tensor`."""
    return divide_attention(partial(_attend_on_device, spec=spec), mesh)(q, k, v, segments, sinks)


def _attend_on_device(
    q: Array, k: Array, v: Array, segments: Array, sinks: Array | None, *, spec: AttentionSpec
) -> Array:
    """One block of queries at a time, over the blocks of keys from the first to the last that it reaches."""
    num_rows, length, num_heads, head_dim = q.shape
    num_blocks, num_kv_heads = length // _BLOCK, k.shape[2]
    blocks = jnp.arange(num_blocks)
    distances = blocks[:, None] - blocks
    visible = reached_blocks(segments, _BLOCK)
    if spec.causal:
        visible &= distances >= 0
    if spec.window is not None:
        visible &= distances * _BLOCK < spec.window + _BLOCK - 1
    first, last = jnp.argmax(visible, axis=2), num_blocks - 1 - jnp.argmax(visible[:, :, ::-1], axis=2)

    q = q.reshape(num_rows, num_blocks, _BLOCK, num_kv_heads, -1, head_dim)
    q = jnp.einsum("BQPKGH->BQKGPH", q).reshape(num_rows * num_blocks, num_kv_heads, -1, head_dim)
    k, v = (jnp.einsum("BTKH->BKTH", x) for x in (k, v))

    def attend_block(block: tuple[Array, ...]) -> Array:
        q, row, number, first, last = block
        return _attend_block(q, number, (first, last), (k[row], v[row], segments[row]), sinks, spec)

    rows, numbers = (x.reshape(-1) for x in jnp.mgrid[:num_rows, :num_blocks])
    z = jax.lax.map(attend_block, (q, rows, numbers, first.reshape(-1), last.reshape(-1)))
    z = z.reshape(num_rows, num_blocks, num_kv_heads, -1, _BLOCK, v.shape[-1])
    return jnp.einsum("BQKGPH->BQPKGH", z).reshape(num_rows, length, num_heads, -1)


def _attend_block(
    q: Float[Array, "K GP H"],
    number: Int32[Array, ""],
    limits: tuple[Int32[Array, ""], Int32[Array, ""]],
    row: tuple[Float[Array, "K T H"], Float[Array, "K T W"], Int32[Array, " T"]],
    sinks: Float[Array, " N"] | None,
    spec: AttentionSpec,
) -> Float[Array, "K GP W"]:
    """Attention of block `number` of a row's queries to the blocks of keys within `limits` (both included), by an
    online softmax (Milakov and Gimelshein, arXiv 1805.02867). `row` is the row's keys, values and segments."""
    k, v, segments = row
    order = jnp.arange(_BLOCK)

    def slice_block(x: Array, number: Array, axis: int) -> Array:
        return jax.lax.dynamic_slice_in_dim(x, number * _BLOCK, _BLOCK, axis)

    def step(keys: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        highest, total, z = carry
        scores = jnp.einsum("KQH,KSH->KQS", q, slice_block(k, keys, 1), preferred_element_type=jnp.float32) * spec.scale
        scores = spec.capped(scores)
        distances = (number - keys) * _BLOCK + order[:, None] - order
        visible = slice_block(segments, number, 0)[:, None] == slice_block(segments, keys, 0)
        visible = spec.masked(visible, distances)
        scores += jnp.tile(jnp.where(visible, 0, _MASKED), (q.shape[1] // _BLOCK, 1))
        new_highest = jnp.maximum(highest, jnp.max(scores, axis=-1, keepdims=True))
        weights, decay = jnp.exp(scores - new_highest), jnp.exp(highest - new_highest)
        added = jnp.einsum(
            "KQS,KSH->KQH", weights.astype(v.dtype), slice_block(v, keys, 1), preferred_element_type=jnp.float32
        )
        return new_highest, decay * total + jnp.sum(weights, axis=-1, keepdims=True), decay * z + added

    zeros = jnp.zeros((*q.shape[:2], 1), jnp.float32)
    highest, total = zeros + jnp.finfo(jnp.float32).min, zeros
    if sinks is not None:
        highest, total = sink_scores(sinks, len(k), _BLOCK), zeros + 1
    start = highest, total, jnp.zeros((*q.shape[:2], v.shape[-1]), jnp.float32)
    _, total, z = jax.lax.fori_loop(limits[0], limits[1] + 1, step, start)
    return (z / total).astype(v.dtype)
