"""Batches as arrays of numpy, JAX or PyTorch. JAX and PyTorch are imported only where they are asked for.

Shapes: n tokens of a batch.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Any

import ml_dtypes  # noqa: F401  numpy then knows "bfloat16"
import numpy as np

_WITHOUT_BUFFER = ("bfloat16", "float8_e4m3fn", "float8_e5m2")  # numpy's buffers and DLPack have no name for these


class Framework(StrEnum):
    """The library whose arrays a reader yields."""

    numpy = "numpy"
    jax = "jax"
    torch = "torch"


def converter(framework: Framework) -> Callable[[np.ndarray], Any]:
    """The function that turns a numpy array into one of the framework. Raises ImportError where that is not installed.

    The array's memory is used as it is: always by torch, and by JAX on CPU, where no transfer is needed. JAX has no
    int64 unless `jax_enable_x64` is set; until then int64 arrays (document numbers) stay numpy's.
    """
    match framework:
        case Framework.numpy:
            return lambda array: array
        case Framework.torch:
            import torch

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
    """A framework's array in numpy; bfloat16 of torch becomes float32."""
    if framework is Framework.torch:
        return (array.float() if array.is_floating_point() else array).numpy(force=True)
    return np.asarray(array)


def scattered(index: Any, value: Any, width: int, framework: Framework) -> Any:
    """[n, width]: row i has value[i, j] at index[i, j], both [n, k], and 0 elsewhere. Index -1, of value 0, is nowhere.

    The arrays are the framework's; no row has an index twice.
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
