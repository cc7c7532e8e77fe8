"""The index by feature of a block: a copy of its features as a sparse CSC matrix, for reading single features, and the
statistics that are computed from this matrix.

An index file has an ENTRY for each of the F features, followed by the firings, sorted by feature and token. It only
repeats what the arrays contain.

Shapes: R rows per block, S slots per row, k features stored per token, F features of the SAE.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from crc32c import crc32c
from jaxtyping import Bool, Float32, Int32, Int64, Shaped, UInt32

from pipeline.core.errors import StoreInvalid
from pipeline.store.format.keys import block_key, index_prefix
from pipeline.store.format.layout import ERROR_PARTS
from pipeline.store.format.statistics import Statistics, l2_norms, with_norms
from pipeline.store.io.failures import DAMAGE_REMEDY

ENTRY = np.dtype(
    [
        ("first", "<u8"),  # the number of firings of all previous features
        ("count", "<u4"),  # the number of this feature's firings
        ("maximum", "<f4"),  # their largest value, or 0
        ("firings_crc32c", "<u4"),
        ("entry_crc32c", "<u4"),  # of the object's key, the feature's number, and the fields above
    ]
)
_CHECKED = ENTRY.itemsize - 4  # bytes


@dataclass(frozen=True)
class ByFeature:
    """The n stored features of a block's tokens as a sparse matrix [R * S, F] in the CSC format."""

    firsts: Int64[np.ndarray, " F+1"]  # the index of each feature's first firing
    slots: UInt32[np.ndarray, " n"]  # row * S + slot, ascending for each feature
    values: Shaped[np.ndarray, " n"]

    @cached_property
    def maxima(self) -> Float32[np.ndarray, " F"]:
        """Each feature's largest value; 0 if it does not fire."""
        return self.reduce(np.maximum, self.values.astype(np.float32))

    def reduce(self, reduction: np.ufunc, values: Shaped[np.ndarray, " n"]) -> Shaped[np.ndarray, " F"]:
        """The reduction of each feature's values; 0 if it does not fire."""
        reduced, fires = np.zeros(len(self.firsts) - 1, values.dtype), np.diff(self.firsts) > 0
        if fires.any():
            reduced[fires] = reduction.reduceat(values, self.firsts[:-1][fires])
        return reduced


def index_key(features: str, stream: int, block: int) -> str:
    """The key of a block's index, relative to the store. `features`: the prefix of the names of the SAE's arrays."""
    return block_key(index_prefix(features), stream, block, ".csc")


def firing_type(value_type: np.dtype) -> np.dtype:
    """The dtype of a stored firing: its slot, and the bits of its value."""
    return np.dtype([("slot", "<u4"), ("value", f"<u{value_type.itemsize}")])


def by_feature(index: Int32[np.ndarray, "R S k"], value: Shaped[np.ndarray, "R S k"], width: int) -> ByFeature:
    """A block's stored features, sorted by feature. Raises ValueError for an index that is not less than `width`."""
    index, value = index.reshape(-1, index.shape[2]), value.reshape(-1, value.shape[2])
    fires = index >= 0
    features = index[fires]
    counts = np.bincount(features, minlength=width)
    if len(counts) > width:
        raise ValueError(f"feature {len(counts) - 1} of an SAE with {width} features")
    keys = features.astype(np.uint64) << np.uint64(32) | np.arange(len(features), dtype=np.uint64)
    keys.sort()  # several times faster than a stable argsort of the features
    order = (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)
    slots = np.repeat(np.arange(len(index), dtype=np.uint32), np.count_nonzero(fires, axis=1))
    return ByFeature(np.concatenate([[0], np.cumsum(counts)]), slots[order], value[fires][order])


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


def encode_index(matrix: ByFeature, key: str) -> bytes:
    """The content of a block's index file, to be stored at `key`."""
    entries = np.zeros(len(matrix.firsts) - 1, ENTRY)
    entries["first"], entries["count"] = matrix.firsts[:-1], np.diff(matrix.firsts)
    entries["maximum"] = matrix.maxima
    firings = np.empty(len(matrix.slots), firing_type(matrix.values.dtype))
    firings["slot"], firings["value"] = matrix.slots, matrix.values.view(firings.dtype["value"])
    content, size = memoryview(firings).cast("B"), firings.itemsize
    ends = (matrix.firsts * size).tolist()
    fires = np.flatnonzero(entries["count"])
    entries["firings_crc32c"][fires] = [crc32c(content[ends[n] : ends[n + 1]]) for n in fires.tolist()]  # else 0
    header, key_crc = memoryview(entries).cast("B"), crc32c(key.encode())
    starts = range(0, entries.nbytes, ENTRY.itemsize)
    entries["entry_crc32c"] = [_entry_checksum(header[i : i + _CHECKED], n, key_crc) for n, i in enumerate(starts)]
    return b"".join((header, content))


def entry_range(feature: int) -> tuple[int, int]:
    """The range of bytes of a feature's entry in an index file."""
    return feature * ENTRY.itemsize, (feature + 1) * ENTRY.itemsize


def decode_entry(content: bytes, feature: int, key: str) -> np.void:
    """A feature's ENTRY. Raises StoreInvalid if it is damaged, or belongs to a different feature or key."""
    if len(content) == ENTRY.itemsize:
        [entry] = np.frombuffer(content, ENTRY)
        if entry["entry_crc32c"] == _entry_checksum(content[:_CHECKED], feature, crc32c(key.encode())):
            return entry
    raise StoreInvalid(f"{key}: the index entry of feature {feature} is damaged. {DAMAGE_REMEDY}")


def firings_range(entry: np.void, width: int, value_type: np.dtype) -> tuple[int, int]:
    """The range of bytes of a feature's firings in an index file."""
    size = firing_type(value_type).itemsize
    first = width * ENTRY.itemsize + int(entry["first"]) * size
    return first, first + int(entry["count"]) * size


def decode_firings(
    content: bytes, entry: np.void, value_type: np.dtype, key: str
) -> tuple[UInt32[np.ndarray, " n"], Float32[np.ndarray, " n"]]:
    """A feature's firings: row * S + slot of each, ascending, and its value. Raises StoreInvalid if they are
    damaged."""
    if crc32c(content) != entry["firings_crc32c"]:
        raise StoreInvalid(f"{key} does not match its own checksums. {DAMAGE_REMEDY}")
    firings = np.frombuffer(content, firing_type(value_type))
    return firings["slot"], firings["value"].view(value_type).astype(np.float32)


def check_index(content: bytes | None, width: int, value_type: np.dtype, key: str) -> None:
    """Raises StoreInvalid if an index file is missing, or does not match its own checksums."""
    if content is None:
        raise StoreInvalid(f"{key} is missing, although its block is committed. {DAMAGE_REMEDY}")
    end = width * ENTRY.itemsize
    for feature in range(width):
        entry = decode_entry(content[slice(*entry_range(feature))], feature, key)
        first, end = firings_range(entry, width, value_type)
        decode_firings(content[first:end], entry, value_type, key)
    if len(content) != end:
        raise StoreInvalid(f"{key} has {len(content)} bytes, expected {end}. {DAMAGE_REMEDY}")


def _entry_checksum(fields: bytes | memoryview, feature: int, key_crc: int) -> int:
    return crc32c(fields, crc32c(feature.to_bytes(4, "little"), key_crc))
