"""The stored statistics of a store's arrays and features, and single features."""

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import SupportsIndex

from pipeline.core.arguments import flag, integer
from pipeline.core.errors import StoreError
from pipeline.core.sites import ActivationKey, find_array, spelled
from pipeline.store.features.firings import FeatureStatistics, Firings, read_firings
from pipeline.store.format.block_table import BlockTable
from pipeline.store.format.keys import encoded_array, features_name
from pipeline.store.format.layout import StoreLayout
from pipeline.store.format.metadata import StoreRoot
from pipeline.store.format.statistics import Normalisation, Statistics
from pipeline.store.format.summary import read_statistics
from pipeline.store.io.storage import Storage
from pipeline.store.read.options import ArrayNames, Key, as_keys
from pipeline.store.read.shard_reads import ShardReads


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
        read = partial(read_firings, self.storage, self._layout, sae, self.blocks, feature, top)
        firings = self.storage.retry_read(read)
        self._reads.require_same_store()
        return firings

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
