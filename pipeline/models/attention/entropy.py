"""The entropy of attention, beside whichever implementation computes attention itself.

Letters: B rows, T query positions, S key positions, N heads, K key-value heads, G = N / K, H head dim.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pipeline.models.attention.spec import AttentionSpec

_BLOCK = 128  # queries at once: there are never [T, S] scores in memory


@jax.named_scope("attention_entropy")
def attention_entropy(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    segments: Int32[Array, "B T"],
    spec: AttentionSpec,
    sinks: Float[Array, " N"] | None = None,
) -> Float32[Array, "B T N"]:
    """In nats, of each query's attention to the keys of its segment that it sees, and to its head's sink."""
    length = q.shape[1]
    if length <= _BLOCK:
        return _of_queries(q, segments, jnp.arange(length), k=k, key_segments=segments, spec=spec, sinks=sinks)
    missing = -length % _BLOCK

    def blocks(values: Array) -> Array:
        """[B, T, ...] as [blocks, B, block, ...], with zeros behind the last position."""
        padded = jnp.pad(values, ((0, 0), (0, missing), *((0, 0),) * (values.ndim - 2)))
        return jnp.moveaxis(padded.reshape(len(values), -1, _BLOCK, *values.shape[2:]), 1, 0)

    of_queries = partial(_of_queries, k=k, key_segments=segments, spec=spec, sinks=sinks)
    order = jnp.arange(length + missing).reshape(-1, _BLOCK)
    entropies = jax.lax.map(lambda block: of_queries(*block), (blocks(q), blocks(segments), order))
    return jnp.moveaxis(entropies, 0, 1).reshape(len(q), length + missing, -1)[:, :length]


def _of_queries(
    q: Float[Array, "B T N H"],
    segments: Int32[Array, "B T"],
    order: Int32[Array, " T"],
    *,
    k: Float[Array, "B S K H"],
    key_segments: Int32[Array, "B S"],
    spec: AttentionSpec,
    sinks: Float[Array, " N"] | None,
) -> Float32[Array, "B T N"]:
    """`order` are the queries' positions in the row."""
    groups = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    scores = jnp.einsum("BTKGH,BSKH->BKGTS", groups, k, preferred_element_type=jnp.float32) * spec.scale
    if spec.softcap is not None:
        scores = jnp.tanh(scores / spec.softcap) * spec.softcap
    visible = segments[:, :, None] == key_segments[:, None, :]
    distances = order[:, None] - jnp.arange(k.shape[1])
    if spec.causal:
        visible &= distances >= 0
    if spec.window is not None:
        visible &= distances < spec.window
    scores = jnp.where(visible[:, None, None], scores, jnp.finfo(jnp.float32).min)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(*scores.shape[1:3], 1, 1)
        scores = jnp.concatenate([scores, jnp.broadcast_to(sinks, (*scores.shape[:-1], 1))], axis=-1)
    shifted = scores - jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(shifted)
    total = jnp.sum(weights, axis=-1)
    entropies = jnp.log(total) - jnp.sum(weights * shifted, axis=-1) / total
    return jnp.einsum("BKGT->BTKG", entropies).reshape(*q.shape[:3])
