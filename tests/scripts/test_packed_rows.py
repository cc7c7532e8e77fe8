"""The share of attention that is computed, compared with a count over pairs of tokens."""

import numpy as np
import pytest

from scripts.bench.attention_blocks import computed_share, packed_segments

BLOCK = 4
ROWS = {
    "one document": [[1] * 16],
    "one for each block": [[1] * 4 + [2] * 4 + [3] * 4 + [4] * 4],
    "borders within blocks": [[1] * 3 + [2] * 7 + [3] * 6, [1] * 9 + [2] * 2 + [3] * 5],
    "padding at the end": [[1] * 6 + [2] * 3 + [0] * 7],
}


@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 2), (True, 5), (True, 6), (False, None)])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
def test_a_block_is_computed_if_the_mask_and_a_segment_reach_it(rows, causal: bool, window: int | None) -> None:
    segments = np.array(rows, np.int32)
    order = np.arange(segments.shape[1])
    distances = order[:, None] - order
    visible = (distances >= 0 if causal else True) & (distances < (window or np.inf))
    numbers = np.where(segments == 0, -1 - order, segments)  # a padding position attends to itself
    same = numbers[:, :, None] == numbers[:, None, :]

    def blocks(pairs: np.ndarray) -> np.ndarray:
        return pairs.reshape(*pairs.shape[:-2], 4, BLOCK, 4, BLOCK).any(axis=(-3, -1))

    expected = (blocks(visible) & blocks(same)).sum() / (len(rows) * blocks(visible).sum())
    assert computed_share(segments, BLOCK, causal, window) == pytest.approx(expected)


def test_documents_have_the_mean_length_and_long_ones_fill_rows() -> None:
    segments = packed_segments(100, 1024)
    assert (segments > 0).mean() > 0.95
    assert (segments > 0).sum() / segments.max(axis=1).sum() == pytest.approx(100, rel=0.05)
    assert (packed_segments(1e9, 256) == 1).all()
