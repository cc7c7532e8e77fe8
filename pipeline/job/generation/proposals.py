"""Proposes each row's next tokens: those that followed its last tokens when they last occurred in its text.

Letters: B rows, S slots.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

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
