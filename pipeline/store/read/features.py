"""Sparse features of tokens, as the SAEs of `capture.encode` gave them.

Shapes: n tokens, k features of a token that are stored, F features of an SAE.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float32, Int64

from pipeline.store.format.layout import FEATURE_PARTS
from pipeline.store.read.frameworks import Framework, scattered, to_numpy


@dataclass(frozen=True)
class FeatureBatch:
    """What one SAE says of n tokens, in arrays of `framework`.

    index: int32 [n, k], the features that fire, by falling value; -1 where there are fewer. value: [n, k], their
    values; 0 where there is none. n_active: int32 [n], how many fire, also of those that are not stored. width: F.
    """

    index: Any
    value: Any
    n_active: Any
    width: int
    framework: Framework = Framework.numpy

    def dense(self) -> Any:
        """The values of all features, [n, F], in the dtype of `value`; 0 for those that are not stored."""
        return scattered(self.index, self.value, self.width, self.framework)

    def csr(self) -> tuple[Float32[np.ndarray, " nnz"], Int64[np.ndarray, " nnz"], Int64[np.ndarray, " n+1"]]:
        """data, indices and indptr of a sparse matrix [n, F] in the CSR format, in numpy. The indices of a token rise.

        `scipy.sparse.csr_matrix(features.csr(), shape=(n, features.width))` takes them.
        """
        index, value = to_numpy(self.index, self.framework), to_numpy(self.value, self.framework)
        order = np.argsort(index, axis=1)
        index, value = np.take_along_axis(index, order, axis=1), np.take_along_axis(value, order, axis=1)
        fires = index >= 0
        indptr = np.concatenate([[0], np.cumsum(fires.sum(axis=1))])
        return value[fires].astype(np.float32), index[fires].astype(np.int64), indptr


def array_name(features: str, part: str) -> str:
    """The name of the array that holds a part (`FEATURE_PARTS`) of an SAE's features."""
    return f"{features}.{part}"


def feature_batches(
    widths: Mapping[str, int], arrays: Mapping[str, Any], framework: Framework = Framework.numpy
) -> dict[str, FeatureBatch]:
    """By the SAE's name: the array that it encodes and, where several encode it, its own.

    widths: F, by what the names of an SAE's arrays begin with. arrays: their values of n tokens, by name.
    """
    return {
        name.removeprefix("features."): FeatureBatch(
            *(arrays[array_name(name, part)] for part in FEATURE_PARTS), width, framework
        )
        for name, width in widths.items()
    }
