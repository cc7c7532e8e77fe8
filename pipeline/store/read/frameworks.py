"""Converts batches to arrays of numpy, JAX or PyTorch. JAX and PyTorch are imported only when needed.

Shapes: n tokens per batch, k stored features per token.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Any

import ml_dtypes  # noqa: F401  numpy then knows "bfloat16"
import numpy as np

_WITHOUT_BUFFER = ("bfloat16", "float8_e4m3fn", "float8_e5m2")  # not known to numpy's buffer protocol and DLPack


class Framework(StrEnum):
    """The library whose arrays a reader yields."""

    numpy = "numpy"
    jax = "jax"
    torch = "torch"


def converter(framework: Framework) -> Callable[[np.ndarray], Any]:
    """A function that converts a numpy array to an array of the framework. Raises ImportError if that is not installed.

    torch shares the array's memory, and JAX on CPU does where it can. Without `jax_enable_x64` JAX has no int64, and
    int64 arrays (document numbers) stay numpy arrays.
    """
    match framework:
        case Framework.numpy:
            return lambda array: array
        case Framework.torch:
            try:
                import torch
            except ModuleNotFoundError as error:
                raise ImportError(
                    'framework="torch" needs PyTorch, which is not installed. Install it (pip install torch), or use '
                    'framework="numpy".'
                ) from error

            def to_torch(array: np.ndarray) -> torch.Tensor:
                if array.dtype.name in _WITHOUT_BUFFER:
                    integers = array.view(f"i{array.dtype.itemsize}")
                    return torch.from_numpy(integers).view(getattr(torch, array.dtype.name))
                return torch.from_numpy(array)

            return to_torch
        case Framework.jax:
            import jax

            def to_jax(array: np.ndarray) -> np.ndarray | jax.Array:
                if array.dtype == np.int64 and not jax.config.jax_enable_x64:
                    return array
                return jax.device_put(array)

            return to_jax


def to_numpy(array: Any, framework: Framework) -> np.ndarray:
    """Converts a framework's array to numpy. torch's floating-point types become float32."""
    if framework is Framework.torch:
        return (array.float() if array.is_floating_point() else array).numpy(force=True)
    return np.asarray(array)


def scattered(index: Any, value: Any, width: int, framework: Framework) -> Any:
    """[n, width]: row i has value[i, j] at index[i, j], and 0 elsewhere.

    index, value: [n, k], arrays of the framework. An index of -1, whose value is 0, is ignored. The other indices of a
    row are distinct.
    """
    match framework:
        case Framework.numpy:
            out = np.zeros((len(index), width), value.dtype)
            rows, slots = np.nonzero(index >= 0)
            out[rows, index[rows, slots]] = value[rows, slots]
            return out
        case Framework.torch:
            return value.new_zeros((len(index), width)).scatter_add(1, index.clamp(min=0).long(), value)
        case Framework.jax:
            import jax.numpy as jnp

            rows = np.arange(len(index))[:, None]
            return jnp.zeros((len(index), width), value.dtype).at[rows, index.clip(0)].add(value)
