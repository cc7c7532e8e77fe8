"""What batches are made of: arrays of numpy, JAX or PyTorch, and sparse features in them. JAX and PyTorch are imported
only when needed.

Shapes: n tokens per batch, k features stored per token, F features of an SAE.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import ml_dtypes  # noqa: F401  numpy then knows "bfloat16"
import numpy as np
from jaxtyping import Float32, Int64
from numpy.typing import DTypeLike

from pipeline.core.errors import ArgumentError
from pipeline.core.messages import shown
from pipeline.store.format.layout import FEATURE_PARTS

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


def _to_numpy(array: Any, framework: Framework) -> np.ndarray:
    """Converts a framework's array to numpy. torch's floating-point types become float32."""
    if framework is Framework.torch:
        return (array.float() if array.is_floating_point() else array).numpy(force=True)
    return np.asarray(array)


@dataclass(frozen=True)
class FeatureBatch:
    """One SAE's features of n tokens, in arrays of `framework`.

    index: int32 [n, k], the features that fire, in descending order of their values; -1 if fewer than k fire.
    value: [n, k], their values; 0 where index is -1. n_active: int32 [n], how many features fire, including those that
    are not stored. width: F.
    """

    index: Any
    value: Any
    n_active: Any
    width: int
    framework: Framework = Framework.numpy

    def dense(self) -> Any:
        """The values of all features, [n, F], in the dtype of `value`; features that are not stored are 0."""
        index, value = _to_numpy(self.index, self.framework), _to_numpy(self.value, self.framework)
        out = np.zeros((len(index), self.width), value.dtype)
        rows, slots = np.nonzero(index >= 0)
        out[rows, index[rows, slots]] = value[rows, slots]
        return converter(self.framework, parsed_dtype(self.value.dtype))(out)

    def csr(self) -> tuple[Float32[np.ndarray, " nnz"], Int64[np.ndarray, " nnz"], Int64[np.ndarray, " n+1"]]:
        """data, indices and indptr of a sparse CSR matrix [n, F], as numpy arrays. Each token's indices are sorted.

        For example: `scipy.sparse.csr_matrix(features.csr(), shape=(n, features.width))`.
        """
        index, value = _to_numpy(self.index, self.framework), _to_numpy(self.value, self.framework)
        order = np.argsort(index, axis=1)
        index, value = np.take_along_axis(index, order, axis=1), np.take_along_axis(value, order, axis=1)
        fires = index >= 0
        indptr = np.concatenate([[0], np.cumsum(fires.sum(axis=1))])
        return value[fires].astype(np.float32), index[fires].astype(np.int64), indptr


def feature_batches(
    widths: Mapping[str, int], arrays: Mapping[str, Any], framework: Framework = Framework.numpy
) -> dict[str, FeatureBatch]:
    """The features of n tokens by SAE: the name of the array it encodes, with its own name if several encode that.

    widths: F by the prefix of an SAE's arrays' names. arrays: the arrays' values for n tokens, by name.
    """
    return {
        name.removeprefix("features."): FeatureBatch(
            *(arrays[f"{name}.{part}"] for part in FEATURE_PARTS), width, framework
        )
        for name, width in widths.items()
    }
