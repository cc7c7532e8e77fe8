"""Statistics of the stored activations: per row on the devices, per block in `_stats/`, per store in `stats/`.

Groups with known counts are merged (Chan, Golub & LeVeque, 1979) in float64: first the blocks of each stream in order,
then the streams in order. So the result does not depend on which runs wrote the blocks. A block's file also has running
statistics, of the stream's blocks up to and including it, so that completing a store reads only one file per stream.
Samples of a store are merged in the same way.
"""

import json
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Float, Float32, Float64, Int64

from pipeline.core.errors import StoreInvalid
from pipeline.store.format.commits import CommitRecord
from pipeline.store.format.keys import block_key
from pipeline.store.format.normalisation import Normalisation
from pipeline.store.format.norms import l2_norms
from pipeline.store.format.tables import decode_committed, encode_table
from pipeline.store.io.digests import objects_digest
from pipeline.store.io.failures import DAMAGE_REMEDY
from pipeline.store.io.parsing import parse_store_json
from pipeline.store.io.storage import Storage

BINS_PER_OCTAVE = 32
_MIN_EXPONENT, _MAX_EXPONENT = -14, 26  # norms beyond 2 to these powers are counted in the first or the last bin
NUM_BINS = (_MAX_EXPONENT - _MIN_EXPONENT) * BINS_PER_OCTAVE
QUANTILES = (0.001, 0.01, 0.1, 0.5, 0.9, 0.99, 0.999)

STATISTICS_PREFIX = "_stats/"  # of blocks
MERGED_PREFIX = "stats/"  # of the store
MERGED_GROUP_KEY = f"{MERGED_PREFIX}zarr.json"
MERGED_GROUP = (json.dumps({"zarr_format": 3, "node_type": "group", "attributes": {}}, indent=1) + "\n").encode()
_STREAMS_AT_ONCE = 32
_SCHEMA = pa.schema(
    [
        ("array", pa.string()),
        ("count", pa.int64()),
        ("not_finite", pa.int64()),
        ("mean", pa.list_(pa.float64())),
        ("m2", pa.list_(pa.float64())),
        ("norm_sum", pa.float64()),
        ("norm_histogram", pa.list_(pa.int64())),
    ]
)
_SQUARED_ERROR = pa.field("squared_error", pa.float64())  # only if it is measured
_FEATURE_FIELDS = (  # only with SAEs
    pa.field("fired", pa.list_(pa.int64())),
    pa.field("maximum", pa.list_(pa.float32())),
    pa.field("num_active", pa.int64()),
    pa.field("cosine_sum", pa.float64()),
)
_FIRST_BLOCK = pa.field("first_block", pa.int64())  # only with running statistics, which start at block 0


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
    """The key of a block's statistics, relative to the store."""
    return block_key(STATISTICS_PREFIX, stream, block, ".parquet")


def encode_statistics(statistics: BlockStatistics, block: int = 0, running: BlockStatistics | None = None) -> bytes:
    """A block's statistics as parquet: one row per array, and a second row per array for the `running` statistics."""
    parts = {block: statistics} if running is None else {block: statistics, 0: running}
    schema = _SCHEMA
    if any(part.squared_error is not None for part in statistics.values()):
        schema = schema.append(_SQUARED_ERROR)
    if any(part.fired is not None for part in statistics.values()):
        schema = pa.schema([*schema, *_FEATURE_FIELDS])
    if running is not None:
        schema = schema.append(_FIRST_BLOCK)
    rows = [
        {"array": name, "first_block": first_block} | vars(array_statistics)
        for first_block, part in parts.items()
        for name, array_statistics in part.items()
    ]
    return encode_table(pa.Table.from_pylist(rows, schema=schema))


def decode_statistics(content: bytes | None, record: CommitRecord) -> tuple[BlockStatistics, BlockStatistics]:
    """A block's statistics, and the running statistics up to and including it.

    Raises StoreInvalid if the file is missing (`content` is None) or damaged.
    """
    subject = statistics_key(record.stream, record.block)
    table = decode_committed(content, subject, record.statistics_sha256)
    columns = {
        name: table[name].to_pylist()
        if not pa.types.is_list(table[name].type)
        else [None if v.values is None else v.values.to_numpy() for v in table[name]]
        for name in table.column_names
    }
    first_blocks = columns.pop(_FIRST_BLOCK.name, [record.block] * table.num_rows)
    parts: dict[int, BlockStatistics] = {}
    for first_block, *values in zip(first_blocks, *columns.values(), strict=True):
        row = dict(zip(columns, values, strict=True))
        name = row.pop("array")
        parts.setdefault(first_block, {})[name] = Statistics(**row)
    if not {record.block, 0} <= parts.keys():
        raise StoreInvalid(f"{subject} lacks statistics of the block, or of the stream up to it. {DAMAGE_REMEDY}")
    return parts[record.block], parts[0]


def read_running(storage: Storage, last: CommitRecord) -> BlockStatistics:
    """The statistics of a stream's blocks up to and including `last`, by array. Raises StoreError."""
    key = statistics_key(last.stream, last.block)
    [(_, running)] = storage.read_checked([key], lambda _, content: decode_statistics(content, last))
    return running


def merge_arrays(first: BlockStatistics, second: BlockStatistics) -> dict[str, Statistics]:
    """Merges the statistics of two sets of tokens, for the arrays in both."""
    return {name: merge([statistics, second[name]]) for name, statistics in first.items() if name in second}


