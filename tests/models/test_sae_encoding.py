"""Features compared with the definition in numpy, for every activation function, in tiles of tokens and features."""

import numpy as np
import pytest

from pipeline.models.sae import encoding
from pipeline.models.sae.encoding import encode
from pipeline.models.sae.spec import ARRAYS, FeatureActivation, InputScaling, SAESpec
from tests.models.sae_files import decoded_values, dense_values

pytestmark = pytest.mark.heavy
D = 12
ROWS = (2, 5)  # of tokens


def sae_arrays(sae: SAESpec, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Random arrays with which about a tenth of the features fire."""
    names = {"w_enc", "b_enc", "w_dec", "b_out"}
    names |= {FeatureActivation.jumprelu: {"threshold"}, FeatureActivation.gated: {"gate_scale", "gate_bias"}}.get(
        sae.activation, set()
    )
    names |= {"feature_scale"} if sae.activation is FeatureActivation.topk else {"b_in"}
    sizes = {"D": sae.d_in, "F": sae.width, "O": sae.d_out}
    arrays = {name: rng.normal(size=[sizes[axis] for axis in ARRAYS[name]]).astype(np.float32) for name in names}
    arrays["b_enc"] -= 3
    for name in arrays.keys() & {"threshold", "gate_scale", "feature_scale"}:
        arrays[name] = np.abs(arrays[name]) + 0.1
    return arrays


def assert_features(features: encoding.Features, expected: np.ndarray, slots: int, threshold: float) -> None:
    expected = np.where(expected > threshold, expected, 0)
    index, value, n_active = map(np.asarray, features[:3])
    np.testing.assert_array_equal(n_active, (expected > 0).sum(axis=-1))
    order = np.argsort(-expected, axis=-1, kind="stable")[..., :slots]
    largest = np.take_along_axis(expected, order, axis=-1)
    missing = [(0, 0)] * (largest.ndim - 1) + [(0, slots - largest.shape[-1])]
    largest = np.pad(largest, missing)
    np.testing.assert_array_equal(index, np.where(largest > 0, np.pad(order, missing), -1))
    np.testing.assert_allclose(value, largest, atol=1e-5, rtol=1e-5)
    assert (n_active > slots).any() or slots >= 16


CASES = {
    "relu": SAESpec(D, 50, D, FeatureActivation.relu),
    "jumprelu": SAESpec(
        D, 50, D, FeatureActivation.jumprelu, input_scaling=InputScaling.constant_norm, undo_scaling=True
    ),
    "gated": SAESpec(D, 50, D, FeatureActivation.gated),
    "topk": SAESpec(D, 50, D, FeatureActivation.topk, k=6),
    "layer_norm": SAESpec(D, 50, D, FeatureActivation.relu, input_scaling=InputScaling.layer_norm, undo_scaling=True),
    "centred": SAESpec(D, 50, D, FeatureActivation.relu, input_scaling=InputScaling.centred, undo_scaling=True),
}


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "TILE_VALUES", 200)
    monkeypatch.setattr(encoding, "GROUP", 5)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(("slots", "threshold"), [(3, 0.0), (3, 1.5), (64, 0.0)])
@pytest.mark.parametrize("name", CASES)
def test_features_equal_the_definition(name: str, slots: int, threshold: float) -> None:
    sae, rng = CASES[name], np.random.default_rng(0)
    arrays, x = sae_arrays(sae, rng), 3 * rng.normal(size=(*ROWS, D)).astype(np.float32)
    features = encode(sae, arrays, x, slots, threshold)
    assert_features(features, dense_values(sae, arrays, x), slots, threshold)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("name", CASES)
def test_errors_of_reconstruction_equal_the_definition(name: str) -> None:
    sae, rng = CASES[name], np.random.default_rng(1)
    arrays, x = sae_arrays(sae, rng), 3 * rng.normal(size=(*ROWS, D)).astype(np.float32)
    features = encode(sae, arrays, x, 3, decodes=True)  # the error covers all firing features, not only three
    assert_features(features, dense_values(sae, arrays, x), 3, 0)
    out = decoded_values(sae, arrays, dense_values(sae, arrays, x), x)
    squared_error, cosine = map(np.asarray, features.reconstruction)
    np.testing.assert_allclose(squared_error, np.square(x - out).sum(axis=-1), rtol=1e-4)
    lengths = np.linalg.norm(x, axis=-1) * np.linalg.norm(out, axis=-1)
    np.testing.assert_allclose(cosine, (x * out).sum(axis=-1) / lengths, atol=1e-5)


def test_features_with_a_zero_decoder_norm_keep_the_error_finite() -> None:
    sae, rng = CASES["topk"], np.random.default_rng(2)
    arrays = sae_arrays(sae, rng)
    arrays["feature_scale"][:20] = 0  # norms of its decoder's rows
    features = encode(sae, arrays, 3 * rng.normal(size=(*ROWS, D)).astype(np.float32), 3, decodes=True)
    assert np.isfinite(features.reconstruction.squared_error).all()


def test_among_equal_values_the_lower_index_comes_first() -> None:
    sae = SAESpec(1, 40, 1, FeatureActivation.relu)
    arrays = {"w_enc": np.ones((1, 40), np.float32), "b_enc": np.zeros(40, np.float32)}
    index, value, n_active, _ = encode(sae, arrays, np.array([[[2.0], [-1.0], [0.0]]], np.float32), 5)
    assert np.asarray(index).tolist() == [[[0, 1, 2, 3, 4], [-1] * 5, [-1] * 5]]
    assert np.asarray(value).tolist() == [[[2.0] * 5, [0.0] * 5, [0.0] * 5]]
    assert np.asarray(n_active).tolist() == [[40, 0, 0]]
