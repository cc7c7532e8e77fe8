"""The statistics of a block's features, from its arrays.

Shapes: R rows of a block, S slots of a row, k features of a token that are stored, F features of the SAE.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from jaxtyping import Bool, Shaped
from scipy.sparse import csc_matrix

from pipeline.store.features.index_file import by_feature, largest
from pipeline.store.format.layout import ERROR_PARTS
from pipeline.store.format.norms import norms_of
from pipeline.store.format.statistics import Statistics, with_norms


def feature_statistics(
    parts: Mapping[str, Shaped[np.ndarray, "R S *k"]], valid: Bool[np.ndarray, "R S"], matrix: csc_matrix
) -> Statistics:
    """Of the valid tokens' stored features. `parts`: the block's arrays, by the last part of their names; `matrix`:
    `by_feature` of them. A token with a value that is not finite is left out."""
    index, value = parts["index"], parts["value"]
    finite = valid & np.isfinite(value).all(axis=2)
    if "squared_error" in parts:
        finite &= np.isfinite(parts["squared_error"])
    not_finite = int((valid & ~finite).sum())
    if not_finite:
        matrix = by_feature(np.where(finite[..., None], index, -1), value, matrix.shape[1])
    count, fired = int(finite.sum()), np.diff(matrix.indptr).astype(np.int64)
    values = matrix.data.view(value.dtype).astype(np.float64)
    mean = _sums(values, matrix) / max(count, 1)
    m2 = np.maximum(_sums(np.square(values), matrix) - count * np.square(mean), 0)
    squared_error, cosine_sum = (
        float(parts[name][finite].sum(dtype=np.float64)) if name in parts else None for name in ERROR_PARTS
    )
    return replace(
        with_norms(norms_of(value[finite]), not_finite, mean, m2),
        squared_error=squared_error,
        fired=fired,
        maximum=largest(matrix, value.dtype),
        num_active=int(parts["n_active"][finite].sum(dtype=np.int64)),
        cosine_sum=cosine_sum,
    )


def _sums(values: Shaped[np.ndarray, " n"], matrix: csc_matrix) -> Shaped[np.ndarray, " F"]:
    """Of each feature's values."""
    sums, fires = np.zeros(matrix.shape[1]), np.diff(matrix.indptr) > 0
    if fires.any():
        sums[fires] = np.add.reduceat(values, matrix.indptr[:-1][fires])
    return sums
