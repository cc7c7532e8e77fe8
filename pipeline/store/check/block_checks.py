"""Checks of the records, side arrays, documents, activations, outputs and features of a block.

These are pure functions. Each yields a message for everything that is wrong. Shapes: R rows per block, T positions per
row, K slots per row for selected tokens, S slots per row for activations (T or K), D features per activation.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Int32, Int64, Shaped

from pipeline.store.format.block_table import BlockTable
from pipeline.store.format.commits import CommitRecord

_EXPONENT_ONES = {"bfloat16": 0x7F80, "float16": 0x7C00}
_WITHOUT_SIGN = 0x7FFF

_LARGEST = float(np.finfo(np.float32).max)
_ROUNDING = 0.01  # by this, rounded outputs may be out of range


def check_chain(records: Iterable[CommitRecord]) -> Iterator[tuple[CommitRecord, str]]:
    """One stream's records, in block order: none is missing, and each starts where the previous one ends."""
    before, blocks_before = None, hashlib.sha256()
    for record in records:
        expected = 0 if before is None else before.block + 1
        if record.block != expected:
            yield record, f"the stream has this block, but no record of block {expected}"
        elif before is None and any(record.start.values()):
            yield record, f"the stream's first block starts at {dict(record.start)}, not at its first document"
        elif before is not None and before.next != record.start:
            yield record, f"starts at {dict(record.start)}, but the previous block ends at {dict(before.next)}"
        if record.blocks_before != blocks_before.hexdigest():
            yield record, "its blocks_before is not the digest of the stream's earlier blocks"
        if before is not None and (before.exhausted or before.truncated):
            end = "exhausted" if before.exhausted else "truncated"
            yield before, f"is {end}, but the stream has block {record.block}"
        if record.exhausted and record.truncated:
            yield record, "is both exhausted and truncated"
        before = record
        blocks_before.update(BlockTable.from_records([record]).values.tobytes())


def check_side_arrays(
    sides: Mapping[str, np.ndarray], record: CommitRecord, first_row: int, vocab_size: int | None
) -> Iterator[str]:
    """tokens, segments, positions and documents of a block, [R, T] each, agree with each other and the record.

    first_row: the number of the block's first row in the store.
    """
    tokens, segments = sides["tokens"], sides["segments"]
    positions, documents = sides["positions"], sides["documents"]
    valid = segments > 0

    def where(bad: Bool[np.ndarray, "R T"]) -> str:
        row, position = np.argwhere(bad)[0]
        return f"at {np.count_nonzero(bad)} slots, first row {first_row + row} position {position}"

    # What a slot must be, given the previous one in its row; before the first slot there is padding.
    same = np.zeros_like(valid)
    same[:, 1:] = valid[:, 1:] & (segments[:, 1:] == segments[:, :-1])
    previous = np.zeros_like(segments)
    previous[:, 1:] = segments[:, :-1]
    next_position = np.zeros_like(positions)
    next_position[:, 1:] = np.where(same[:, 1:], positions[:, :-1] + 1, 0)
    other_document = np.zeros_like(valid)
    other_document[:, 1:] = same[:, 1:] & (documents[:, 1:] != documents[:, :-1])
    after_padding = np.zeros_like(valid)
    after_padding[:, 1:] = valid[:, 1:] & ~valid[:, :-1]

    rules = {
        "segments are negative": segments < 0,
        "documents are not -1 exactly where segments are 0": valid != (documents >= 0),
        "tokens follow padding": after_padding,
        "segments are not numbered 1, 2, 3, ... along the row": valid & ~same & (segments != previous + 1),
        "positions do not restart at 0 and count up in each segment": valid & (positions != next_position),
        "the document changes within a segment": other_document,
        "tokens or positions are not 0 where padded": ~valid & ((tokens != 0) | (positions != 0)),
        f"tokens are outside the vocabulary of {vocab_size}": (tokens < 0) | (tokens >= (vocab_size or np.inf)),
    }
    for rule, bad in rules.items():
        if bad.any():
            yield f"{rule}: {where(bad)}"
    filled = valid.any(axis=1)
    if filled.sum() != record.rows or not filled[: record.rows].all():
        yield f"the record says that the first {record.rows} rows have tokens; rows with tokens: {_ranges(filled)}"
    if valid.sum() != record.tokens:
        yield f"the record has {record.tokens} tokens, the arrays have {valid.sum()}"