def merge_streams(storage: Storage, last: Sequence[CommitRecord]) -> dict[str, Statistics]:
    """The statistics of all tokens of a store, by array; {} if it has none. Raises StoreError.

    last: the record of each stream's last block, in stream order, without streams that have no block.
    """
    if not all(record.statistics_sha256 for record in last):
        return {}
    total: dict[str, Statistics] = {}
    with ThreadPoolExecutor(_STREAMS_AT_ONCE, "statistics") as pool:
        for start in range(0, len(last), _STREAMS_AT_ONCE):
            for stream in pool.map(partial(read_running, storage), last[start : start + _STREAMS_AT_ONCE]):
                total = merge_arrays(total, stream) if total else dict(stream)
    return total


def merged_keys(name: str) -> tuple[str, str]:
    """The keys, relative to the store, of an array's merged statistics: the zarr.json and the values."""
    return f"{MERGED_PREFIX}{name}/zarr.json", f"{MERGED_PREFIX}{name}/c/0/0"


def merged_digest(objects: Mapping[str, bytes | None], name: str) -> str | None:
    """The digest of an array's merged statistics, given `objects` by key; None if one of them is missing."""
    wanted = {key: objects.get(key) for key in merged_keys(name)}
    return None if None in wanted.values() else objects_digest(wanted)


def encode_merged(statistics: Mapping[str, Statistics]) -> dict[str, bytes]:
    """The objects of `stats/`, by key.

    Each array's statistics are a float64 Zarr array [2, feature] of means and variances, or [4, feature] for an SAE's
    features, with `fired` and `maximum` too. Scalars and the histogram are in its attributes.
    """
    objects = {MERGED_GROUP_KEY: MERGED_GROUP} if statistics else {}
    for name, merged in statistics.items():
        by_feature = {"mean": merged.mean, "variance": merged.variance}
        if merged.fired is not None:
            by_feature |= {"fired": merged.fired, "maximum": merged.maximum}
        values = np.stack(list(by_feature.values()))
        quantiles = {str(q): merged.norm_quantile(q) for q in QUANTILES}
        used = np.flatnonzero(merged.norm_histogram)
        first, last = (int(used[0]), int(used[-1])) if len(used) else (0, 0)
        attributes = {
            "count": merged.count,
            "not_finite": merged.not_finite,
            "norm_sum": merged.norm_sum,
            "mean_norm": merged.mean_norm,
            "norm_quantiles": quantiles,
            "norm_histogram": {  # bin i begins at 2 ** (min_exponent + i / bins_per_octave)
                "min_exponent": _MIN_EXPONENT,
                "bins_per_octave": BINS_PER_OCTAVE,
                "first_bin": first,
                "counts": merged.norm_histogram[first : last + 1].tolist(),
            },
        }
        if merged.fired is not None:
            optional = {name: getattr(merged, name) for name in ("num_active", "squared_error", "cosine_sum")}
            attributes |= {name: value for name, value in optional.items() if value is not None}
        elif merged.squared_error is not None:
            attributes |= {"squared_error": merged.squared_error, "relative_error": merged.relative_error}
        metadata = {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(values.shape),
            "data_type": "float64",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(values.shape)}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": 0.0,
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
            "dimension_names": ["_".join(by_feature), "feature"],
            "attributes": attributes,
        }
        objects |= zip(merged_keys(name), (_json(metadata), values.astype("<f8").tobytes()), strict=True)
    return objects


def read_merged(storage: Storage, name: str, digest: str) -> Statistics:
    """The merged statistics of an array, which have this digest in the root.

    Raises StoreInvalid if they are missing or damaged, and StoreError.
    """
    keys = merged_keys(name)

    def read() -> Statistics:
        objects = dict(zip(keys, storage.read_many(list(keys)), strict=True))
        if merged_digest(objects, name) != digest:
            raise StoreInvalid(f"{keys[0]} and {keys[1]} do not match the digest in the root. {DAMAGE_REMEDY}")
        return decode_merged(objects, name)

    return storage.retry_read(read)


def decode_merged(objects: Mapping[str, bytes], name: str) -> Statistics:
    """The inverse of `encode_merged`. Raises StoreInvalid."""
    zarr_json_key, values_key = merged_keys(name)
    zarr_json = parse_store_json(objects[zarr_json_key], zarr_json_key)
    try:
        attributes = zarr_json["attributes"]
        values = np.frombuffer(objects[values_key], "<f8").reshape(zarr_json["shape"][0], -1)
        mean, variance, *feature_values = values
        fired, maximum = feature_values or (None, None)
        histogram = np.zeros(NUM_BINS, np.int64)
        counts, first = attributes["norm_histogram"]["counts"], attributes["norm_histogram"]["first_bin"]
        histogram[first : first + len(counts)] = counts
        return Statistics(
            attributes["count"],
            attributes["not_finite"],
            mean,
            variance * attributes["count"],
            attributes["norm_sum"],
            histogram,
            attributes.get("squared_error"),
            None if fired is None else fired.astype(np.int64),
            None if maximum is None else maximum.astype(np.float32),
            attributes.get("num_active"),
            attributes.get("cosine_sum"),
        )
    except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
        raise StoreInvalid(f"{zarr_json_key} does not hold merged statistics: {error!r}. {DAMAGE_REMEDY}") from error


def _json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=1) + "\n").encode()
