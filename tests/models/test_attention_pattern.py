"""Attention patterns and their entropy in rows of several blocks. tests/models/test_parity.py tests short rows."""

import numpy as np
import pytest

from pipeline.models.attention import pattern
from pipeline.models.attention.spec import AttentionSpec

SEGMENTS = np.array([[1] * 5 + [2] * 8, [1] * 11 + [0] * 2], np.int32)
SPECS = {
    "causal": AttentionSpec(causal=True, scale=0.35),
    "window": AttentionSpec(causal=True, scale=0.35, window=3),
    "bidirectional, capped": AttentionSpec(causal=False, scale=0.35, softcap=2.0),
}


@pytest.mark.parametrize("sinks", [None, np.array([1.0, 0.0, -1.0, 3.0])], ids=["", "sinks"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_long_rows_are_computed_in_blocks_of_queries(
    spec: AttentionSpec, sinks: np.ndarray | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    q, k = (rng.normal(size=(2, 13, heads, 8)).astype(np.float32) for heads in (4, 2))
    whole = np.asarray(pattern.attention_entropy(q, k, SEGMENTS, spec, sinks))
    assert whole.shape == (2, 13, 4)
    assert whole[:, 1:5].min() > 0
    first_of_segments = whole[[0, 0, 1], [0, 5, 0]]
    assert (np.abs(first_of_segments).max() < 1e-6) == (spec.causal and sinks is None)  # they attend to one key
    monkeypatch.setattr(pattern, "_BLOCK", 4)
    np.testing.assert_allclose(pattern.attention_entropy(q, k, SEGMENTS, spec, sinks), whole, atol=1e-6)


@pytest.mark.parametrize("sinks", [None, np.array([1.0, 0.0, -1.0, 3.0])], ids=["", "sinks"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_the_pattern_of_selected_queries_begins_with_their_segment(
    spec: AttentionSpec, sinks: np.ndarray | None
) -> None:
    rng = np.random.default_rng(0)
    q, k = (rng.normal(size=(2, 13, heads, 8)).astype(np.float32) for heads in (4, 2))
    selected = np.array([[12, 5, 2], [10, 0, -1]], np.int32)
    of_row = np.asarray(pattern.attention_pattern(q, k, SEGMENTS, selected, spec, sinks))
    assert of_row.shape == (2, 3, 4, 13)
    for row, begin, end, queries in ((0, 0, 5, [2]), (0, 5, 13, [0, 1]), (1, 0, 11, [0, 1])):
        part, one = slice(begin, end), np.ones((1, end - begin), np.int32)
        at = selected[row, queries] - begin
        alone = pattern.attention_pattern(q[row, None, part], k[row, None, part], one, at[None], spec, sinks)[0]
        np.testing.assert_allclose(of_row[row, queries, :, : end - begin], alone, atol=1e-6)
        assert not of_row[row, queries, :, end - begin :].any()
        entropy = np.asarray(pattern.attention_entropy(q, k, SEGMENTS, spec, sinks))[row, selected[row, queries]]
        rest = 1 - of_row[row, queries].sum(axis=-1)
        assert (np.abs(rest).max() < 1e-6) == (sinks is None)
        own = np.concatenate([of_row[row, queries], rest[..., None].clip(min=0)], axis=-1)
        np.testing.assert_allclose(-(own * np.log(np.maximum(own, 1e-30))).sum(axis=-1), entropy, atol=1e-5)
