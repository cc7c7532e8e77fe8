"""Beam search, as transformers' `generate(num_beams=n, num_return_sequences=n)` with its default length penalty of 1.

A prompt has n neighbouring rows of a device. Each runs one of the n likeliest sequences so far, and holds one of the n
best complete ones, with its score: the mean log-probability of its tokens. Of a step's candidates, the likeliest
continuations of all rows, those among the first n that end are complete, and the others run on. A search ends when its
likeliest running sequence scores no better than the worst of n complete ones, or at the maximum length.

Letters: G prompts, n beams, B = G n rows, V vocabulary, C completion slots, K candidates.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, PyTree

from pipeline.planning.generation_plan import GenerationSpec

_NEVER = -1e9  # added to the scores of what must not be chosen; transformers' value


class Beams(NamedTuple):
    """The searches: running sequences, and the complete ones. Each array may have rows [B] in place of [G, n]."""

    sequences: Int32[Array, "G n C"]
    totals: Float32[Array, "G n"]  # log-probabilities of the running sequences
    steps: Int32[Array, "G n"]  # their number of tokens
    completions: Int32[Array, "G n C"]  # best first
    counts: Int32[Array, "G n"]  # their number of tokens
    scores: Float32[Array, "G n"]
    is_complete: Bool[Array, "G n"]  # whether there are as many complete ones


class Searched(NamedTuple):
    """The searches after a step."""

    beams: Beams
    parents: Int32[Array, "G n"]  # which beam each row continues
    tokens: Int32[Array, "G n"]  # the last token of each running sequence
    is_active: Bool[Array, " G"]


def first_beams(num_prompts: int, spec: GenerationSpec) -> Beams:
    """Searches before the first token, when all beams of a prompt are equal, so that only the first counts."""
    shape = (num_prompts, spec.samples)
    zeros, never = jnp.zeros(shape, jnp.int32), jnp.full(shape, _NEVER, jnp.float32)
    tokens = jnp.zeros((*shape, spec.max_new_tokens), jnp.int32)
    return Beams(tokens, never.at[:, 0].set(0), zeros, tokens, zeros, never, jnp.zeros(shape, bool))


@jax.named_scope("beams")
def search(logits: Float32[Array, "G n V"], beams: Beams, spec: GenerationSpec) -> Searched:
    """One step of each search. Follows `_beam_search` of transformers 5 in the order and arithmetic of scores."""
    num_beams, num_candidates = spec.samples, max(2, 1 + len(spec.end_tokens)) * spec.samples
    totals = jax.nn.log_softmax(logits) + beams.totals[..., None]
    best, tokens = jax.lax.top_k(totals, min(num_candidates, totals.shape[-1]))  # of each beam
    best, flat = jax.lax.top_k(best.reshape(len(best), -1), num_candidates)
    parents, tokens = flat // tokens.shape[-1], jnp.take_along_axis(tokens.reshape(len(tokens), -1), flat, axis=1)
    sizes = beams.steps[:, :1] + 1
    lengths = sizes.astype(jnp.float32)
    is_last_slot = jnp.arange(spec.max_new_tokens) == beams.steps[:, :1, None]
    sequences = jnp.where(is_last_slot, tokens[..., None], _take(beams.sequences, parents))
    ends = jnp.isin(tokens, jnp.array(spec.end_tokens, jnp.int32)) | (sizes == spec.max_new_tokens)
    running, kept = jax.lax.top_k(best + ends * _NEVER, num_beams)
    is_new = ends & (jnp.arange(num_candidates) < num_beams)
    scores = jnp.concatenate([beams.scores, best / lengths + ~is_new * _NEVER], axis=1)
    scores, chosen = jax.lax.top_k(scores, num_beams)
    candidates = sequences, jnp.broadcast_to(sizes, tokens.shape), is_new
    complete = beams.completions, beams.counts, beams.is_complete
    merged = (jnp.concatenate(pair, axis=1) for pair in zip(complete, candidates, strict=True))
    completions, counts, is_complete = (_take(each, chosen) for each in merged)
    worst = jnp.where(is_complete.all(axis=1), scores[:, -1], _NEVER)
    sizes_of_beams = jnp.broadcast_to(sizes, kept.shape)
    return Searched(
        Beams(_take(sequences, kept), running, sizes_of_beams, completions, counts, scores, is_complete),
        parents=_take(parents, kept),
        tokens=_take(tokens, kept),
        is_active=(running[:, 0] / lengths[:, 0] > worst) & ~ends.all(axis=1),
    )


def next_beams(
    logits: Float32[Array, "B V"], beams: Beams, is_active: Bool[Array, " B"], spec: GenerationSpec
) -> Searched:
    """`search` for rows. Inactive ones keep what they have."""
    by_prompt = jax.tree.map(lambda array: array.reshape(-1, spec.samples, *array.shape[1:]), (logits, beams))
    found = search(*by_prompt, spec)
    found = found._replace(is_active=jnp.broadcast_to(found.is_active[:, None], found.parents.shape))
    found = jax.tree.map(lambda array: array.reshape(-1, *array.shape[2:]), found)
    own = jnp.arange(len(is_active)) % spec.samples
    kept = Searched(beams, own, beams.sequences[:, 0], is_active)
    return jax.tree.map(lambda new, old: jnp.where(is_active.reshape(-1, *[1] * (new.ndim - 1)), new, old), found, kept)


def reordered(caches: PyTree, parents: Int32[Array, " B"], num_beams: int) -> PyTree:
    """A device's caches [B, ...], with those of the beam that each row continues."""
    rows = jnp.arange(len(parents)) // num_beams * num_beams + parents
    return jax.tree.map(lambda array: array[rows], caches)


def _take(array: Array, indices: Int32[Array, "G m"]) -> Array:
    """Of each prompt, the items [G, m, ...] with these indices."""
    return jnp.take_along_axis(array, indices.reshape(*indices.shape, *[1] * (array.ndim - 2)), axis=1)
