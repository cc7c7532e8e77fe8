"""Checks of the records, side arrays, documents, activations, outputs and features of a block.

These are pure functions. Each yields a message for everything that is wrong. Shapes: R rows per block, T positions per
row, K slots per row for selected tokens, S slots per row for activations (T or K), D features per activation.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Float32, Int32, Int64, Shaped

from pipeline.store.format.block_table import BlockTable
from pipeline.store.format.commits import CommitRecord
from pipeline.store.format.statistics import Statistics

_EXPONENT_ONES = {"bfloat16": 0x7F80, "float16": 0x7C00}
_WITHOUT_SIGN = 0x7FFF

# How far statistics that were summed in float32, in a different order, may differ.
_RELATIVE = 1e-3


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


def check_tiling(tables: Sequence[pa.Table], last: CommitRecord, num_streams: int) -> Iterator[str]:
    """In one stream's tables, in block order, the token ranges of each document are contiguous.

    They reach from 0 to the document's end, unless the stream's next block continues the document or it is in a
    truncated block.
    """
    table = pa.concat_tables([t.select(["document", "first_token", "last_token", "n_tokens", "n_cut"]) for t in tables])
    document, first, stop, num_tokens, num_cut = (column.to_numpy() for column in table.columns)
    block = np.repeat(np.arange(len(tables)), [t.num_rows for t in tables])
    order = np.lexsort((block, document))
    document, first, stop, block = document[order], first[order], stop[order], block[order]
    end = (num_tokens - num_cut)[order]
    is_start = np.diff(document, prepend=-1) != 0
    is_end = np.diff(document, append=-1) != 0
    expected_first = np.where(is_start, 0, np.roll(stop, 1))
    for k in np.flatnonzero(first != expected_first)[:5]:
        yield f"document {document[k]}: starts at token {first[k]} in block {block[k]}, expected {expected_first[k]}"
    next_document = last.next["ordinal"] * num_streams + last.stream
    may_end_early = (block == len(tables) - 1) & last.truncated
    end = np.where((document == next_document) & ~may_end_early & (last.next["token"] > 0), last.next["token"], end)
    for k in np.flatnonzero(is_end & (stop != end) & ~(may_end_early & (stop < end)))[:5]:
        yield f"document {document[k]}: ends at token {stop[k]}, expected {end[k]}"


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


def check_statistics(stored: Statistics, computed: Statistics, flushed: float = 0.0) -> Iterator[str]:
    """Stored statistics agree, except for rounding, with those computed from the values or from the blocks.

    The devices sum rows in float32, in a different order, and treat values below `flushed` as zeros.
    """
    for name in ("count", "not_finite", "num_active"):
        if getattr(stored, name) != getattr(computed, name):
            yield f"{name} is {getattr(stored, name)} in the stored statistics, {getattr(computed, name)} in the values"
            return
    if stored.mean.shape != computed.mean.shape:
        yield f"the stored statistics have {stored.mean.size} features, the values {computed.mean.size}"
        return
    for name in ("fired", "maximum"):
        if not np.array_equal(getattr(stored, name), getattr(computed, name)):
            yield f"{name} of the stored statistics does not agree with the values"
            return
    with np.errstate(over="ignore", invalid="ignore"):  # squares beyond float32 agree if both are
        count, deviation = max(computed.count, 1), np.sqrt(computed.variance)
        size = np.abs(computed.mean) + deviation
        flushed_norms = count * flushed * np.sqrt(computed.mean.size)
        rounding = count * (np.square(_RELATIVE * size) + flushed * (2 * deviation + flushed))
        wrong = {
            "squared error": stored.fired is not None and _differ(stored.squared_error, computed.squared_error),
            "sum of cosines": _differ(stored.cosine_sum, computed.cosine_sum),
            "mean": np.abs(stored.mean - computed.mean) > _RELATIVE * size + flushed,
            "variance": np.abs(stored.m2 - computed.m2) > rounding + 10 * _RELATIVE * computed.m2,
            "sum of norms": abs(stored.norm_sum - computed.norm_sum) > _RELATIVE * computed.norm_sum + flushed_norms,
            "histogram of norms": flushed_norms < _RELATIVE * computed.norm_sum
            and _is_shifted(stored.norm_histogram, computed.norm_histogram),
        }
    for what, is_wrong in wrong.items():
        if np.any(is_wrong):
            features = f" in {np.count_nonzero(is_wrong)} features" if np.ndim(is_wrong) else ""
            yield f"the {what} of the stored statistics does not agree with the values{features}"


def _differ(stored: float | None, computed: float | None) -> bool:
    """Whether two sums differ by more than rounding."""
    if stored is None or computed is None:
        return stored is not computed
    return abs(stored - computed) > _RELATIVE * abs(computed)


def _is_shifted(stored: Int64[np.ndarray, " bins"], computed: Int64[np.ndarray, " bins"]) -> bool:
    """Whether norms differ by more than one bin. By one bin they may, since all may be at a bin's edge."""
    below, at_most = np.cumsum(stored), np.cumsum(computed)
    return bool((below[1:] < at_most[:-1]).any() or (below[:-1] > at_most[1:]).any())


