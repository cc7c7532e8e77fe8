"""The entropy of attention: parity in short rows is tests/models/test_parity.py's."""

import numpy as np
import pytest

from pipeline.models.attention import entropy
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
    whole = np.asarray(entropy.attention_entropy(q, k, SEGMENTS, spec, sinks))
    assert whole.shape == (2, 13, 4)
    assert whole[:, 1:5].min() > 0
    first_of_segments = whole[[0, 0, 1], [0, 5, 0]]
    assert (np.abs(first_of_segments).max() < 1e-6) == (spec.causal and sinks is None)  # they see one key
    monkeypatch.setattr(entropy, "_BLOCK", 4)
    np.testing.assert_allclose(entropy.attention_entropy(q, k, SEGMENTS, spec, sinks), whole, atol=1e-6)
