"""What all implementations of attention compute, and its description."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32


class AttentionInputs(NamedTuple):
    """q and k are already rotated. Query heads n with the same n // (N / K) share a key-value head."""

    q: Float[Array, "B T N H"]
    k: Float[Array, "B T K H"]
    v: Float[Array, "B T K W"]
    segments: Int32[Array, "B T"]  # numbers a row's documents, or their chunks; 0: padding, which attends to itself
    sinks: Float[Array, " N"] | None = None  # per head, the unscaled score of a key whose value is 0


@dataclass(frozen=True)
class AttentionSpec:
    """How a layer's scores are computed and masked.

    Scores are multiplied by `scale`, then capped: softcap * tanh(scores / softcap), as in Gemma 2 (arXiv 2408.00118).
    `window`, for causal attention only, is the number of positions that a query attends to, including its own.
    Documents have no gaps within a row, so distances in the row are distances in the document. `chunk` is for decoding
    only: a query attends to the positions in its own chunk of as many.
    """

    causal: bool
    scale: float
    softcap: float | None = None
    window: int | None = None
    chunk: int | None = None

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


Attend = Callable[[AttentionInputs, AttentionSpec], Float[Array, "B T N W"]]
"""Softmax attention within each segment. Scores and softmax are float32. No output is NaN, also at padding."""
