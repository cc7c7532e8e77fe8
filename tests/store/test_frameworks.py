import jax
import ml_dtypes
import numpy as np
import pytest

from pipeline.core.errors import ArgumentError
from pipeline.core.host import aligned_empty
from pipeline.store.read.frameworks import Framework, converter, parsed_dtype

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


@pytest.mark.parametrize("dtype", [*DTYPES, "float8_e4m3fn", "float64"])
def test_numpys_narrow_floats_become_float32_unless_the_stored_dtype_is_asked_for(dtype):
    array = example(dtype)
    converted = converter(Framework.numpy)(array)
    assert converted.dtype == ("float32" if dtype in ("bfloat16", "float16", "float8_e4m3fn") else dtype)
    np.testing.assert_array_equal(converted, array.astype(converted.dtype))
    assert converter(Framework.numpy, "stored")(array) is array
    assert converter(Framework.numpy, "float16")(array).dtype == (dtype if "int" in dtype else "float16")


def test_dtypes_of_all_libraries_are_accepted():
    torch = pytest.importorskip("torch")
    for bfloat16 in ("bfloat16", ml_dtypes.bfloat16, jax.numpy.bfloat16, torch.bfloat16):
        assert parsed_dtype(bfloat16) == "bfloat16"
    for given, name in ((np.dtype("float16"), "float16"), ("f4", "float32"), (float, "float64"), ("stored", "stored")):
        assert parsed_dtype(given) == name
    with pytest.raises(ArgumentError, match=r"dtype is torch.int8. Choose one of bfloat16, "):
        parsed_dtype(torch.int8)
