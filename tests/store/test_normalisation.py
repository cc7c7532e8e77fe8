import ml_dtypes
import numpy as np
import pytest

from pipeline.store.format.statistics import token_statistics


@pytest.fixture(scope="module")
def values() -> np.ndarray:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((1000, 8)) * np.arange(8) + 100
    return values.astype(ml_dtypes.bfloat16)


def test_normalisation_gives_zero_mean_and_unit_variance(values):
    statistics = token_statistics(values)
    together = statistics.normalisation().apply(values)
    assert together.dtype == np.float32
    np.testing.assert_allclose(together.mean(axis=0), 0, atol=1e-5)
    assert np.square(together).sum(axis=1).mean() == pytest.approx(8, rel=1e-5)
    each = statistics.normalisation(per_feature=True).apply(values)
    np.testing.assert_allclose(each[:, 1:].var(axis=0), 1, rtol=1e-5)
    assert (each[:, 0] == 0).all()  # the feature never varies


def test_values_are_normalised_before_they_are_cast(values):
    normalisation = token_statistics(values).normalisation()
    half = normalisation.apply(values, "bfloat16")
    np.testing.assert_array_equal(half, normalisation.apply(values).astype(ml_dtypes.bfloat16))
