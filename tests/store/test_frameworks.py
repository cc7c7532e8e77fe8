import sys

import jax
import ml_dtypes
import numpy as np
import pytest

from pipeline.core.memory import aligned_empty
from pipeline.store.read.frameworks import Framework, converter

DTYPES = ["bfloat16", "float16", "float32", "int32", "int64"]


def example(dtype: str) -> np.ndarray:
    array = aligned_empty((50, 3), dtype)
    array[:] = np.arange(150).reshape(50, 3)
    return array


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_uses_the_memory_without_a_copy(dtype):
    torch = pytest.importorskip("torch")
    array = example(dtype)
    tensor = converter(Framework.torch)(array)
    assert tensor.dtype == getattr(torch, dtype)
    assert tensor.data_ptr() == array.ctypes.data
    np.testing.assert_array_equal(tensor.double().numpy(), array.astype(np.float64))


def test_without_torch_its_arrays_are_refused_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match="PyTorch, which is not installed.*pip install torch"):
        converter(Framework.torch)


@pytest.mark.parametrize("dtype", DTYPES)
def test_jax_uses_the_memory_without_a_copy(dtype):
    array = example(dtype)
    converted = converter(Framework.jax)(array)
    if dtype == "int64":  # disabled in JAX by default
        assert converted is array
        return
    assert isinstance(converted, jax.Array)
    assert converted.dtype == dtype
    assert converted.unsafe_buffer_pointer() == array.ctypes.data
    np.testing.assert_array_equal(converted, array)


def test_numpy_arrays_are_returned_unchanged():
    array = example("bfloat16")
    assert converter(Framework.numpy)(array) is array
    assert array.dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("shape", [(0,), (1,), (5, 7), (0, 3)])
def test_memory_is_aligned(shape):
    array = aligned_empty(shape, "int64")
    assert array.shape == shape
    assert array.ctypes.data % 64 == 0 or not array.size
