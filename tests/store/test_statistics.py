"""Merged statistics compared with numpy over all tokens."""

import ml_dtypes
import numpy as np
import pytest

from pipeline.store.format.statistics import Statistics, block_statistics, merge, token_statistics

ROWS, T, D = 6, 20, 5


def example(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Values [rows, T, D] far from zero with an outlier, and the mask of valid tokens."""
    rng = np.random.default_rng(seed)
    values = rng.normal(300, 1, (ROWS, T, D)).astype(np.float32)
    values[2, 3, 1] = 1e5
    valid = np.arange(T) < rng.integers(0, T + 1, (ROWS, 1))
    valid[2, 3] = True
    valid[4] = False
    return values, valid


def statistics(values: np.ndarray, valid: np.ndarray) -> Statistics:
    """A block's statistics from row statistics, which the device computes."""
    used = valid[:, :, None]
    count = np.maximum(valid.sum(axis=1), 1)[:, None]
    mean = np.where(used, values, 0).sum(axis=1) / count
    m2 = np.where(used, np.square(values - mean[:, None]), 0).sum(axis=1)
    norms = np.where(valid, np.linalg.norm(values, axis=-1), 0)
    return block_statistics(valid, *(part.astype(np.float32) for part in (mean, m2, norms)))


def test_merged_statistics_equal_numpys_in_any_order():
    examples = [example(seed) for seed in range(4)]
    tokens = np.concatenate([values[valid] for values, valid in examples]).astype(np.float64)
    parts = [statistics(*each) for each in examples]
    for order in (parts, parts[::-1], [merge(parts[:2]), merge(parts[2:])]):
        total = merge(order)
        assert total.count == len(tokens)
        np.testing.assert_allclose(total.mean, tokens.mean(axis=0), rtol=1e-6)
        np.testing.assert_allclose(total.variance, tokens.var(axis=0), rtol=1e-5)
        assert np.array_equal(total.norm_histogram, sum(part.norm_histogram for part in parts))
        assert total.mean_norm == pytest.approx(np.linalg.norm(tokens, axis=-1).mean(), rel=1e-6)


def test_statistics_of_tokens_merge_to_those_of_blocks():
    examples = [example(seed) for seed in range(3)]
    of_blocks = merge(statistics(*each) for each in examples)
    for batch in (7, 1000):
        tokens = np.concatenate([values[valid] for values, valid in examples])
        found = merge(token_statistics(tokens[i : i + batch]) for i in range(0, len(tokens), batch))
        assert (found.count, found.not_finite) == (of_blocks.count, 0)
        np.testing.assert_allclose(found.mean, of_blocks.mean, rtol=1e-6)
        np.testing.assert_allclose(found.variance, tokens.astype(np.float64).var(axis=0), rtol=1e-9)
        assert np.array_equal(found.norm_histogram, of_blocks.norm_histogram)
    assert token_statistics(np.array([[1, 2], [np.inf, 0], [np.nan, 1]], np.float32)).not_finite == 2


def test_quantiles_are_right_within_a_bin():
    norms = np.random.default_rng(1).lognormal(2, 1.5, (1, 5000)).astype(np.float32)
    found = block_statistics(
        np.ones_like(norms, bool), np.zeros((1, 1), np.float32), np.zeros((1, 1), np.float32), norms
    )
    for q in (0.01, 0.5, 0.99):
        assert found.norm_quantile(q) == pytest.approx(np.quantile(norms, q), rel=0.025)


def test_statistics_handle_no_tokens_and_extreme_norms():
    nothing = block_statistics(np.zeros((0, T), bool), *(np.zeros((0, n), np.float32) for n in (D, D, T)))
    assert (nothing.count, nothing.mean_norm, nothing.norm_quantile(0.5)) == (0, 0, 0)
    norms = np.array([[0, 1e-30, 1e30, np.inf, np.nan]], np.float32)
    found = block_statistics(
        np.ones_like(norms, bool), np.zeros((1, 1), np.float32), np.zeros((1, 1), np.float32), norms
    )
    assert (found.count, found.not_finite) == (4, 1)
    assert (found.norm_histogram[0], found.norm_histogram[-1]) == (2, 2)
    some = statistics(*example(0))
    np.testing.assert_array_equal(merge([nothing, some]).mean, some.mean)


def test_normalisation_gives_zero_mean_and_unit_variance_before_a_cast():
    values = np.random.default_rng(0).standard_normal((1000, 8)) * np.arange(8) + 100
    values = values.astype(ml_dtypes.bfloat16)
    statistics = token_statistics(values)
    normalisation = statistics.normalisation()
    together = normalisation.apply(values)
    assert together.dtype == np.float32
    np.testing.assert_allclose(together.mean(axis=0), 0, atol=1e-5)
    assert np.square(together).sum(axis=1).mean() == pytest.approx(8, rel=1e-5)
    np.testing.assert_array_equal(normalisation.apply(values, "bfloat16"), together.astype(ml_dtypes.bfloat16))
    each = statistics.normalisation(per_feature=True).apply(values)
    np.testing.assert_allclose(each[:, 1:].var(axis=0), 1, rtol=1e-5)
    assert (each[:, 0] == 0).all()  # the feature never varies
