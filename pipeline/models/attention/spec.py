"""What a model asks of attention, whichever implementation computes it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionSpec:
    """How a layer's scores are computed and which of them are masked.

    The scores are multiplied by `scale`, then capped: softcap * tanh(scores / softcap), as in Gemma 2 (arXiv
    2408.00118). `window`, of causal attention only, is how many positions a query sees, its own included. Documents lie
    in a row without gaps, so distances in the row are distances in the document.
    """

    causal: bool
    scale: float
    softcap: float | None = None
    window: int | None = None
