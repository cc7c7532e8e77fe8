"""Which of a block's tokens belong to completions (data=generate). Shapes: R rows, T positions."""

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Int64

from pipeline.core.errors import StoreError


def completion_slots(documents: Int64[np.ndarray, "R T"], table: pa.Table) -> Bool[np.ndarray, "R T"]:
    """Whether each slot of a block holds a completion's token, and not a prompt's token or padding. table: the block's
    document table.

    Raises StoreError for a store without completions.
    """
    if "n_prompt" not in table.column_names:
        raise StoreError(
            "the store's documents are not divided into prompts and completions: it was made without data=generate."
        )
    slots, table_rows, tokens = document_tokens(documents, table)
    is_completion = np.zeros(documents.size, bool)
    is_completion[slots] = tokens >= table["n_prompt"].to_numpy()[table_rows]
    return is_completion.reshape(documents.shape)


def document_tokens(
    documents: Int64[np.ndarray, "R T"], table: pa.Table
) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
    """For each of a block's n valid slots, sorted by document: its flat index, its document's row in the table, and the
    index of its token in the document."""
    flat = documents.ravel()
    slots = np.argsort(flat, kind="stable")  # a document's tokens are in order of rows and positions
    slots = slots[flat[slots] >= 0]
    table_rows = np.searchsorted(table["document"].to_numpy(), flat[slots])
    starts = np.flatnonzero(np.diff(table_rows, prepend=-1))
    rank = np.arange(len(slots)) - np.repeat(starts, np.diff(starts, append=len(slots)))
    return slots, table_rows, table["first_token"].to_numpy()[table_rows] + rank
