"""Casting activations to their stored dtype, compared with numpy and ml_dtypes."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pipeline.step.stored_values import is_finite, numbers, to_stored
from pipeline.store.format.layout import dequantised

pytestmark = pytest.mark.heavy
B, S, D = 2, 5, 24


def stored(x, dtype, group=None):
    """Casts `x` as the compiled step does, and returns numpy arrays: values, scales, error, finite, numbers."""

    @jax.jit
    def step(x):
        found = to_stored(x, dtype, group, with_error=True)
        return (*found, is_finite(found), numbers(found))

    return [None if each is None else np.asarray(each) for each in step(jnp.asarray(x))]


def activations(dtype="float32") -> np.ndarray:
    """Tokens of very different sizes, one of them all zeros."""
    x = np.random.default_rng(0).normal(size=(B, S, D)) * np.logspace(-6, 2, S)[:, None]
    x[1, 2] = 0
    return x.astype(dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_statistics_are_of_the_values_of_a_cast(dtype):
    """float16 is subnormal below 6e-5, where attention to most tokens of a long window is."""
    x = activations()
    values, *_, held = stored(x, dtype)
    np.testing.assert_array_equal(values, x.astype(dtype))
    np.testing.assert_array_equal(held, values.astype(np.float32))


@pytest.mark.parametrize("group", [None, 8])
@pytest.mark.parametrize("computed", ["float32", "bfloat16"])
def test_float8_values_equal_those_of_ml_dtypes(group, computed):
    x = activations(computed)
    values, scales, error, finite, held = stored(x, "float8_e4m3fn", group)
    grouped = x.astype(np.float32).reshape(B, S, -1, group or D)
    np.testing.assert_allclose(scales, np.abs(grouped).max(axis=-1) / 448, rtol=1e-6)
    divided = (grouped / np.where(scales > 0, scales, 1)[..., None]).reshape(x.shape)
    assert values.dtype == ml_dtypes.float8_e4m3fn
    np.testing.assert_array_equal(values.view(np.uint8), divided.astype(values.dtype).view(np.uint8))
    back = dequantised(values, scales)
    np.testing.assert_array_equal(back, held)
    assert finite.all()
    difference = np.square(back.astype(np.float64) - x.astype(np.float64))
    np.testing.assert_allclose(error, difference.sum(axis=(1, 2)), rtol=1e-4)


@pytest.mark.parametrize("group", [None, 8, 1])
@pytest.mark.parametrize("computed", ["float32", "bfloat16"])
def test_int8_values_are_within_half_a_step(group, computed):
    x = activations(computed)
    values, scales, error, finite, held = stored(x, "int8", group)
    assert (values.dtype, scales.dtype) == (np.int8, np.float32)
    assert scales.shape == (B, S, D // (group or D))
    grouped = x.astype(np.float32).reshape(B, S, -1, group or D)
    np.testing.assert_allclose(scales, np.abs(grouped).max(axis=-1) / 127, rtol=1e-6)
    back = dequantised(values, scales)
    np.testing.assert_array_equal(back, held)
    steps = np.repeat(scales, group or D, axis=-1)
    difference = np.abs(back - x.astype(np.float32))
    assert (difference <= steps * 0.5001).all()
    assert values.min() >= -127
    assert finite.all()
    np.testing.assert_allclose(error, np.square(difference, dtype=np.float64).sum(axis=(1, 2)), rtol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "value", "is_held"),
    [
        ("int8", 1e30, True),
        ("int8", np.inf, False),
        ("int8", np.nan, False),
        ("float8_e4m3fn", 23_581, True),
        ("float8_e4m3fn", -np.inf, False),
        ("float16", 65504, True),
        ("float16", 65536, False),
    ],
)
def test_a_token_out_of_range_is_not_finite_and_adds_no_error(dtype, value, is_held):
    x = np.ones((1, 2, D), np.float32)
    x[0, 1, 3] = value
    _, _, error, finite, held = stored(x, dtype)
    assert finite.tolist() == [[True, is_held]]
    assert np.isfinite(held[0, 1]).all() == is_held
    if not is_held:
        assert error < 1e-9
        np.testing.assert_array_equal(held[0, 0], np.ones(D))
