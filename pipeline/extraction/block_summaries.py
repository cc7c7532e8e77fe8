"""A block's statistics and indexes by feature, computed on separate threads while its arrays are written."""

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from pipeline.data.documents import TokenBlock
from pipeline.planning.host_memory import MAX_SORTING_THREADS
from pipeline.step.row_statistics import RowStatistics
from pipeline.step.spec import EncoderSpec, StepSpec
from pipeline.store.features.block_statistics import feature_statistics
from pipeline.store.features.index_file import by_feature, encode_index, index_key
from pipeline.store.format.layout import feature_parts
from pipeline.store.format.scaled import dequantised, scale_name
from pipeline.store.format.statistics import BlockStatistics, Statistics, block_statistics, merge, token_statistics


class FeatureSummary(NamedTuple):
    """The summary of one SAE's features in a block."""

    statistics: Statistics | None  # None if the store keeps none
    indexes: dict[str, bytes]  # by key; at most one


class SummaryThreads:
    """Summarises blocks while the writer thread continues."""

    def __init__(self, spec: StepSpec) -> None:
        self._spec = spec
        self._pool = ThreadPoolExecutor(MAX_SORTING_THREADS, "features")

    def start(self, block: TokenBlock, arrays: Mapping[str, np.ndarray], rows: RowStatistics | None) -> "BlockSummary":
        """Starts a summary per SAE; none if neither statistics nor an index are kept. Do not change the arrays.

        arrays: the block's, by name. rows: statistics of its rows from the devices.
        """
        encoders = [encoder for encoder in self._spec.encoders if encoder.indexed or self._spec.statistics]
        has_statistics = self._spec.statistics
        features = [(e, self._pool.submit(summarise_features, e, block, arrays, has_statistics)) for e in encoders]
        return BlockSummary(self._spec, block, arrays, rows, features)


@dataclass(frozen=True)
class BlockSummary:
    """The summary of a block's own arrays, and of those arrays whose stored values were adopted."""

    spec: StepSpec
    block: TokenBlock
    arrays: Mapping[str, np.ndarray]
    rows: RowStatistics | None
    features: Sequence[tuple[EncoderSpec, Future[FeatureSummary]]]

    def result(self, adopted: Collection[str]) -> tuple[BlockStatistics | None, dict[str, bytes]]:
        """Waits for the statistics (None if the store keeps none) and the indexes by key. `adopted`: the names of
        arrays that now have other values, which are summarised again."""
        features: dict[str, FeatureSummary] = {}
        for encoder, future in self.features:
            features[encoder.name] = future.result()
            if any(f"{encoder.name}.{part}" in adopted for part in feature_parts(encoder.decodes)):
                features[encoder.name] = summarise_features(encoder, self.block, self.arrays, self.spec.statistics)
        indexes = {key: content for summary in features.values() for key, content in summary.indexes.items()}
        if not self.spec.statistics:
            return None, indexes
        statistics = {} if self.rows is None else merge_rows(self.spec, self.block, self.rows)
        for name in statistics:
            if name in adopted or scale_name(name) in adopted:
                # The error of storing remains that of this process's values.
                error = statistics[name].squared_error
                statistics[name] = replace(self._stored_statistics(name), squared_error=error)
        return statistics | {name: summary.statistics for name, summary in features.items()}, indexes

    def _stored_statistics(self, name: str) -> Statistics:
        values, scales = self.arrays[name], self.arrays.get(scale_name(name))

        def activations(row: int) -> np.ndarray:
            valid = self.block.stored[row]
            if scales is not None:
                return dequantised(values[row][valid], scales[row][valid])
            return values[row][valid].astype(np.float32)

        return merge(token_statistics(activations(row)) for row in range(self.block.num_rows))


def summarise_features(
    encoder: EncoderSpec, block: TokenBlock, arrays: Mapping[str, np.ndarray], has_statistics: bool
) -> FeatureSummary:
    """The summary of an SAE's features in a block's arrays."""
    names = feature_parts(encoder.decodes)
    parts = {part: arrays[f"{encoder.name}.{part}"][: block.num_rows] for part in names}
    matrix = by_feature(parts["index"], parts["value"], encoder.sae.width)
    indexes: dict[str, bytes] = {}
    if encoder.indexed:
        key = index_key(encoder.name, block.stream, block.index)
        indexes[key] = encode_index(matrix, key)
    return FeatureSummary(feature_statistics(parts, block.stored, matrix) if has_statistics else None, indexes)


def merge_rows(spec: StepSpec, block: TokenBlock, rows: RowStatistics) -> dict[str, Statistics]:
    """Merges the statistics of a block's rows into the block's, by array name."""
    moments, norms = rows.moments[: block.num_rows], rows.norms[: block.num_rows]
    statistics, first = {}, 0
    for number, (key, width) in enumerate(spec.statistics_widths.items()):
        mean, m2 = moments[:, 0, first : first + width], moments[:, 1, first : first + width]
        squared_error = None
        if rows.squared_errors is not None and key in spec.keys:
            squared_error = float(rows.squared_errors[: block.num_rows, number].sum(dtype=np.float64))
        statistics[key.name] = block_statistics(block.stored, mean, m2, norms[:, number], squared_error)
        first += width
    return statistics
