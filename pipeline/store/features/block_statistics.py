"""The statistics of a block's features, computed from its arrays.

Shapes: R rows per block, S slots per row, k features stored per token, F features of the SAE.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from jaxtyping import Bool, Shaped

from pipeline.store.features.index_file import ByFeature, by_feature
from pipeline.store.format.layout import ERROR_PARTS
from pipeline.store.format.statistics import Statistics, l2_norms, with_norms


def feature_statistics(
    parts: Mapping[str, Shaped[np.ndarray, "R S *k"]], valid: Bool[np.ndarray, "R S"], matrix: ByFeature
) -> Statistics:
    """Statistics over the valid tokens' stored features, without tokens that have a non-finite value.

    parts: the block's arrays, by the last part of their names. matrix: `by_feature` of these.
    """
    index, value = parts["index"], parts["value"]
    finite = valid & np.isfinite(value).all(axis=2)
    if "squared_error" in parts:
        finite &= np.isfinite(parts["squared_error"])
    not_finite = int((valid & ~finite).sum())
    if not_finite:
        matrix = by_feature(np.where(finite[..., None], index, -1), value, len(matrix.firsts) - 1)
    count, fired = int(finite.sum()), np.diff(matrix.firsts)
    values = matrix.values.astype(np.float64)
    mean = matrix.reduce(np.add, values) / max(count, 1)
    m2 = np.maximum(matrix.reduce(np.add, np.square(values)) - count * np.square(mean), 0)
    squared_error, cosine_sum = (
        float(parts[name][finite].sum(dtype=np.float64)) if name in parts else None for name in ERROR_PARTS
    )
    return replace(
        with_norms(l2_norms(value[finite]), not_finite, mean, m2),
        squared_error=squared_error,
        fired=fired,
        maximum=matrix.maxima,
        num_active=int(parts["n_active"][finite].sum(dtype=np.int64)),
        cosine_sum=cosine_sum,
    )
