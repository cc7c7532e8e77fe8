"""The entropy of attention, beside whichever implementation computes attention itself.

Letters: B rows, T query positions, S key positions, N heads, K key-value heads, G = N / K, H head dim.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pipeline.models.attention.spec import AttentionSpec

_BLOCK = 128  # queries at once: there are never [T, S] scores in memory


@jax.named_scope("attention_entropy")
def attention_entropy(
    q: Float[Array, "B T N H"], k: Float[Array, "B S K H"], segments: Int32[Array, "B T"], spec: AttentionSpec
) -> Float32[Array, "B T N"]:
    """In nats, of each query's attention to the keys of its segment that it sees."""
    num_rows, length, num_heads, head_dim = q.shape
    missing = -length % _BLOCK
    padded = jnp.pad(q, ((0, 0), (0, missing), (0, 0), (0, 0)))
    groups = padded.reshape(num_rows, -1, _BLOCK, k.shape[2], num_heads // k.shape[2], head_dim)
    blocks = (
        jnp.moveaxis(groups, 1, 0),
        jnp.moveaxis(jnp.pad(segments, ((0, 0), (0, missing))).reshape(num_rows, -1, _BLOCK), 1, 0),
        jnp.arange(length + missing).reshape(-1, _BLOCK),
    )

    def of_block(block: tuple[Array, Array, Array]) -> Float32[Array, "B K G block"]:
        queries, own_segments, order = block
        scores = jnp.einsum("BTKGH,BSKH->BKGTS", queries, k, preferred_element_type=jnp.float32) * spec.scale
        if spec.softcap is not None:
            scores = jnp.tanh(scores / spec.softcap) * spec.softcap
        visible = own_segments[:, :, None] == segments[:, None, :]
        distances = order[:, None] - jnp.arange(length)
        if spec.causal:
            visible &= distances >= 0
        if spec.window is not None:
            visible &= distances < spec.window
        scores = jnp.where(visible[:, None, None], scores, jnp.finfo(jnp.float32).min)
        shifted = scores - jnp.max(scores, axis=-1, keepdims=True)
        weights = jnp.exp(shifted)
        total = jnp.sum(weights, axis=-1)
        return jnp.log(total) - jnp.sum(weights * shifted, axis=-1) / total

    entropies = jax.lax.map(of_block, blocks)  # blocks first
    return jnp.einsum("bBKGT->BbTKG", entropies).reshape(num_rows, -1, num_heads)[:, :length]
