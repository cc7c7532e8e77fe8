"""Attention behind one function. Documents that share a row do not see each other.

Letters: B rows, T query positions, S key positions, N heads, K key-value heads, G = N / K, H head dim.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

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
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
) -> Float[Array, "B T N H"]:
    """Softmax attention within each segment; q and k already rotated.

    `segments` numbers the documents of a row from 1; 0 is padding, which sees only padding: no position is without
    keys, so none is NaN. Heads n of q with the same n // G share key-value head k. Scores and softmax are float32.
    `scale` multiplies the scores (None: 1 / sqrt(H)), then `softcap` bends them to softcap * tanh(scores / softcap), as
    Gemma 2 does (arXiv 2408.00118). `window`, of causal attention only, is how many positions back are seen, the own
    one included: documents lie in a row without gaps, so distances in the row are distances in the document.
    `impl` is `xla`, or `auto` for the fastest one of the platform. Raises ConfigError for another `impl`.
    """
    if impl not in _IMPLEMENTATIONS:
        raise ConfigError(f"model.attention is {impl!r}. Set it to one of {', '.join(_IMPLEMENTATIONS)}.")
    if window is not None and not causal:
        raise ValueError("a window of attention that is not causal")
    scores = _Scores(causal, q.shape[-1] ** -0.5 if scale is None else scale, softcap, window)
    return _IMPLEMENTATIONS[impl](q, k, v, segments, scores)


class _Scores(NamedTuple):
    """How queries and keys make scores, and which of them count."""

    causal: bool
    scale: float
    softcap: float | None
    window: int | None


def _xla(q: Array, k: Array, v: Array, segments: Array, rule: _Scores) -> Array:
    """Matrix products over blocks of queries, each with the keys that it can see: no [T, S] scores in memory.

    Measured against one block of all queries on two CPU cores, float32, 12 heads of 64 (4 key-value heads), per layer:
    8 rows of 256: 111 -> 35 ms; 4 rows of 1024: 906 -> 206 ms. Half of that is the order of axes: rows and heads
    first is what matrix products want.
    """
    num_rows, length, num_heads, head_dim = q.shape
    groups = q.reshape(num_rows, length, k.shape[2], num_heads // k.shape[2], head_dim)
    q, k, v = jnp.einsum("BTKGH->BKGTH", groups), jnp.einsum("BSKH->BKSH", k), jnp.einsum("BSKH->BKSH", v)
    order = jnp.arange(length)
    blocks = []
    for start, stop in _query_blocks(length):
        keys = slice(max(0, start + 1 - (rule.window or length)), stop if rule.causal else length)
        visible = segments[:, start:stop, None] == segments[:, None, keys]
        distances = order[start:stop, None] - order[keys]
        if rule.causal:
            visible &= distances >= 0
        if rule.window is not None:
            visible &= distances < rule.window
        blocks.append(_attend(q[:, :, :, start:stop], k[:, :, keys], v[:, :, keys], visible, rule))
    z = jnp.concatenate(blocks, axis=3)
    return jnp.einsum("BKGTH->BTKGH", z).reshape(num_rows, length, num_heads, head_dim)


def _query_blocks(length: int) -> list[tuple[int, int]]:
    """Multiples of 128 queries, at most 16 of them: the program's size does not grow with the length."""
    size = 128 * math.ceil(length / (128 * 16))
    return [(start, min(start + size, length)) for start in range(0, length, size)]


def _attend(
    q: Float[Array, "B K G T H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    visible: Bool[Array, "B T S"],
    rule: _Scores,
) -> Float[Array, "B K G T H"]:
    scores = jnp.einsum("BKGTH,BKSH->BKGTS", q, k, preferred_element_type=jnp.float32) * rule.scale
    if rule.softcap is not None:
        scores = jnp.tanh(scores / rule.softcap) * rule.softcap
    scores = jnp.where(visible[:, None, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("BKGTS,BKSH->BKGTH", weights, v)


_IMPLEMENTATIONS: dict[str, Callable[[Array, Array, Array, Array, _Scores], Array]] = {"auto": _xla, "xla": _xla}
