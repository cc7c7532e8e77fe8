"""Statistics of the stored activations: per row on the devices, per stream in `_statistics/`, per store in `_summary/`.

Groups with known counts are merged (Chan, Golub & LeVeque, 1979) in float64: first the blocks of each stream in order,
then the streams in order. So the result does not depend on which runs wrote the blocks. A block's file has the
statistics of its stream's blocks up to and including it, so that completing a store reads only one file per stream.
Samples of a store are merged in the same way.
"""

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Float, Float32, Float64, Int64
from numpy.typing import DTypeLike

from pipeline.core.errors import StoreInvalid
from pipeline.store.format.commits import CommitRecord
from pipeline.store.format.keys import block_key
from pipeline.store.io.failures import DAMAGE_REMEDY
from pipeline.store.io.parquet import decode_table_of, encode_table, require_schema
from pipeline.store.io.storage import Storage, map_ahead

BINS_PER_OCTAVE = 32
_MIN_EXPONENT, _MAX_EXPONENT = -14, 26  # norms beyond 2 to these powers are counted in the first or the last bin
NUM_BINS = (_MAX_EXPONENT - _MIN_EXPONENT) * BINS_PER_OCTAVE

STATISTICS_PREFIX = "_statistics/"
_STREAMS_AT_ONCE = 16  # twice as many may be in memory
_MAX_ROWS = 1 << 16  # of a file: one per array
_SCHEMA = pa.schema(
    [
        ("array", pa.string()),
        ("count", pa.int64()),
        ("not_finite", pa.int64()),
        ("mean", pa.list_(pa.float64())),
        ("m2", pa.list_(pa.float64())),
        ("norm_sum", pa.float64()),
        ("norm_histogram", pa.list_(pa.int64())),
        ("squared_error", pa.float64()),  # null if it is not measured
        ("fired", pa.list_(pa.int64())),  # the following: null for arrays that are not an SAE's features
        ("maximum", pa.list_(pa.float32())),
        ("num_active", pa.int64()),
        ("cosine_sum", pa.float64()),
    ]
)
_OPTIONAL = ("squared_error", "fired", "maximum", "num_active", "cosine_sum")


@dataclass(frozen=True)
class Normalisation:
    """activation -> (activation - mean) * scale, in float32. mean, scale: [D] or scalars."""

    mean: Float32[np.ndarray, "*D"]
    scale: Float32[np.ndarray, "*D"]

    def apply(self, activations: np.ndarray, dtype: DTypeLike = None) -> np.ndarray:
        """Normalised activations [n, D], in float32 unless `dtype` is given."""
        values = activations.astype(np.float32)
        values -= self.mean
        values *= self.scale
        return values if dtype is None else values.astype(dtype, copy=False)


def l2_norms(activations: np.ndarray) -> Float32[np.ndarray, " n"]:
    """The L2 norm of each row of [n, D], in float32."""
    values = activations.astype(np.float32)
    return np.sqrt(np.einsum("nd,nd->n", values, values))


