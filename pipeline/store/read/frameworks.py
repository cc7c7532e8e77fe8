"""Converts batches to arrays of numpy, JAX or PyTorch. JAX and PyTorch are imported only when needed.

Shapes: n tokens per batch, k stored features per token.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Any

import ml_dtypes  # noqa: F401  numpy then knows "bfloat16"
import numpy as np
from numpy.typing import DTypeLike

from pipeline.core.errors import ArgumentError
from pipeline.core.messages import shown

Dtype = DTypeLike | str
"""A dtype of numpy, torch or JAX, or its name; "stored": the store's; None: the store's, but float32 for numpy's arrays
of narrower floats, whose sums numpy computes as narrowly."""

STORED = "stored"
_NARROW = ("bfloat16", "float16", "float8_e4m3fn")
_FLOATS = (*_NARROW, "float32", "float64")
_WITHOUT_BUFFER = ("bfloat16", "float8_e4m3fn")  # not known to numpy's buffer protocol and DLPack


class Framework(StrEnum):
    """The library whose arrays a reader yields."""

    numpy = "numpy"
    jax = "jax"
    torch = "torch"


def parsed_framework(given: object) -> Framework:
    if not isinstance(given, str) or given not in list(Framework):
        raise ArgumentError(f"framework is {shown(given)}. Choose one of {', '.join(Framework)}.")
    return Framework(given)


def parsed_dtype(given: object) -> str | None:
    """The name of a `Dtype`. Raises ArgumentError unless it is a floating-point type that arrays may have."""
    if given is None or (isinstance(given, str) and given == STORED):
        return given
    if type(given).__module__ == "torch":
        name = str(given).removeprefix("torch.")
    else:
        try:
            name = np.dtype(given).name  # type: ignore[call-overload]
        except Exception:  # whatever numpy raises for an object that is no dtype
            name = ""
    if name not in _FLOATS:
        raise ArgumentError(f"dtype is {shown(given)}. Choose one of {', '.join(_FLOATS)}, or {STORED!r}.")
    return name


def cast(values: np.ndarray, dtype: str | None, framework: Framework = Framework.numpy) -> np.ndarray:
    """The values in a parsed `Dtype`. Integers stay as they are."""
    if dtype is None and framework is Framework.numpy and values.dtype.name in _NARROW:
        dtype = "float32"
    if dtype in (None, STORED) or values.dtype.name not in _FLOATS:
        return values
    return values.astype(dtype, copy=False)


def converter(framework: Framework, dtype: str | None = None, pin_memory: bool = False) -> Callable[[np.ndarray], Any]:
    """A function that converts a numpy array to an array of the framework, with `cast`. Raises ImportError if the
    framework is not installed, and ArgumentError for `pin_memory` without CUDA.

    torch shares the array's memory (with `pin_memory` it is copied to page-locked memory), and JAX on CPU does where it
    can. Without `jax_enable_x64` JAX has no int64, and int64 arrays (document numbers) stay numpy arrays.
    """
    match framework:
        case Framework.numpy:
            return lambda array: cast(array, dtype)
        case Framework.torch:
            import torch

            if pin_memory and not torch.cuda.is_available():
                raise ArgumentError("pin_memory=True needs a GPU with CUDA, but torch finds none. Remove it.")

            def to_torch(array: np.ndarray) -> torch.Tensor:
                array = cast(array, dtype, framework)
                has_buffer = array.dtype.name not in _WITHOUT_BUFFER
                tensor = torch.from_numpy(array if has_buffer else array.view(f"i{array.dtype.itemsize}"))
                tensor = tensor.pin_memory() if pin_memory else tensor
                return tensor if has_buffer else tensor.view(getattr(torch, array.dtype.name))

            return to_torch
        case Framework.jax:
            import jax

            def to_jax(array: np.ndarray) -> np.ndarray | jax.Array:
                array = cast(array, dtype, framework)
                if array.dtype == np.int64 and not jax.config.jax_enable_x64:
                    return array
                return jax.device_put(array)

            return to_jax


def to_numpy(array: Any, framework: Framework) -> np.ndarray:
    """Converts a framework's array to numpy. torch's floating-point types become float32."""
    if framework is Framework.torch:
        return (array.float() if array.is_floating_point() else array).numpy(force=True)
    return np.asarray(array)
