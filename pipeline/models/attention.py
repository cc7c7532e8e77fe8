"""Attention behind one function. Documents that share a row do not see each other.

Letters: B rows, T query positions, S key positions, N heads, K key-value heads, G = N / K, H head dim.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from pipeline.errors import ConfigError


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segments: Int32[Array, "B T"],
    *,
    causal: bool,
    impl: str,
) -> Float[Array, "B T N H"]:
    """Softmax attention within each segment, scaled by 1 / sqrt(H); q and k already rotated.

    `segments` numbers the documents of a row from 1; 0 is padding, which sees only padding: no position is without
    keys, so none is NaN. Heads n of q with the same n // G share key-value head k. Scores and softmax are float32.
    `impl` is `xla`, or `auto` for the fastest one of the platform. Raises ConfigError for another `impl`.
    """
    if impl not in _IMPLEMENTATIONS:
        raise ConfigError(f"model.attention is {impl!r}. Set it to one of {', '.join(_IMPLEMENTATIONS)}.")
    return _IMPLEMENTATIONS[impl](q, k, v, segments, causal)


def visible(segments: Int32[Array, "B T"], causal: bool) -> Bool[Array, "B T S"]:
    """Which keys each query sees."""
    same_document = segments[:, :, None] == segments[:, None, :]
    if not causal:
        return same_document
    order = jnp.arange(segments.shape[1])
    return same_document & (order[:, None] >= order[None, :])


def _xla(q: Array, k: Array, v: Array, segments: Array, causal: bool) -> Array:
    """The reference: plain matrix products, the [T, S] scores in memory."""
    num_rows, length, num_heads, head_dim = q.shape
    groups = q.reshape(num_rows, length, k.shape[2], num_heads // k.shape[2], head_dim)
    scores = jnp.einsum("BTKGH,BSKH->BKGTS", groups, k, preferred_element_type=jnp.float32) * head_dim**-0.5
    scores = jnp.where(visible(segments, causal)[:, None, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("BKGTS,BSKH->BTKGH", weights, v).reshape(q.shape)


_IMPLEMENTATIONS: dict[str, Callable[[Array, Array, Array, Array, bool], Array]] = {"auto": _xla, "xla": _xla}
