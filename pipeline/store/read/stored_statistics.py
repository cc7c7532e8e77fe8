"""The stored statistics of a store's arrays and features, and single features, which are read from the blocks' indexes
by feature.

Shapes: n firings, F features of the SAE.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, SupportsIndex

import numpy as np
from jaxtyping import Float32, Float64, Int64

from pipeline.core.arguments import flag, integer
from pipeline.core.errors import StoreError, StoreInvalid
from pipeline.core.sites import ActivationKey, find_array, spelled
from pipeline.store.format.block_table import BlockTable
from pipeline.store.format.keys import encoded_array, features_name
from pipeline.store.format.layout import StoreLayout
from pipeline.store.format.metadata import StoreRoot
from pipeline.store.format.statistics import Normalisation, Statistics
from pipeline.store.format.summary import read_statistics
from pipeline.store.indexes.features import decode_entry, decode_firings, entry_range, firings_range, index_key
from pipeline.store.io.failures import DAMAGE_REMEDY
from pipeline.store.io.storage import Storage
from pipeline.store.read.options import ArrayNames, Key, as_keys
from pipeline.store.read.shard_reads import ShardReads


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


class HasStatistics:
    """What has a store's statistics and features. Arrays are named as in `ActivationStore.read`."""

    storage: Storage
    blocks: BlockTable
    _root: StoreRoot
    _layout: StoreLayout
    _names: ArrayNames
    _reads: ShardReads

    @property
    def path(self) -> str:
        return self.storage.path

    def statistics(self, key: Key) -> Statistics:
        """Statistics of an array over all its stored tokens: each feature's mean and variance, and the norms.

        Raises StoreError for a store made with capture.statistics=false.
        """
        return self._statistics_of(self._names.key(key).name)

    def normalisation(self, keys: Key | Sequence[Key], per_feature: bool = False) -> dict[str, Normalisation]:
        """The normalisation to zero mean and unit variance, by array name, from the stored statistics.

        See `Statistics.normalisation`. Raises StoreError for a store made with capture.statistics=false; use the
        statistics from `sample` there.
        """
        parsed, per_feature = [self._names.key(key) for key in as_keys(keys)], flag("per_feature", per_feature)
        return {key.name: self.statistics(key).normalisation(per_feature) for key in parsed}

    def feature_statistics(self, name: Key) -> FeatureStatistics:
        """How often and how strongly each feature of an SAE fires, over all tokens whose features are stored. With
        capture.encode_error, also how well the SAE reconstructs the activations.

        name: the array that the SAE encodes, e.g. "blocks.5.resid_post"; followed by ".<SAE's name>" if several encode
        it. Raises StoreError if there is no such SAE, and for a store without statistics of features.
        """
        features = self._features_name(name)
        array = self._root.metadata.reconstructed.get(features)
        statistics = self._statistics_of(features)
        return FeatureStatistics.of(statistics, None if array is None else self._statistics_of(array))

    def feature(self, name: Key, feature: SupportsIndex, top: int | None = None) -> Firings:
        """The tokens for which one feature of an SAE fires, in storage order; with `top`, its `top` strongest firings.

        name: as in `feature_statistics`. Costs two small reads per block; with `top`, one per block and a second one
        for at most `top` blocks. Raises StoreError if there is no such SAE or feature, and for a store without an index
        by feature.
        """
        features = self._features_name(name)
        [sae] = (sae for sae in self._root.metadata.encoders if sae["features"] == features)
        feature, top = integer("feature", feature), None if top is None else integer("top", top, 1)
        if feature >= sae["width"]:
            raise StoreError(f"feature {feature} of {name}: the SAE has features 0 to {sae['width'] - 1}.")
        if features not in self._root.metadata.indexed_features:
            raise StoreError(
                f"the store {self.path} has no index by feature: it was made with capture.encode_index=false. Read all "
                "features with batches(..., features=True)."
            )
        firings = self.storage.retry_read(partial(self._firings, sae, feature, top))
        self._reads.require_same_store()
        return firings

    def _firings(self, sae: Mapping[str, Any], feature: int, top: int | None) -> Firings:
        blocks, value_type = self.blocks, np.dtype(sae["dtype"])
        keys = [index_key(sae["features"], block.stream, block.block) for block in blocks]

        def read(numbers: Sequence[int], ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, bytes]]:
            contents = self.storage.read_many([keys[n] for n in numbers], ranges)
            for n, content in zip(numbers, contents, strict=True):
                if content is None:
                    raise StoreInvalid(f"{self.path}/{keys[n]} is missing. {DAMAGE_REMEDY}")
                yield n, content

        headers = read(range(len(keys)), [entry_range(feature)] * len(keys))
        entries = [decode_entry(content, feature, keys[n]) for n, content in headers]
        fires = [n for n, entry in enumerate(entries) if entry["count"]]
        if top is not None:  # the strongest firings are in the `top` blocks with the largest maxima
            fires = sorted(sorted(fires, key=lambda n: -entries[n]["maximum"])[:top])
        rows, slots, values = [np.empty(0, np.int64)], [np.empty(0, np.int64)], [np.empty(0, np.float32)]
        for n, content in read(fires, [firings_range(entries[n], sae["width"], value_type) for n in fires]):
            block_slots, block_values = decode_firings(content, entries[n], value_type, keys[n])
            row, slot = np.divmod(block_slots.astype(np.int64), self._layout.slots)
            rows.append(self._layout.first_row(blocks[n].stream, blocks[n].block) + row)
            slots.append(slot)
            values.append(block_values)
        found = [*map(np.concatenate, (rows, slots, values))]
        order = slice(None) if top is None else np.argsort(-found[2], kind="stable")[:top]
        return Firings(*(column[order] for column in found))

    @cached_property
    def _feature_widths(self) -> Mapping[str, int]:
        """The number of features of each SAE, by the prefix of the names of its arrays."""
        return {sae["features"]: sae["width"] for sae in self._root.metadata.encoders}

    @cached_property
    def _statistics(self) -> Mapping[str, Statistics]:
        statistics = read_statistics(self.storage, self._root, self.blocks)
        self._reads.require_same_store()
        return statistics

    def _statistics_of(self, name: str) -> Statistics:
        if (statistics := self._statistics.get(name)) is None:
            raise StoreError(f"{self.path} has no statistics of {name}: it was made with capture.statistics=false.")
        return statistics

    def _features_name(self, name: Key) -> str:
        """The prefix of the names of an SAE's arrays."""
        hooks = {}
        for features in self._feature_widths:
            array, full_name = encoded_array(features), features.removeprefix("features.")
            hooks[full_name] = ActivationKey.parse(array).hook_name() + full_name.removeprefix(array)
        if (found := find_array(spelled(name), hooks)) is None:
            raise StoreError(
                f"the store {self.path} has no features of {name!r}; it has: {', '.join(hooks) or 'none'}."
            )
        return features_name(found)
