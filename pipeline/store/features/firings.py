"""One feature of a store, read from the indexes of its blocks: no other feature's numbers are read.

Shapes: n firings, F features of the SAE.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Float64, Int64

from pipeline.core.errors import StoreInvalid
from pipeline.store.features.index_file import decode_entry, decode_firings, entry_range, firings_range, index_key
from pipeline.store.format.block_table import Block
from pipeline.store.format.statistics import Statistics
from pipeline.store.io.failures import DAMAGE_REMEDY
from pipeline.store.io.storage import Storage


@dataclass(frozen=True)
class Firings:
    """Where a feature fires. rows: of the store. slots: of the row, as `read` has them; where all tokens' activations
    are stored, positions in the row. values: in float32.

    In the order of the store, or, of the strongest ones, by falling value and then in the order of the store.
    """

    rows: Int64[np.ndarray, " n"]
    slots: Int64[np.ndarray, " n"]
    values: Float32[np.ndarray, " n"]


@dataclass(frozen=True)
class FeatureStatistics:
    """The statistics of an SAE's features, over all tokens whose features are stored.

    tokens: their number. count: in how many of them each feature is stored. mean, maximum: of its values there; 0 for
    one that is stored nowhere. l0: how many features fire in a token on average, also those that are not stored.
    With capture.encode_error, else None: explained_variance: 1 - sum of |x - reconstruction|^2 / sum of |x - mean x|^2
    (None where these would be of different tokens, since some are not finite); cosine: of the angle between x and its
    reconstruction, on average.
    """

    tokens: int
    count: Int64[np.ndarray, " F"]
    mean: Float64[np.ndarray, " F"]
    maximum: Float32[np.ndarray, " F"]
    l0: float
    explained_variance: float | None
    cosine: float | None

    @classmethod
    def of(cls, statistics: Statistics, activations: Statistics | None) -> "FeatureStatistics":
        """From what is stored, where zeros count. activations: of the array that the SAE reconstructs, if it does."""
        tokens, fired = statistics.count, statistics.fired
        mean = statistics.mean * tokens / np.maximum(fired, 1)
        explained, cosine = None, None
        if activations is not None and statistics.squared_error is not None and tokens:
            cosine = statistics.cosine_sum / tokens
            if activations.count == tokens and (variance := float(activations.m2.sum())):
                explained = 1 - statistics.squared_error / variance
        l0 = statistics.num_active / max(tokens, 1)
        return cls(tokens, fired, mean, statistics.maximum, l0, explained, cosine)


@dataclass(frozen=True)
class FeatureIndexes:
    """The indexes of an SAE's features. features: what the names of its arrays begin with. width: F. slots: of a row.
    blocks: of the store, in the order of their rows; first_row: that of a block."""

    storage: Storage
    features: str
    width: int
    value_type: np.dtype
    slots: int
    blocks: Sequence[Block]
    first_row: Callable[[int, int], int]

    def read(self, feature: int, top: int | None = None) -> Firings:
        """All firings of a feature, or the `top` strongest: two small reads of each block, or one of each and another
        of at most `top`. Raises StoreError."""
        keys = [index_key(self.features, block.stream, block.block) for block in self.blocks]
        contents = _read(self.storage, keys, [entry_range(feature)] * len(keys))
        entries = [decode_entry(content, feature, key) for key, content in zip(keys, contents, strict=True)]
        fires = [n for n, entry in enumerate(entries) if entry["count"]]
        if top is not None:  # each block has its maximum: so the strongest are in as many blocks
            fires = sorted(sorted(fires, key=lambda n: -entries[n]["maximum"])[:top])
        ranges = [firings_range(entries[n], self.width, self.value_type) for n in fires]
        contents = _read(self.storage, [keys[n] for n in fires], ranges)
        rows, slots, values = [np.empty(0, np.int64)], [np.empty(0, np.int64)], [np.empty(0, np.float32)]
        for n, content in zip(fires, contents, strict=True):
            block = self.blocks[n]
            firings = decode_firings(content, entries[n], self.value_type, keys[n])
            row, slot = np.divmod(firings.slots.astype(np.int64), self.slots)
            is_known = row < block.rows  # a longer run may have replaced a truncated block since the store was opened
            rows.append(self.first_row(block.stream, block.block) + row[is_known])
            slots.append(slot[is_known])
            values.append(firings.values[is_known])
        found = Firings(*map(np.concatenate, (rows, slots, values)))
        if top is None:
            return found
        order = np.argsort(-found.values, kind="stable")[:top]
        return Firings(found.rows[order], found.slots[order], found.values[order])


def _read(storage: Storage, keys: list[str], ranges: list[tuple[int, int]]) -> Iterator[bytes]:
    """Parts of some objects. Raises StoreInvalid where there is none."""
    for key, content in zip(keys, storage.read_many(keys, ranges), strict=True):
        if content is None:
            raise StoreInvalid(f"{storage.path}/{key} is missing. {DAMAGE_REMEDY}")
        yield content