def check_selected(
    selected: Int32[np.ndarray, "R K"], valid: Bool[np.ndarray, "R T"], record: CommitRecord
) -> Iterator[str]:
    """The selected positions of a block hold tokens, are in ascending order, and are as many as in the record."""
    is_filled = selected >= 0
    length = valid.shape[1]
    bad = (selected >= length) | (is_filled & ~np.take_along_axis(valid, np.clip(selected, 0, length - 1), axis=1))
    if bad.any():
        first = np.argwhere(bad)[0][0]
        yield f"{bad.sum()} slots select a position without a token, the first in row {first} of the block"
    if (is_filled[:, 1:] & (selected[:, 1:] <= selected[:, :-1])).any() or (is_filled[:, 1:] > is_filled[:, :-1]).any():
        yield "the selected positions of a row are not in ascending order, followed by the empty slots"
    if is_filled.sum() != record.selected:
        yield f"the record has {record.selected} selected tokens, the array has {is_filled.sum()}"


def check_selected_of_documents(table: pa.Table, documents: Int64[np.ndarray, "R K"]) -> Iterator[str]:
    """The numbers of selected tokens in a block's document table are those of its slots. documents: of each slot."""
    stored, counts = np.unique(documents[documents >= 0], return_counts=True)
    num_selected = dict(zip(stored.tolist(), counts.tolist(), strict=True))
    for number, expected in zip(table["document"].to_pylist(), table["n_selected"].to_pylist(), strict=True):
        if num_selected.get(number, 0) != expected:
            yield f"document {number} has {num_selected.get(number, 0)} selected tokens, {expected} in the table"
            return


def check_table(
    table: pa.Table, documents: Int64[np.ndarray, "R T"], record: CommitRecord, num_streams: int
) -> Iterator[str]:
    """A block's document table agrees with its `documents` array, its record, and the record's cursors.

    A stream's documents are numbered: stream, stream + num_streams, stream + 2 num_streams, ...
    """
    numbers = table["document"].to_numpy()
    counts = table["last_token"].to_numpy() - table["first_token"].to_numpy()
    if table.num_rows != record.documents:
        yield f"the record has {record.documents} documents, the table has {table.num_rows}"
    if (cut := int(table["n_cut"].to_numpy().sum())) != record.tokens_cut:
        yield f"the record has {record.tokens_cut} cut tokens, the table has {cut}"
    if (np.diff(numbers) <= 0).any():
        yield "the documents are not in strictly ascending order"
        return
    stored, stored_counts = np.unique(documents[documents >= 0], return_counts=True)
    if not np.array_equal(stored, numbers):
        different = np.setxor1d(stored, numbers)
        yield f"the array and the table have different documents; only one of them has {different[:5].tolist()}"
    elif not np.array_equal(stored_counts, counts):
        k = int(np.flatnonzero(stored_counts != counts)[0])
        yield f"document {numbers[k]} has {stored_counts[k]} tokens in the arrays, {counts[k]} in the table"
    if not record.truncated:
        end = record.next["ordinal"] + (record.next["token"] > 0)
        expected = np.arange(record.start["ordinal"], end) * num_streams + record.stream
        if not np.array_equal(numbers, expected):
            different = np.setxor1d(numbers, expected)
            yield f"the table lacks documents between the record's cursors, or has others: {different[:5].tolist()}"


