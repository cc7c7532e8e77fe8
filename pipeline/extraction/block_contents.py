"""What a store holds besides a block's activations: its tokens and commit record."""

from dataclasses import asdict

import numpy as np
from jaxtyping import Int32

from pipeline.data.documents import TokenBlock
from pipeline.store.format.commits import CommitRecord


def side_arrays(block: TokenBlock, rows_per_block: int) -> dict[str, Int32[np.ndarray, "R _"]]:
    """Tokens, segments, positions, documents and selected positions, padded to the R rows of a store shard."""
    padding = ((0, rows_per_block - block.num_rows), (0, 0))
    arrays = {name: np.pad(getattr(block, name), padding) for name in ("tokens", "segments", "positions")}
    arrays["documents"] = np.pad(block.documents, padding, constant_values=-1)
    if block.selected is not None:
        arrays["selected"] = np.pad(block.selected, padding, constant_values=-1)
    return arrays


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
        selected=None if block.selected is None else int(np.count_nonzero(block.stored)),
    )
