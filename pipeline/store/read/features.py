"""Sparse features of tokens, computed by the SAEs of `capture.encode`.

Shapes: n tokens, k features stored per token, F features of an SAE.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float32, Int64

from pipeline.store.format.layout import FEATURE_PARTS
from pipeline.store.read.frameworks import Framework, converter, parsed_dtype, to_numpy


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
        index, value = to_numpy(self.index, self.framework), to_numpy(self.value, self.framework)
        out = np.zeros((len(index), self.width), value.dtype)
        rows, slots = np.nonzero(index >= 0)
        out[rows, index[rows, slots]] = value[rows, slots]
        return converter(self.framework, parsed_dtype(self.value.dtype))(out)

    def csr(self) -> tuple[Float32[np.ndarray, " nnz"], Int64[np.ndarray, " nnz"], Int64[np.ndarray, " n+1"]]:
        """data, indices and indptr of a sparse CSR matrix [n, F], as numpy arrays. Each token's indices are sorted.

        For example: `scipy.sparse.csr_matrix(features.csr(), shape=(n, features.width))`.
        """
        index, value = to_numpy(self.index, self.framework), to_numpy(self.value, self.framework)
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