@dataclass(frozen=True)
class Statistics:
    """Statistics of the stored values of one activation array, or of an SAE's features, over the valid tokens.

    count: the number of tokens without a non-finite value. All other fields cover only these tokens.
    not_finite: the number of tokens with a non-finite value.
    mean: each feature's mean.
    m2: each feature's sum of squared deviations from its mean.
    norm_sum: the sum of the tokens' L2 norms.
    norm_histogram: the number of norms in each of NUM_BINS bins, BINS_PER_OCTAVE per factor of two.
    squared_error: the sum of squared differences between computed and stored values; None if it is not measured.

    Only for an SAE's features (else None). A feature that does not fire for a token counts as 0.
    fired: the number of tokens for which each feature is stored.
    maximum: each feature's largest value, or 0.
    num_active: the number of features that fired, summed over tokens, including those that were not stored.
    squared_error, cosine_sum: of the reconstructed activations, if they are measured.
    """

    count: int
    not_finite: int
    mean: Float64[np.ndarray, " d"]
    m2: Float64[np.ndarray, " d"]
    norm_sum: float
    norm_histogram: Int64[np.ndarray, " bins"]
    squared_error: float | None = None
    fired: Int64[np.ndarray, " d"] | None = None
    maximum: Float32[np.ndarray, " d"] | None = None
    num_active: int | None = None
    cosine_sum: float | None = None

    @property
    def relative_error(self) -> float | None:
        """||computed - stored|| / ||stored|| over all tokens; None if it is not measured or all values are 0."""
        squares = float(self.m2.sum() + self.count * np.square(self.mean).sum())
        return None if self.squared_error is None or not squares else math.sqrt(self.squared_error / squares)

    @property
    def variance(self) -> Float64[np.ndarray, " d"]:
        """The population variance of each feature."""
        return self.m2 / max(self.count, 1)

    @property
    def mean_norm(self) -> float:
        return self.norm_sum / max(self.count, 1)

    def norm_quantile(self, q: float) -> float:
        """The `q` quantile of the norms, with the precision of a bin (2 %); 0 without tokens."""
        if self.count == 0:
            return 0.0
        bin_of_quantile = int(np.searchsorted(np.cumsum(self.norm_histogram), q * self.count))
        return float(2 ** (_MIN_EXPONENT + (min(bin_of_quantile, NUM_BINS - 1) + 0.5) / BINS_PER_OCTAVE))

    def normalisation(self, per_feature: bool = False) -> Normalisation:
        """The normalisation to zero mean and unit variance.

        The variance is 1 for each feature if `per_feature`, else on average over the features, which preserves
        directions and makes the mean squared norm d. A feature with zero variance keeps its scale.
        """
        variance = self.variance if per_feature else self.variance.mean()
        scale = 1 / np.sqrt(np.where(variance > 0, variance, 1))
        return Normalisation(self.mean.astype(np.float32), scale.astype(np.float32))


_SUMS = (  # the fields of Statistics that are sums over tokens
    *("count", "not_finite", "norm_sum", "norm_histogram"),
    *("squared_error", "fired", "num_active", "cosine_sum"),
)
BlockStatistics = Mapping[str, Statistics]  # by array name


def block_statistics(
    valid: Bool[np.ndarray, "rows T"],
    mean: Float32[np.ndarray, "rows d"],
    m2: Float32[np.ndarray, "rows d"],
    norms: Float32[np.ndarray, "rows T"],
    squared_error: float | None = None,
) -> Statistics:
    """A block's statistics, from those of its rows. The norm of a token with a non-finite value is NaN."""
    finite = valid & ~np.isnan(norms)
    merged = _merge_groups(finite.sum(axis=1), mean.astype(np.float64), m2.astype(np.float64))
    statistics = with_norms(norms[finite], int((valid & ~finite).sum()), *merged)
    return replace(statistics, squared_error=squared_error)


def token_statistics(activations: np.ndarray) -> Statistics:
    """The statistics of n tokens' activations [n, d], computed in float64."""
    finite = np.isfinite(activations).all(axis=1)
    values = activations[finite].astype(np.float64)
    mean = values.sum(axis=0) / max(len(values), 1)
    m2 = np.square(values - mean).sum(axis=0)
    return with_norms(l2_norms(activations[finite]), int((~finite).sum()), mean, m2)


def with_norms(
    norms: Float32[np.ndarray, " n"], not_finite: int, mean: Float64[np.ndarray, " d"], m2: Float64[np.ndarray, " d"]
) -> Statistics:
    """The statistics of n finite tokens with the given L2 norms, means and m2."""
    norms = norms.astype(np.float64)
    with np.errstate(divide="ignore"):
        octaves = np.log2(norms) - _MIN_EXPONENT
    bins = np.clip(octaves * BINS_PER_OCTAVE, 0, NUM_BINS - 1).astype(np.int64)
    histogram = np.bincount(bins, minlength=NUM_BINS)
    return Statistics(len(norms), not_finite, mean, m2, float(norms.sum()), histogram)


