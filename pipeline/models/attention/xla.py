"""Attention as matrix products, for every platform. The kernels are compared with it.

Letters: B rows, T query positions, S key positions, N heads, K key-value heads, G = N / K, H head dim,
W head dim of values.
"""

import math
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

from pipeline.models.attention.arithmetic import map_parts
from pipeline.models.attention.spec import AttentionInputs, AttentionSpec

_PART = 128  # queries
_MOST_SCORE_BYTES = 1 << 28  # of a row's block of queries; a larger block is computed in parts, one after the other


def attend_xla(inputs: AttentionInputs, spec: AttentionSpec) -> Float[Array, "B T N W"]:
    """`Attend` over blocks of queries, each with the keys that it may attend to, so that [T, S] scores are never in
    memory.

    Rows and heads are the first axes, with which matrix products are fastest (measured in docs/performance.md).
    """
    q, k, v, segments, sinks = inputs[:5]
    key_segments, offset = inputs.segments_of_keys, inputs.start
    length, num_heads = q.shape[1:3]
    k, v = jnp.einsum("BSKH->BKSH", k), jnp.einsum("BSKH->BKSH", v)
    order, key_order = (offset + jnp.arange(length))[None], jnp.arange(k.shape[2])

    def attend(queries: tuple[Array, Array, Array], keys: slice) -> Float[Array, "B t N W"]:
        q, segments, order = queries
        visible = segments[:, :, None] == key_segments[:, None, keys]
        visible = spec.masked(visible, order[:, :, None] - key_order[keys])
        groups = jnp.einsum("BTKGH->BKGTH", q.reshape(*q.shape[:2], k.shape[1], -1, q.shape[3]))
        z = attend_visible(groups, k[:, :, keys], v[:, :, keys], visible, spec, sinks)
        return jnp.einsum("BKGTH->BTKGH", z).reshape(*q.shape[:3], -1)

    is_known = isinstance(offset, int)  # else each block gets all keys, so only one is in memory at a time
    blocks = []
    for start, stop in _query_blocks(length) if is_known else [(0, length)]:
        keys = slice(None)
        if is_known and spec.causal:
            keys = slice(max(0, offset + start + 1 - (spec.window or offset + length)), offset + stop)
        score_bytes = 4 * num_heads * (stop - start) * len(key_order[keys])
        size = stop - start if is_known and score_bytes < _MOST_SCORE_BYTES else _PART
        queries = tuple(x[:, start:stop] for x in (q, segments, order))
        blocks.append(map_parts(partial(attend, keys=keys), queries, size))
    return jnp.concatenate(blocks, axis=1)


def _query_blocks(length: int) -> list[tuple[int, int]]:
    """At most 16 blocks of a multiple of _PART queries, so that the program's size does not grow with the length."""
    size = _PART * math.ceil(length / (_PART * 16))
    return [(start, min(start + size, length)) for start in range(0, length, size)]


def attend_visible(
    q: Float[Array, "B K G T H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S W"],
    visible: Bool[Array, "B T S"],
    spec: AttentionSpec,
    sinks: Float[Array, " N"] | None = None,
) -> Float[Array, "B K G T W"]:
    """Attention of each query to the keys that are `visible` to it, at least one."""
    queries = q.reshape(*q.shape[:2], -1, q.shape[-1])
    before = None if sinks is None else sums_of_sinks(sinks, k.shape[1], q.shape[3])
    z = softmax_sums(products(queries, k), v, visible, spec, before=before).mean().astype(v.dtype)
    return z.reshape(*q.shape[:-1], -1)


class SoftmaxSums(NamedTuple):
    """Of a softmax over some keys, relative to the highest score. Q = G * T."""

    highest: Float32[Array, "B K Q 1"]
    total: Float32[Array, "B K Q 1"]  # of exp(score - highest)
    z: Float32[Array, "B K Q W"] | float  # of exp(score - highest) * value

    def mean(self) -> Float32[Array, "B K Q W"]:
        return self.z / self.total


def sums_of_sinks(sinks: Float[Array, " N"], num_kv_heads: int, length: int) -> SoftmaxSums:
    """Those of the sinks alone, for `length` queries per row; their shapes broadcast over rows."""
    highest = jnp.repeat(sinks.astype(jnp.float32).reshape(num_kv_heads, -1), length, axis=1)[..., None]
    return SoftmaxSums(highest, jnp.ones_like(highest), 0.0)


def products(q: Float[Array, "B K Q H"], k: Float[Array, "B K S H"]) -> Float32[Array, "B K Q S"]:
    """Queries times keys, which may be int8: these values are exact in every float dtype."""
    return jnp.einsum("BKQH,BKSH->BKQS", q, k.astype(q.dtype), preferred_element_type=jnp.float32)


def softmax_sums(
    products: Float32[Array, "B K Q S"],
    v: Float[Array, "B K S W"],
    visible: Bool[Array, "B T S"],
    spec: AttentionSpec,
    value_scale: Float32[Array, "B K S"] | None = None,
    before: SoftmaxSums | None = None,
) -> SoftmaxSums:
    """The sums over the keys that are `visible`, added to those `before`. `value_scale` multiplies the values.

    With products of four axes, an added mask and a division at the end, XLA's CPU backend fuses everything into one
    loop: 28 -> 11 ms for 8 rows of 256 and 12 heads of 64, float32, on two cores. The mask does not hide a non-finite
    score or value: the query's z is then non-finite. Keys that are not visible add exactly 0 if any before were.
    """
    scores = spec.capped(products * spec.scale)
    bias = jnp.where(visible, 0, jnp.finfo(jnp.float32).min / 2)  # half, so that the sum is finite
    scores += jnp.tile(bias, (1, products.shape[2] // visible.shape[1], 1))[:, None]
    highest = jnp.max(scores, axis=-1, keepdims=True)
    if before is not None:
        highest = jnp.maximum(highest, before.highest)
    weights = jnp.exp(scores - highest)
    scaled_weights = weights if value_scale is None else weights * value_scale[:, :, None]
    z = jnp.einsum("BKQS,BKSH->BKQH", scaled_weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if before is not None:
        shrunk = jnp.exp(before.highest - highest)
        total, z = total + before.total * shrunk, z + before.z * shrunk
    return SoftmaxSums(highest, total, z)
