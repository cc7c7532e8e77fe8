"""Attention patterns and their entropy, computed separately from the attention implementation.

Letters: B rows, T query positions, S key positions, N heads, K key-value heads, G = N / K, H head dim.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pipeline.models.attention.arithmetic import map_parts
from pipeline.models.attention.spec import AttentionInputs, AttentionSpec

_BLOCK = 128  # queries at a time, so that [T, S] scores are never in memory


@jax.named_scope("attention_entropy")
def attention_entropy(inputs: AttentionInputs, spec: AttentionSpec) -> Float32[Array, "B T N"]:
    """The entropy, in nats, of each query's attention over the visible keys of its segment and its head's sink."""
    queries = inputs.q, inputs.segments, inputs.start + jnp.arange(inputs.q.shape[1])[None]
    return map_parts(lambda block: _entropy(_shifted_scores(*block, inputs, spec)), queries, _BLOCK)


def _entropy(shifted: Float32[Array, "B K G T S"]) -> Float32[Array, "B T N"]:
    """The entropy of the softmax of `_shifted_scores`, in nats."""
    weights = jnp.exp(shifted)
    total = jnp.sum(weights, axis=-1)
    entropies = jnp.log(total) - jnp.sum(weights * shifted, axis=-1) / total
    entropies = jnp.einsum("BKGT->BTKG", entropies)
    return entropies.reshape(*entropies.shape[:2], -1)


@jax.named_scope("attention_pattern")
def attention_pattern(
    inputs: AttentionInputs, documents: Int32[Array, "B T"], selected: Int32[Array, "B S"], spec: AttentionSpec
) -> Float32[Array, "B S N T"]:
    """The attention of the queries at row positions `selected` (-1: no query, values undefined). The last axis is the
    position in the query's document: each head's attention to the document's first, second, ... token, then 0."""
    positions, length = jnp.maximum(selected, 0), documents.shape[1]
    queries = jnp.take_along_axis(inputs.q, positions[:, :, None, None], axis=1)
    query_segments, query_documents = (
        jnp.take_along_axis(numbers, positions, axis=1) for numbers in (inputs.segments, documents)
    )
    weights = jnp.exp(_shifted_scores(queries, query_segments, positions, inputs, spec))
    pattern = weights[..., :length] / jnp.sum(weights, axis=-1, keepdims=True)
    starts = jnp.argmax(documents[:, None, :] == query_documents[:, :, None], axis=-1)  # of the query's document
    indices = starts[:, :, None] + jnp.arange(length)
    inside = indices < length
    shifted = jnp.take_along_axis(pattern, jnp.where(inside, indices, 0)[:, None, None], axis=-1)
    shifted = jnp.where(inside[:, None, None], shifted, 0)
    return jnp.einsum("BKGTS->BTKGS", shifted).reshape(*queries.shape[:3], -1)


def _shifted_scores(
    q: Float[Array, "B T N H"],
    segments: Int32[Array, "B T"],
    order: Int32[Array, "B|1 T"],
    inputs: AttentionInputs,
    spec: AttentionSpec,
) -> Float32[Array, "B K G T S|S+1"]:
    """Scores of the queries q at row positions `order`, minus each query's largest score. Masked keys get the smallest
    float before that. With sinks, the last score is the sink's."""
    k, sinks = inputs.k, inputs.sinks
    groups = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    scores = jnp.einsum("BTKGH,BSKH->BKGTS", groups, k, preferred_element_type=jnp.float32) * spec.scale
    scores = spec.capped(scores)
    visible = segments[:, :, None] == inputs.segments_of_keys[:, None, :]
    visible = spec.masked(visible, order[:, :, None] - jnp.arange(k.shape[1]))
    scores = jnp.where(visible[:, None, None], scores, jnp.finfo(jnp.float32).min)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(*scores.shape[1:3], 1, 1)
        scores = jnp.concatenate([scores, jnp.broadcast_to(sinks, (*scores.shape[:-1], 1))], axis=-1)
    return scores - jnp.max(scores, axis=-1, keepdims=True)