def check_padding(values: np.ndarray, valid: Bool[np.ndarray, "R S"]) -> Iterator[str]:
    """Activations [R, S, D] are zero where there is no token."""
    padding = values[~valid]
    if padding.dtype.itemsize == 2:
        padding = np.bitwise_and(padding.view(np.uint16), _WITHOUT_SIGN)
    if padding.any():
        yield "is not zero in padding"


def next_in_window(segments: Int32[np.ndarray, "R T"]) -> Bool[np.ndarray, "R T"]:
    """Whether the next position holds a token of the same document window."""
    has_next = np.zeros(segments.shape, bool)
    has_next[:, :-1] = (segments[:, 1:] == segments[:, :-1]) & (segments[:, :-1] > 0)
    return has_next


def check_output(
    values: Float32[np.ndarray, "R S k"],
    valid: Bool[np.ndarray, "R S"],
    is_defined: Bool[np.ndarray, "R S"],
    may_be_not_finite: bool,
) -> Iterator[str]:
    """An array of `capture.outputs` is finite where `is_defined`, and NaN for other tokens. Log-probabilities of the
    likeliest tokens are in descending order."""
    bad = ~np.isfinite(values[is_defined]).all(axis=1)
    if bad.any() and not may_be_not_finite:
        yield f"{bad.sum()} tokens have non-finite values"
    if not np.isnan(values[valid & ~is_defined]).all():
        yield "is not NaN for every token without a next token in its window"
    if (np.diff(values, axis=2) > 0).any():
        yield "the log-probabilities of a token are not in descending order"


def check_ids(ids: Int32[np.ndarray, "R S k"], vocab_size: int | None) -> Iterator[str]:
    """The likeliest tokens are in the vocabulary."""
    bad = (ids < 0) | (ids >= (vocab_size or np.inf))
    if bad.any():
        yield f"{bad.sum()} ids are outside the vocabulary of {vocab_size}"


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


def check_reconstruction(
    parts: Mapping[str, Float32[np.ndarray, "R S"]], valid: Bool[np.ndarray, "R S"], may_be_not_finite: bool
) -> Iterator[tuple[str, str]]:
    """The measures of an SAE's reconstruction are in range. Yields the name of the wrong part, and a message."""
    for part, least, most in (("squared_error", 0, np.inf), ("cosine", -1 - _RELATIVE, 1 + _RELATIVE)):
        values = parts[part]
        yield from ((part, what) for what in check_padding(values, valid))
        if not may_be_not_finite and not np.isfinite(values).all():
            yield part, f"{np.count_nonzero(~np.isfinite(values))} tokens have non-finite values"
        elif ((values < least) | (values > most)).any():
            yield part, f"has values outside {least:g} to {most:g}"


def _ranges(filled: Bool[np.ndarray, " R"]) -> str:
    rows = np.flatnonzero(filled)
    return "none" if not rows.size else f"{rows.size} between {rows[0]} and {rows[-1]}"
