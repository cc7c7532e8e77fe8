"""What all implementations of attention compute, and its description."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from pipeline.models.attention.latent import Latent


class AttentionInputs(NamedTuple):
    """q and k are already rotated. Query heads n with the same n // (N / K) share a key-value head.

    The queries are at consecutive positions of the row, and so are the keys. Without `key_segments`, these are the same
    positions.
    """

    q: Float[Array, "B T N H"]
    k: Float[Array, "B S K H"]
    v: Float[Array, "B S K W"]
    segments: Int32[Array, "B T"]  # numbers a row's documents, or their chunks; 0: padding, which attends to itself
    sinks: Float[Array, " N"] | None = None  # per head, the unscaled score of a key whose value is 0
    key_segments: Int32[Array, "B S"] | None = None
    offset: int | Int32[Array, ""] | None = None  # the position of the first query, minus that of the first key
    latent: Latent | None = None  # what k and v are computed from; for caches

    @property
    def segments_of_keys(self) -> Int32[Array, "B S"]:
        return self.segments if self.key_segments is None else self.key_segments

    @property
    def start(self) -> int | Int32[Array, ""]:
        return 0 if self.offset is None else self.offset

    def part(self, queries: slice) -> "AttentionInputs":
        """Some of the queries, with all keys."""
        offset, keys = self.start + queries.start, self.segments_of_keys
        parts = {"q": self.q[:, queries], "segments": self.segments[:, queries]}
        return self._replace(**parts, key_segments=keys, offset=offset)


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

    def masked(self, visible: Bool[Array, "*S"] | bool, distances: Int32[Array, "..."]) -> Bool[Array, "*S"]:
        """The `visible` keys that the causal mask and the window allow. `distances` are how many positions before its
        query each key is."""
        if self.causal:
            visible &= distances >= 0
        if self.window is not None:
            visible &= distances < self.window
        return visible


Attend = Callable[[AttentionInputs, AttentionSpec], Float[Array, "B T N W"]]
"""Softmax attention within each segment. Scores and softmax are float32. No output is NaN, also at padding."""
