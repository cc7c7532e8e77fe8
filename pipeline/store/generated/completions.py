"""Which of a block's tokens the model wrote, in a store of data=generate. Shapes: R rows, T positions."""

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Int64

from pipeline.core.errors import StoreError


def completion_slots(documents: Int64[np.ndarray, "R T"], table: pa.Table) -> Bool[np.ndarray, "R T"]:
    """Whether each slot of a block's rows holds a completion's token, by the block's document table; else it holds a
    prompt's, or padding.

    Raises StoreError where documents have no prompts.
    """
    if "n_prompt" not in table.column_names:
        raise StoreError("the store's documents are not divided into prompt and completion: that is for data=generate.")
    slots, place, tokens = document_tokens(documents, table)
    is_completion = np.zeros(documents.size, bool)
    is_completion[slots] = tokens >= table["n_prompt"].to_numpy()[place]
    return is_completion.reshape(documents.shape)


def document_tokens(
    documents: Int64[np.ndarray, "R T"], table: pa.Table
) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
    """Of a block's valid slots (flat): the slot, its document's row in the table, and which of its tokens it holds."""
    flat = documents.ravel()
    order = np.argsort(flat, kind="stable")  # rows and positions upward meet a document's tokens in order
    order = order[flat[order] >= 0]
    place = np.searchsorted(table["document"].to_numpy(), flat[order])
    starts = np.flatnonzero(np.diff(place, prepend=-1))
    rank = np.arange(len(order)) - np.repeat(starts, np.diff(starts, append=len(order)))
    return order, place, table["first_token"].to_numpy()[place] + rank
