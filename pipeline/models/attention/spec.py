"""The description of a layer's attention, independent of the implementation."""

from dataclasses import dataclass


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
