"""The next token of each row, from its logits.

Letters: B rows, V vocabulary.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32, UInt32

from pipeline.errors import ConfigError

_LEAST_TEMPERATURE = 1e-6  # logits divided by much less are infinite


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. `top_k` and `top_p` narrow the choice in that order, as transformers does."""

    temperature: float = 0.0  # 0: greedy, the likeliest token
    top_k: int | None = None  # of the likeliest tokens only
    top_p: float | None = None  # of the fewest likeliest tokens that together have this probability
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.temperature == 0 or self.temperature >= _LEAST_TEMPERATURE):
            raise ConfigError(
                f"temperature is {self.temperature}. Set it to 0 (greedy), or to at least {_LEAST_TEMPERATURE:g}."
            )
        if not 0 <= self.seed < 1 << 32:  # JAX drops the other bits
            raise ConfigError(f"seed is {self.seed}. Set it to 0..{(1 << 32) - 1}.")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k is {self.top_k}. Set it to at least 1, or to null.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}. Set it to more than 0 and at most 1, or to null.")


def document_keys(seed: int, high: UInt32[Array, " B"], low: UInt32[Array, " B"]) -> UInt32[Array, "B 2"]:
    """The random key of each document, by the halves of its number: independent of batch, order and process."""

    def of_document(high: Array, low: Array) -> Array:
        return jax.random.key_data(jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), high), low))

    return jax.vmap(of_document)(high, low)


@jax.named_scope("sample")
def sample(
    logits: Float32[Array, "B V"], keys: UInt32[Array, "B 2"], numbers: Int32[Array, " B"], sampling: Sampling
) -> Int32[Array, " B"]:
    """The token that comes as number `numbers` (from 0) in each row's completion.

    By the Gumbel-max trick: the draw depends on a row's own key and number, whatever the other rows are.
    """
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits / sampling.temperature
    ids = None
    has_top_p = sampling.top_p is not None and sampling.top_p < 1
    if sampling.top_k is not None or has_top_p:
        logits, ids = jax.lax.top_k(logits, min(sampling.top_k or logits.shape[-1], logits.shape[-1]))
    if has_top_p:
        probabilities = jax.nn.softmax(logits, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities  # of the likelier tokens together
        logits = jnp.where(before < sampling.top_p, logits, -jnp.inf)

    def noise(key: Array, number: Array) -> Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(key), number)
        return jax.random.gumbel(key, logits.shape[-1:], jnp.float32)

    drawn = jnp.argmax(logits + jax.vmap(noise)(keys, numbers), axis=-1).astype(jnp.int32)
    return drawn if ids is None else jnp.take_along_axis(ids, drawn[:, None], axis=-1)[:, 0]
