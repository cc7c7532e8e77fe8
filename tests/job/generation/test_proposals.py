"""Proposed tokens compared with a search of each row, one place after the other."""

import jax
import numpy as np
import pytest

from pipeline.job.generation.next_tokens import propose

SLOTS = 24


def searched(text: list[int], num: int) -> list[int]:
    """The continuation of the last of the longest matches."""
    lengths = {
        end: next((size for size in (3, 2, 1) if size <= end and text[:end][-size:] == text[-size:]), 0)
        for end in range(1, len(text))
    }
    start = max(lengths, key=lambda end: (lengths[end], end))
    for _ in range(num):
        text = [*text, text[start]]
        start += 1
    return text[-num:]


@pytest.mark.parametrize("num", [1, 4])
def test_proposals_follow_the_latest_of_the_longest_matches(num: int) -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, SLOTS + 1, 300)
    text = rng.integers(0, rng.integers(1, 9, 300)[:, None], (300, SLOTS), dtype=np.int32)
    found = jax.jit(propose, static_argnums=2)(text, lengths.astype(np.int32) - 1, num)
    expected = [searched(row[:length].tolist(), num) for row, length in zip(text, lengths, strict=True)]
    np.testing.assert_array_equal(found, expected)
