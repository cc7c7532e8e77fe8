"""Attention behind one function. Documents that share a row do not see each other.

Letters: B rows, T query positions, S key positions, N heads, K key-value heads, G = N / K, H head dim.
"""

import math
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


def _xla(q: Array, k: Array, v: Array, segments: Array, causal: bool) -> Array:
    """Matrix products over blocks of queries, each with the keys up to its end: no [T, S] scores in memory.

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
        num_keys = stop if causal else length
        visible = segments[:, start:stop, None] == segments[:, None, :num_keys]
        if causal:
            visible &= order[start:stop, None] >= order[:num_keys]
        blocks.append(_attend(q[:, :, :, start:stop], k[:, :, :num_keys], v[:, :, :num_keys], visible))
    z = jnp.concatenate(blocks, axis=3)
    return jnp.einsum("BKGTH->BTKGH", z).reshape(num_rows, length, num_heads, head_dim)


def _query_blocks(length: int) -> list[tuple[int, int]]:
    """Multiples of 128 queries, at most 16 of them: the program's size does not grow with the length."""
    size = 128 * math.ceil(length / (128 * 16))
    return [(start, min(start + size, length)) for start in range(0, length, size)]


def _attend(
    q: Float[Array, "B K G T H"], k: Float[Array, "B K S H"], v: Float[Array, "B K S H"], visible: Bool[Array, "B T S"]
) -> Float[Array, "B K G T H"]:
    scores = jnp.einsum("BKGTH,BKSH->BKGTS", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    scores = jnp.where(visible[:, None, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("BKGTS,BKSH->BKGTH", weights, v)


_IMPLEMENTATIONS: dict[str, Callable[[Array, Array, Array, Array, bool], Array]] = {"auto": _xla, "xla": _xla}
