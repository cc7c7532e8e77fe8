"""A block's statistics and indexes by feature, computed on separate threads while its arrays are written."""

from collections.abc import Collection, Mapping
from concurrent.futures import Executor
from dataclasses import replace

import numpy as np

from pipeline.data.documents import TokenBlock
from pipeline.step.spec import EncoderSpec, StepSpec
from pipeline.step.stored_values import RowStatistics
from pipeline.store.format.layout import dequantised, feature_parts, scale_name
from pipeline.store.format.statistics import BlockStatistics, Statistics, block_statistics, merge, token_statistics
from pipeline.store.indexes.features import by_feature, encode_index, feature_statistics, index_key


class BlockSummary:
    """The summary of a block's own arrays, and of those arrays whose stored values were adopted.

    The features of SAEs are summarised in other threads, from now on: one SAE per thread.
    """

    def __init__(
        self,
        spec: StepSpec,
        block: TokenBlock,
        arrays: Mapping[str, np.ndarray],
        rows: RowStatistics | None,
        threads: Executor,
    ) -> None:
        """arrays: the block's, by name; do not change them. rows: statistics of its rows from the devices."""
        self._spec, self._block, self._arrays, self._rows = spec, block, arrays, rows
        encoders = [encoder for encoder in spec.encoders if encoder.indexed or spec.statistics]
        self._features = [(encoder, threads.submit(self._summarise, encoder)) for encoder in encoders]

    def result(self, adopted: Collection[str]) -> tuple[BlockStatistics | None, dict[str, bytes]]:
        """Waits for the statistics (None if the store keeps none) and the indexes by key. `adopted`: the names of
        arrays that now have other values, which are summarised again."""
        features: dict[str, Statistics | None] = {}
        indexes: dict[str, bytes] = {}
        for encoder, future in self._features:
            summary = future.result()
            if any(f"{encoder.name}.{part}" in adopted for part in feature_parts(encoder.decodes)):
                summary = self._summarise(encoder)
            features[encoder.name], index = summary
            indexes |= index
        if not self._spec.statistics:
            return None, indexes
        statistics = {} if self._rows is None else merge_rows(self._spec, self._block, self._rows)
        for name in statistics:
            if name in adopted or scale_name(name) in adopted:
                # The error of storing remains that of this process's values.
                error = statistics[name].squared_error
                statistics[name] = replace(self._stored_statistics(name), squared_error=error)
        return statistics | features, indexes

    def _summarise(self, encoder: EncoderSpec) -> tuple[Statistics | None, dict[str, bytes]]:
        """The statistics of an SAE's features in the block (None if the store keeps none), and its index by key."""
        block, names = self._block, feature_parts(encoder.decodes)
        parts = {part: self._arrays[f"{encoder.name}.{part}"][: block.num_rows] for part in names}
        matrix = by_feature(parts["index"], parts["value"], encoder.sae.width)
        index: dict[str, bytes] = {}
        if encoder.indexed:
            key = index_key(encoder.name, block.stream, block.index)
            index[key] = encode_index(matrix, key)
        return feature_statistics(parts, block.stored, matrix) if self._spec.statistics else None, index

    def _stored_statistics(self, name: str) -> Statistics:
        values, scales, block = self._arrays[name], self._arrays.get(scale_name(name)), self._block

        def activations(row: int) -> np.ndarray:
            valid = block.stored[row]
            if scales is not None:
                return dequantised(values[row][valid], scales[row][valid])
            return values[row][valid].astype(np.float32)

        return merge(token_statistics(activations(row)) for row in range(block.num_rows))


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
