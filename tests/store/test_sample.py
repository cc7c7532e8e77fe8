import ml_dtypes
import numpy as np
import pytest

from pipeline.store.sample import ActivationSample


@pytest.fixture(scope="module")
def values() -> np.ndarray:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((1000, 8)) * np.arange(8) + 100
    return values.astype(ml_dtypes.bfloat16)


def test_it_equals_numpy_however_it_is_cut(values):
    exact = values.astype(np.float64)
    for cuts in ([], [1], [300, 301, 999]):
        sample = ActivationSample.of(np.split(values, cuts))
        np.testing.assert_allclose(sample.mean, exact.mean(axis=0), rtol=1e-12)
        np.testing.assert_allclose(sample.variance, exact.var(axis=0), rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(sample.norms, np.sort(np.linalg.norm(exact, axis=1)), rtol=1e-6)
        assert sample.num_tokens == 1000


def test_quantiles_of_norms(values):
    sample = ActivationSample.of([values])
    assert (sample.norms <= sample.norm_quantile(0.9)).sum() == 900


def test_normalisation_gives_zero_mean_and_unit_variance(values):
    sample = ActivationSample.of([values])
    together = sample.normalisation().apply(values)
    assert together.dtype == np.float32
    np.testing.assert_allclose(together.mean(axis=0), 0, atol=1e-5)
    assert np.square(together).sum(axis=1).mean() == pytest.approx(8, rel=1e-5)
    each = sample.normalisation(per_feature=True).apply(values)
    np.testing.assert_allclose(each[:, 1:].var(axis=0), 1, rtol=1e-5)
    assert (each[:, 0] == 0).all()  # the feature never varies


def test_normalised_values_in_another_dtype(values):
    normalisation = ActivationSample.of([values]).normalisation()
    half = normalisation.apply(values, "bfloat16")
    np.testing.assert_array_equal(half, normalisation.apply(values).astype(ml_dtypes.bfloat16))


def test_a_sample_needs_a_token():
    with pytest.raises(ValueError, match="at least one token"):
        ActivationSample.of([])
