"""The next tokens of each row: sampled from its logits, or proposed from its own text.

Letters: B rows, V vocabulary, S slots.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32, UInt32

from pipeline.planning.generation_plan import Sampling


def sample_keys(
    seed: int, high: UInt32[Array, " B"], low: UInt32[Array, " B"], samples: int
) -> UInt32[Array, "B samples 2"]:
    """The PRNG key of each sample of each document, from the halves of the document's number; the first sample's is the
    document's. It does not depend on batch, order or process."""

    def sample_key(high: Array, low: Array, sample: Array) -> Array:
        document = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), high), low)
        keys = (jax.random.key_data(key) for key in (document, jax.random.fold_in(document, sample)))
        return jnp.where(sample == 0, *keys)

    each = jax.vmap(sample_key, in_axes=(None, None, 0))
    return jax.vmap(each, in_axes=(0, 0, None))(high, low, jnp.arange(samples))


@jax.named_scope("sample")
def sample(
    logits: Float32[Array, "B V"], keys: UInt32[Array, "B 2"], numbers: Int32[Array, " B"], sampling: Sampling
) -> Int32[Array, " B"]:
    """Samples each row's token at index `numbers` of its completion, by the Gumbel-max trick.

    The sample depends only on the row's logits, key and index.
    """
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits / sampling.temperature
    ids = None
    if sampling.ranks_tokens:
        logits, ids = jax.lax.top_k(logits, min(sampling.top_k or logits.shape[-1], logits.shape[-1]))
    if sampling.has_top_p:
        probabilities = jax.nn.softmax(logits, axis=-1)
        preceding = jnp.cumsum(probabilities, axis=-1) - probabilities  # total probability of likelier tokens
        logits = jnp.where(preceding < sampling.top_p, logits, -jnp.inf)

    def noise(key: Array, number: Array) -> Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(key), number)
        return jax.random.gumbel(key, logits.shape[-1:], jnp.float32)

    drawn = jnp.argmax(logits + jax.vmap(noise)(keys, numbers), axis=-1).astype(jnp.int32)
    return drawn if ids is None else jnp.take_along_axis(ids, drawn[:, None], axis=-1)[:, 0]


_MAX_MATCH = 3  # tokens


@jax.named_scope("propose")
def propose(text: Int32[Array, "B S"], positions: Int32[Array, " B"], num: int) -> Int32[Array, "B num"]:
    """The `num` tokens proposed to follow each row's text up to `positions`.

    Of the earlier places with the longest match of up to 3 last tokens, the latest counts. The tokens from there on are
    repeated if they do not suffice. Without a match, the last token is repeated.
    """
    positions, slots = positions[:, None], jnp.arange(text.shape[1])
    matches, length = slots < positions, jnp.zeros_like(text)
    for back in range(_MAX_MATCH):
        token = jnp.take_along_axis(text, jnp.maximum(positions - back, 0), axis=1)
        matches &= (jnp.roll(text, back, axis=1) == token) & (slots >= back)
        length += matches
    ranks = jnp.where(slots < positions, length * text.shape[1] + slots, 0)
    match = jnp.max(ranks, axis=1, keepdims=True) % text.shape[1]
    period = jnp.maximum(positions - match, 1)
    return jnp.take_along_axis(text, match + 1 + jnp.arange(num) % period, axis=1)
