"""Reads one feature of a store, from its blocks' indexes by feature, without reading the other features.

Shapes: n firings, F features of the SAE.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float32, Float64, Int64

from pipeline.core.errors import StoreInvalid
from pipeline.store.features.index_file import decode_entry, decode_firings, entry_range, firings_range, index_key
from pipeline.store.format.block_table import Block
from pipeline.store.format.layout import StoreLayout
from pipeline.store.format.statistics import Statistics
from pipeline.store.io.failures import DAMAGE_REMEDY
from pipeline.store.io.storage import Storage


@dataclass(frozen=True)
class Firings:
    """The tokens for which a feature fires, in storage order; the strongest firings by descending value.

    rows: row numbers of the store. slots: slots of the row, as in `ActivationStore.read`; if all tokens' activations
    are stored, these are positions. values: the feature's values.
    """

    rows: Int64[np.ndarray, " n"]
    slots: Int64[np.ndarray, " n"]
    values: Float32[np.ndarray, " n"]


@dataclass(frozen=True)
class FeatureStatistics:
    """The statistics of an SAE's features, over all tokens whose features are stored.

    tokens: the number of these tokens. count: for how many of them each feature is stored. mean, maximum: of each
    feature's stored values; 0 if there are none. l0: the mean number of features that fire per token, including those
    that are not stored.
    Only with capture.encode_error (else None): explained_variance: 1 - sum |x - reconstruction|^2 / sum |x - mean x|^2;
    None if non-finite values make the two sums cover different tokens. cosine: the mean cosine of the angle between x
    and its reconstruction.
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
        """Converts stored statistics, in which features that do not fire count as 0. activations: the statistics of the
        array that the SAE reconstructs, if any."""
        tokens, fired = statistics.count, statistics.fired
        mean = statistics.mean * tokens / np.maximum(fired, 1)
        explained, cosine = None, None
        if activations is not None and statistics.squared_error is not None and tokens:
            cosine = statistics.cosine_sum / tokens
            if activations.count == tokens and (variance := float(activations.m2.sum())):
                explained = 1 - statistics.squared_error / variance
        l0 = statistics.num_active / max(tokens, 1)
        return cls(tokens, fired, mean, statistics.maximum, l0, explained, cosine)


def read_firings(
    storage: Storage,
    layout: StoreLayout,
    sae: Mapping[str, Any],
    blocks: Sequence[Block],
    feature: int,
    top: int | None = None,
) -> Firings:
    """All firings of a feature of an SAE in these blocks, or the `top` strongest.

    Costs two small reads per block; with `top`, one per block and a second one for at most `top` blocks. Raises
    StoreError.
    """
    value_type = np.dtype(sae["dtype"])
    keys = [index_key(sae["features"], block.stream, block.block) for block in blocks]

    def read(numbers: Sequence[int], ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, bytes]]:
        contents = storage.read_many([keys[n] for n in numbers], ranges)
        for n, content in zip(numbers, contents, strict=True):
            if content is None:
                raise StoreInvalid(f"{storage.path}/{keys[n]} is missing. {DAMAGE_REMEDY}")
            yield n, content

    headers = read(range(len(keys)), [entry_range(feature)] * len(keys))
    entries = [decode_entry(content, feature, keys[n]) for n, content in headers]
    fires = [n for n, entry in enumerate(entries) if entry["count"]]
    if top is not None:  # the strongest firings are in the `top` blocks with the largest maxima
        fires = sorted(sorted(fires, key=lambda n: -entries[n]["maximum"])[:top])
    rows, slots, values = [np.empty(0, np.int64)], [np.empty(0, np.int64)], [np.empty(0, np.float32)]
    for n, content in read(fires, [firings_range(entries[n], sae["width"], value_type) for n in fires]):
        block_slots, block_values = decode_firings(content, entries[n], value_type, keys[n])
        row, slot = np.divmod(block_slots.astype(np.int64), layout.slots)
        rows.append(layout.first_row(blocks[n].stream, blocks[n].block) + row)
        slots.append(slot)
        values.append(block_values)
    firings = Firings(*map(np.concatenate, (rows, slots, values)))
    if top is None:
        return firings
    order = np.argsort(-firings.values, kind="stable")[:top]
    return Firings(firings.rows[order], firings.slots[order], firings.values[order])
