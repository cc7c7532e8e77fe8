"""What a store holds besides a block's activations: its tokens, statistics and commit record."""

from dataclasses import asdict

import numpy as np
from jaxtyping import Int32

from pipeline.data.documents import TokenBlock
from pipeline.step.row_statistics import RowStatistics
from pipeline.step.spec import StepSpec
from pipeline.store.format.commits import CommitRecord
from pipeline.store.format.statistics import Statistics, block_statistics


def side_arrays(block: TokenBlock, rows_per_block: int) -> dict[str, Int32[np.ndarray, "R _"]]:
    """Tokens, segments, positions, documents and selected positions, padded to the R rows of a store shard."""
    padding = ((0, rows_per_block - block.num_rows), (0, 0))
    arrays = {name: np.pad(getattr(block, name), padding) for name in ("tokens", "segments", "positions")}
    arrays["documents"] = np.pad(block.documents, padding, constant_values=-1)
    if block.selected is not None:
        arrays["selected"] = np.pad(block.selected, padding, constant_values=-1)
    return arrays


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


def commit_record(block: TokenBlock) -> CommitRecord:
    """The record that commits a block."""
    return CommitRecord(
        stream=block.stream,
        block=block.index,
        rows=block.num_rows,
        tokens=block.num_tokens,
        documents=block.table.num_rows,
        tokens_cut=sum(block.table["n_cut"].to_pylist()),
        skipped=tuple(asdict(skip) for skip in block.skipped),
        start=block.start.to_json(),
        next=block.next.to_json(),
        exhausted=block.exhausted,
        truncated=False,
        selected=None if block.selected is None else int(np.count_nonzero(block.stored)),
    )
