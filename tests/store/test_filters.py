import ml_dtypes
import numpy as np
import pytest

from pipeline.store.format.normalisation import l2_norms
from pipeline.store.read.filters import TokenFilter

SIDE_ARRAYS = {
    "segments": np.array([[1, 1, 1, 2, 2, 0]]),
    "tokens": np.array([[7, 8, 9, 7, 8, 0]]),
    "positions": np.array([[0, 1, 2, 0, 1, 0]]),
}


@pytest.mark.parametrize(
    ("token_filter", "kept"),
    [
        (TokenFilter(), [0, 1, 2, 3, 4]),
        (TokenFilter(drop_tokens=(7,)), [1, 2, 4]),
        (TokenFilter(drop_tokens=(0, 8, 9)), [0, 3]),
        (TokenFilter(skip_first=1), [1, 2, 4]),
        (TokenFilter(skip_first=2, drop_tokens=(9,)), []),
    ],
)
def test_filters_drop_tokens_and_first_positions(token_filter, kept):
    side_arrays = {name: SIDE_ARRAYS[name] for name in ("segments", *token_filter.side_arrays)}
    assert np.flatnonzero(token_filter.keeps(side_arrays)).tolist() == kept


def test_tokens_must_be_within_the_norms_of_every_named_activation():
    a = np.arange(10_000, dtype=np.float32)[:, None] * [[3, 4]]
    slots = np.arange(0, 10_000, 2)
    limits = TokenFilter(norms={"a": (50, 40_000)})
    assert limits.within_norms(slots, {"a": a}).tolist() == list(range(10, 8001, 2))
    both = TokenFilter(norms={"a": (50, 40_000), "b": (0, 500)})
    assert both.within_norms(slots, {"a": a, "b": a}).tolist() == list(range(10, 101, 2))
    assert TokenFilter().within_norms(slots, {}) is slots


def test_norms_are_computed_in_float32():
    values = np.random.default_rng(0).standard_normal((50, 300)).astype(ml_dtypes.bfloat16)
    expected = np.linalg.norm(values.astype(np.float64), axis=1)
    np.testing.assert_allclose(l2_norms(values), expected, rtol=1e-6)
    assert l2_norms(values).dtype == np.float32


def test_numpy_numbers_make_the_same_filter():
    numpys = TokenFilter(drop_tokens=np.array([3, 4]), norms={"a": np.quantile([1.0, 2.0], [0, 1])})
    assert repr(numpys) == repr(TokenFilter(drop_tokens=(3, 4), norms={"a": (1, 2)}))


def test_the_order_of_norms_does_not_matter():
    limits = {"a": (1, 2), "b": (3, 4)}
    one, other = TokenFilter(norms=limits), TokenFilter(norms=dict(reversed(limits.items())))
    assert one == other
    assert repr(one) == repr(other)