def merge(parts: Iterable[Statistics]) -> Statistics:
    """The statistics of all tokens of one or more parts, which are consumed one by one."""
    parts = iter(parts)
    total = next(parts)
    for part in parts:
        counts = np.array([total.count, part.count])
        mean, m2 = _merge_groups(counts, np.stack([total.mean, part.mean]), np.stack([total.m2, part.m2]))
        sums = {name: _combine_optional(operator.add, getattr(total, name), getattr(part, name)) for name in _SUMS}
        total = Statistics(**sums, mean=mean, m2=m2, maximum=_combine_optional(np.maximum, total.maximum, part.maximum))
    return total


def _combine_optional(combine: Callable[[Any, Any], Any], first: Any, second: Any) -> Any:
    return None if first is None or second is None else combine(first, second)


def _merge_groups(
    counts: Int64[np.ndarray, " groups"], means: Float[np.ndarray, "groups d"], m2s: Float[np.ndarray, "groups d"]
) -> tuple[Float64[np.ndarray, " d"], Float64[np.ndarray, " d"]]:
    weights = counts / max(1, counts.sum())
    mean = weights @ means
    return mean, m2s.sum(axis=0) + counts @ np.square(means - mean)


def statistics_key(stream: int, block: int) -> str:
    """The key of the statistics of a stream up to and including a block, relative to the store."""
    return block_key(STATISTICS_PREFIX, stream, block, ".parquet")


def encode_statistics(statistics: Mapping[str, Statistics]) -> bytes:
    """Statistics as parquet: a row per array."""
    rows = [{"array": name} | vars(of_array) for name, of_array in statistics.items()]
    return encode_table(pa.Table.from_pylist(rows, schema=_SCHEMA))


def decode_statistics(
    content: bytes | None, subject: str, sha256: str, place: str = "the root"
) -> dict[str, Statistics]:
    """The inverse of `encode_statistics`. Raises StoreInvalid if the file is missing (`content` is None) or damaged.
    place: where the sha256 is from."""
    table = decode_table_of(content, subject, sha256, place, _MAX_ROWS)
    require_schema(table, _SCHEMA, subject, _OPTIONAL)
    columns = {
        name: [None if v.values is None else v.values.to_numpy(zero_copy_only=False) for v in table[name]]
        if pa.types.is_list(table.schema.field(name).type)
        else table[name].to_pylist()
        for name in _SCHEMA.names
    }
    names = columns.pop("array")
    rows = zip(*columns.values(), strict=True)
    statistics = {name: Statistics(*row) for name, row in zip(names, rows, strict=True)}
    for part in statistics.values():
        sizes = {len(values) for values in (part.mean, part.m2, part.fired, part.maximum) if values is not None}
        if len(sizes) != 1 or len(part.norm_histogram) != NUM_BINS:
            raise StoreInvalid(f"{subject} has columns of different lengths. {DAMAGE_REMEDY}")
    return statistics


def read_stream_statistics(storage: Storage, record: CommitRecord) -> dict[str, Statistics]:
    """The statistics of a stream up to and including the record's block. Raises StoreError."""

    def check(key: str, content: bytes | None) -> dict[str, Statistics]:
        return decode_statistics(content, f"{storage.path}/{key}", record.statistics_sha256, record.key)

    return next(storage.read_checked([statistics_key(record.stream, record.block)], check))


def merge_arrays(first: Mapping[str, Statistics], second: Mapping[str, Statistics]) -> dict[str, Statistics]:
    """Merges the statistics of two sets of tokens, for the arrays in both."""
    return {name: merge([statistics, second[name]]) for name, statistics in first.items() if name in second}


def merge_streams(storage: Storage, last: Sequence[CommitRecord]) -> dict[str, Statistics]:
    """The statistics of all tokens of a store, by array; {} if it has none. Raises StoreError.

    last: the record of each stream's last block, in stream order, without streams that have no block.
    """
    if not all(record.statistics_sha256 for record in last):
        return {}
    total: dict[str, Statistics] = {}
    for stream in map_ahead(partial(read_stream_statistics, storage), last, _STREAMS_AT_ONCE):
        total = merge_arrays(total, stream) if total else stream
    return total
