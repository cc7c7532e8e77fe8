"""The description of a layer's attention, independent of the implementation."""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32


@dataclass(frozen=True)
class AttentionSpec:
    """How a layer's scores are computed and masked.

    Scores are multiplied by `scale`, then capped: softcap * tanh(scores / softcap), as in Gemma 2 (arXiv 2408.00118).
    `window`, for causal attention only, is the number of positions that a query attends to, including its own.
    Documents have no gaps within a row, so distances in the row are distances in the document.
    """

    causal: bool
    scale: float
    softcap: float | None = None
    window: int | None = None

    def capped(self, scores: Float32[Array, "*S"]) -> Float32[Array, "*S"]:
        """The scaled scores after the softcap, if there is one."""
        return scores if self.softcap is None else jnp.tanh(scores / self.softcap) * self.softcap

    def masked(self, visible: Bool[Array, "*S"], distances: Int32[Array, "..."]) -> Bool[Array, "*S"]:
        """The `visible` keys that the causal mask and the window allow. `distances` are how many positions before its
        query each key is."""
        if self.causal:
            visible &= distances >= 0
        if self.window is not None:
            visible &= distances < self.window
        return visible
