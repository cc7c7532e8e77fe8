"""Statistics and feature indexes of a block's SAE features, computed on separate threads."""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from pipeline.data.documents import TokenBlock
from pipeline.planning.host_memory import MAX_SORTING_THREADS
from pipeline.step.spec import EncoderSpec, StepSpec
from pipeline.store.features.block_statistics import feature_statistics
from pipeline.store.features.index_file import by_feature, encode_index, index_key
from pipeline.store.format.layout import feature_parts
from pipeline.store.format.statistics import Statistics


class FeatureSummary(NamedTuple):
    """The summary of one SAE's features in a block."""

    name: str
    statistics: Statistics | None  # None if the store keeps none
    indexes: dict[str, bytes]  # by key; at most one


class FeatureThreads:
    """Summarises the features of blocks while the writer thread continues."""

    def __init__(self, spec: StepSpec) -> None:
        self._spec = spec
        self._pool = ThreadPoolExecutor(MAX_SORTING_THREADS, "features")

    def start(self, block: TokenBlock, arrays: Mapping[str, np.ndarray]) -> list[Future[FeatureSummary]]:
        """Starts one summary per SAE; none if neither statistics nor an index are kept. Do not change the arrays."""
        encoders = [encoder for encoder in self._spec.encoders if encoder.indexed or self._spec.statistics]
        return [self._pool.submit(self._summarise, encoder, block, arrays) for encoder in encoders]

    def _summarise(self, encoder: EncoderSpec, block: TokenBlock, arrays: Mapping[str, np.ndarray]) -> FeatureSummary:
        names = feature_parts(encoder.decodes)
        parts = {part: arrays[f"{encoder.name}.{part}"][: block.num_rows] for part in names}
        matrix = by_feature(parts["index"], parts["value"], encoder.sae.width)
        indexes: dict[str, bytes] = {}
        if encoder.indexed:
            key = index_key(encoder.name, block.stream, block.index)
            indexes[key] = encode_index(matrix, key)
        statistics = None
        if self._spec.statistics:
            statistics = feature_statistics(parts, block.stored, matrix)
        return FeatureSummary(encoder.name, statistics, indexes)
