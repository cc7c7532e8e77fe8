"""Rows as a job packs them, for hypothesis."""

import numpy as np
from hypothesis import strategies as st

from pipeline.data.packing import fill, pack


@st.composite
def packings(draw: st.DrawFn, length: int, short: int) -> np.ndarray:
    """Segments [2, length] of documents, about half of which have at most `short` tokens. A row may be only padding."""
    sizes = draw(st.lists(st.integers(1, length) | st.integers(1, short), max_size=12))
    placement = pack(np.array(sizes, np.int64), 2, length)
    tokens = [np.ones(size, np.int32) for size in sizes[: placement.num_pieces]]
    rows = fill(placement, tokens, np.arange(placement.num_pieces), length)["segments"]
    return np.pad(rows, ((0, 2 - len(rows)), (0, 0)))
