"""`data.tokens`: token ids from a column of the data, taken as they are.

Columns beside it that are read if they exist: `attention_mask`, which is 0 for padding, and for rows of several packed
texts `position_ids`, which begin again with 0, or `seq_lengths`.
"""

import logging
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Int32

from pipeline.data.documents import Document
from pipeline.data.text.tokenizer import TextTokenizer

log = logging.getLogger("pipeline")

MASK, _POSITIONS, _LENGTHS = "attention_mask", "position_ids", "seq_lengths"
_LARGEST = (1 << 31) - 1


def token_columns(tokens: str, names: Collection[str]) -> list[str]:
    """The columns to read of those that the data has."""
    return [tokens, *({MASK, _POSITIONS, _LENGTHS} & {*names})]


def is_ids(kind: pa.DataType) -> bool:
    """Whether a column's type is a list of integers."""
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return is_list and pa.types.is_integer(kind.value_type)


def with_tokens(document: Document, row: Mapping[str, Any], column: str) -> Document:
    """The document with the ids of a row, without padding, and its breaks. Raises ValueError if they are no list of
    integers, or do not fit the columns beside them. Whether the model has them is checked with all documents'."""
    ids = _integers(row.get(column), column)
    mask, positions, lengths = (
        _integers(row[name], name, kinds="iub") if row.get(name) is not None else None
        for name in (MASK, _POSITIONS, _LENGTHS)
    )
    for name, values in ((MASK, mask), (_POSITIONS, positions)):
        if values is not None and values.shape != ids.shape:
            raise ValueError(f"{name!r} has {len(values)} values for the {len(ids)} tokens in {column!r}")
    begins = np.zeros(len(ids), bool)
    if positions is not None:
        begins = positions == 0
    elif lengths is not None:
        if lengths.sum() != len(ids) or (len(lengths) and lengths.min() < 1):
            raise ValueError(f"{_LENGTHS!r} sums to {lengths.sum()}, but {column!r} has {len(ids)} tokens")
        begins[np.cumsum(lengths)[:-1]] = True
    if mask is not None:
        if not {0, 1}.issuperset(mask.tolist()):
            raise ValueError(f"{MASK!r} is not 0 or 1 for each token")
        texts = np.cumsum(begins)[mask == 1]  # a text may begin with padding
        ids, begins = ids[mask == 1], np.diff(texts, prepend=texts[:1]) > 0
    if not len(ids):
        raise ValueError(f"{column!r} has no tokens")
    if not 0 <= ids.min() <= ids.max() <= _LARGEST:
        raise ValueError(f"{column!r} has the token ids {ids.min()} to {ids.max()}, expected 0 to {_LARGEST}")
    breaks = tuple((np.flatnonzero(begins[1:]) + 1).tolist())
    return replace(document, tokens=ids.astype(np.int32), breaks=breaks)


def _integers(values: Any, column: str, kinds: str = "iu") -> np.ndarray:
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError):  # lists of different lengths
        array = np.empty(())
    if array.ndim != 1 or (len(array) and array.dtype.kind not in kinds):
        raise ValueError(f"{column!r} is {str(values)[:80]!r}, expected a list of integers")
    return array.astype(np.int64)


def padding_problem(tokens: Int32[np.ndarray, "_"], padding: int | None) -> str | None:
    """Why the ids cannot be a text, if several at an end are the tokenizer's `padding`; None if they can."""
    if padding is None or len(tokens) < 2 or padding not in (tokens[0], tokens[-1]):
        return None
    is_padded = any((part == padding).all() for part in (tokens[:2], tokens[-2:]))
    return f"it has padding (token id {padding}) without a column {MASK!r} that is 0 there" if is_padded else None


def warn_without_start(tokens: Int32[np.ndarray, "_"], tokenizer: TextTokenizer) -> None:
    """Warns if the ids do not begin like the documents of the tokenizer."""
    before = tokenizer.ends[0]
    if not np.array_equal(tokens[: len(before)], before):
        log.warning(
            "the first document's token ids begin with %d, but tokenizer %s puts %s before every text. They are used "
            "as they are",
            *(tokens[0], tokenizer.name, before.tolist()),
        )