def check_finite(values: np.ndarray) -> Iterator[str]:
    """Activations [R, S, D] are finite."""
    if values.dtype.itemsize == 2:  # compares bits, since np.isfinite takes many times as long
        magnitude = np.bitwise_and(values.view(np.uint16), _WITHOUT_SIGN)
        infinite = magnitude.max(initial=0) >= _EXPONENT_ONES[values.dtype.name]
    else:
        infinite = values.dtype != np.int8 and not np.isfinite(values).all()
    if infinite:
        bad = ~np.isfinite(values.astype(np.float32)).all(axis=2)
        row, position = np.argwhere(bad)[0]
        yield f"{bad.sum()} slots have non-finite values, the first in row {row} at position {position}"


def check_padding(values: np.ndarray, valid: Bool[np.ndarray, "R S"]) -> Iterator[str]:
    """Activations [R, S, D] are zero where there is no token."""
    padding = values[~valid]
    if padding.dtype.itemsize == 2:
        padding = np.bitwise_and(padding.view(np.uint16), _WITHOUT_SIGN)
    if padding.any():
        yield "is not zero in padding"


def check_output(
    name: str,
    values: Shaped[np.ndarray, "R S *k"],
    valid: Bool[np.ndarray, "R S"],
    vocab_size: int | None,
    may_be_not_finite: bool,
) -> Iterator[str]:
    """An array of `capture.outputs`, or an error of an SAE's reconstruction, is within its range, and zero where there
    is no token. Log-probabilities of the likeliest tokens are in descending order."""
    least, most = {
        "loss": (0, _LARGEST),
        "entropy": (0, math.log(vocab_size) if vocab_size else _LARGEST),
        "top_logprobs": (-_LARGEST, 0),
        "top_ids": (0, vocab_size - 1 if vocab_size else _LARGEST),
        "squared_error": (0, _LARGEST),
        "cosine": (-1, 1),
    }[name]
    yield from check_padding(values, valid)
    bad = ~((values >= least - _ROUNDING) & (values <= most + _ROUNDING))
    if may_be_not_finite:
        bad &= np.isfinite(values)
    elif name == "loss":  # NaN for the last token of a document's window
        bad &= ~np.isnan(values)
    if bad.any():
        yield f"{np.count_nonzero(bad)} values are not within {least:g} to {most:g}"
    if name == "top_logprobs" and (np.diff(values, axis=2) > 0).any():
        yield "the log-probabilities of a token are not in descending order"


def check_features(
    index: Int32[np.ndarray, "R S k"],
    value: Shaped[np.ndarray, "R S k"],
    n_active: Int32[np.ndarray, "R S"],
    valid: Bool[np.ndarray, "R S"],
    width: int,
    may_be_not_finite: bool = False,
) -> Iterator[str]:
    """The features of R rows are valid for an SAE with `width` features."""
    fires, value = index != -1, value.astype(np.float32)
    counts, slots = fires.sum(axis=2), index.shape[2]
    ordered = np.sort(index, axis=2)
    checks = {
        f"an index outside -1 to {width - 1}": (index < -1) | (index >= width),
        "a feature whose value is not a finite number above 0": fires
        & ~((value > 0) & (may_be_not_finite | np.isfinite(value))),
        "a value in an empty slot": ~fires & (value != 0),
        "a feature where there is no token": fires & ~valid[..., None],
        "an empty slot before a feature": fires[..., 1:] & ~fires[..., :-1],
        "values that are not in descending order": value[..., 1:] > value[..., :-1],
        "the same feature twice": (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0),
        "a number of features that contradicts n_active": np.minimum(n_active, slots) != counts,
    }
    for what, wrong in checks.items():
        if wrong.any():
            rows = wrong.reshape(len(wrong), -1).any(axis=1)
            yield f"{_ranges(rows)} of the rows have {what}"


def _ranges(filled: Bool[np.ndarray, " R"]) -> str:
    rows = np.flatnonzero(filled)
    return "none" if not rows.size else f"{rows.size} between {rows[0]} and {rows[-1]}"
