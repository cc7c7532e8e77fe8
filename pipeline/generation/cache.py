"""Keys and values of earlier positions, kept on the devices; and attention to them.

A row's position p is in slot p, whatever the other rows are: its activations, and so its tokens, do not depend on them.
Slots after a row's position are masked, so attention never sees padding or an earlier completion.

Letters: B rows, T = 1 position, S slots, N heads, K key-value heads, G = N / K, H head dim, W head dim of
values.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pipeline.models.attention.spec import AttentionSpec
from pipeline.models.attention.xla import attend_visible


class CachedLayer:
    """One layer's keys and values during one step. As the layer's `Attend`, it adds the step's keys and values at each
    row's position, to `keys` and `values` too, and attends to all up to there."""

    def __init__(
        self, keys: Float[Array, "B K S H"], values: Float[Array, "B K S W"], positions: Int32[Array, " B"]
    ) -> None:
        self.keys, self.values, self._positions = keys, values, positions

    @jax.named_scope("cached")
    def __call__(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K W"],
        segments: Int32[Array, "B T"],
        spec: AttentionSpec,
        sinks: Float[Array, " N"] | None = None,
    ) -> Float[Array, "B T N W"]:
        """`Attend` with the cache's keys before the row's only position."""
        self.keys, self.values = (
            put_at(cache, jnp.einsum("BTKH->BKTH", new), self._positions, axis=1)
            for cache, new in ((self.keys, k), (self.values, v))
        )
        distances = self._positions[:, None] - jnp.arange(self.keys.shape[2])
        visible = distances >= 0
        if spec.window is not None:
            visible &= distances < spec.window
        rows, _, num_heads, head_dim = q.shape
        groups = q.reshape(rows, k.shape[2], num_heads // k.shape[2], 1, head_dim)
        z = attend_visible(groups, self.keys, self.values, visible[:, None], spec, sinks)
        return z.reshape(rows, 1, num_heads, -1)


def put_at(slots: Array, new: Array, positions: Int32[Array, " B"], axis: int) -> Array:
    """`slots` [B, ..., S, ...] with each row of `new` [B, ..., 1, ...] at its position along S, a row's axis `axis`."""
    outer = slots.shape[: axis + 1]
    place = (*jnp.indices(outer, sparse=True), positions.reshape(-1, *[1] * axis))
    options = {"unique_indices": True, "indices_are_sorted": True, "mode": "promise_in_bounds"}
    return slots.at[place].set(jnp.squeeze(new, axis + 1), **options)
