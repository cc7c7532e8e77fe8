"""Attention as matrix products, for every platform. The kernels are compared with it.

Letters: B rows, T query positions, S key positions, N heads, K key-value heads, G = N / K, H head dim,
W head dim of values.
"""

import math

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

from pipeline.models.attention.spec import AttentionInputs, AttentionSpec


def attend_xla(inputs: AttentionInputs, spec: AttentionSpec) -> Float[Array, "B T N W"]:
    """`Attend` over blocks of queries, each with the keys that it may attend to, so that [T, S] scores are never in
    memory.

    Rows and heads are the first axes, with which matrix products are fastest (measured in docs/performance.md).
    """
    q, k, v, segments, sinks = inputs
    num_rows, length, num_heads, head_dim = q.shape
    groups = q.reshape(num_rows, length, k.shape[2], num_heads // k.shape[2], head_dim)
    q, k, v = jnp.einsum("BTKGH->BKGTH", groups), jnp.einsum("BSKH->BKSH", k), jnp.einsum("BSKH->BKSH", v)
    order = jnp.arange(length)
    blocks = []
    for start, stop in _query_blocks(length):
        keys = slice(max(0, start + 1 - (spec.window or length)), stop if spec.causal else length)
        visible = segments[:, start:stop, None] == segments[:, None, keys]
        visible = spec.masked(visible, order[start:stop, None] - order[keys])
        blocks.append(attend_visible(q[:, :, :, start:stop], k[:, :, keys], v[:, :, keys], visible, spec, sinks))
    z = jnp.concatenate(blocks, axis=3)
    return jnp.einsum("BKGTH->BTKGH", z).reshape(num_rows, length, num_heads, -1)


def _query_blocks(length: int) -> list[tuple[int, int]]:
    """At most 16 blocks of a multiple of 128 queries, so that the program's size does not grow with the length."""
    size = 128 * math.ceil(length / (128 * 16))
    return [(start, min(start + size, length)) for start in range(0, length, size)]


def attend_visible(
    q: Float[Array, "B K G T H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S W"],
    visible: Bool[Array, "B T S"],
    spec: AttentionSpec,
    sinks: Float[Array, " N"] | None = None,
    scales: tuple[Float32[Array, "B K S"], Float32[Array, "B K S"]] | None = None,
) -> Float[Array, "B K G T W"]:
    """Attention of each query to the keys that are `visible` to it, at least one. `scales` multiply int8 keys and
    values.

    With products of four axes, an added mask and a division at the end, XLA's CPU backend fuses everything into one
    loop: 28 -> 11 ms for 8 rows of 256 and 12 heads of 64, float32, on two cores. The mask does not hide a non-finite
    score or value: the query's z is then non-finite.
    """
    num_groups, length = q.shape[2:4]
    q = q.reshape(*q.shape[:2], -1, q.shape[-1])
    k, v = k.astype(q.dtype), v.astype(q.dtype)  # int8 values are exact in every float dtype
    scores = jnp.einsum("BKQH,BKSH->BKQS", q, k, preferred_element_type=jnp.float32) * spec.scale
    if scales is not None:
        scores *= scales[0][:, :, None]
    scores = spec.capped(scores)
    bias = jnp.where(visible, 0, jnp.finfo(jnp.float32).min / 2)  # half, so that the sum is finite
    scores += jnp.tile(bias, (1, num_groups, 1))[:, None]
    highest = jnp.max(scores, axis=-1, keepdims=True)
    if sinks is not None:
        sinks = jnp.repeat(sinks.astype(jnp.float32).reshape(k.shape[1], -1), length, axis=1)[..., None]
        highest = jnp.maximum(highest, sinks)
    weights = jnp.exp(scores - highest)
    scaled_weights = weights if scales is None else weights * scales[1][:, :, None]
    z = jnp.einsum("BKQS,BKSH->BKQH", scaled_weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total += jnp.exp(sinks - highest)
    z = (z / total).astype(v.dtype)
    return z.reshape(*z.shape[:2], num_groups, length, -1)
