"""Packing: the row and column of a block for each piece of a document. Pure functions of lengths.

A piece is a window of one document, at most `length` tokens. A block takes a prefix of the stream's next pieces, so
pieces are never reordered between blocks, and the next block starts at the first piece that was not placed.

Shapes: P pieces, R rows of the block, T = length positions per row.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from jaxtyping import Bool, Int16, Int32, Int64


@dataclass(frozen=True)
class Placement:
    """The positions of the first P pieces. row, column: of each piece's first token. segment: from 1 in each row.
    is_joined: the pieces of a row are one text, with one segment; positions restart with rows, not with pieces."""

    row: Int64[np.ndarray, "P"]
    column: Int64[np.ndarray, "P"]
    segment: Int64[np.ndarray, "P"]
    num_rows: int
    is_joined: bool = False

    @property
    def num_pieces(self) -> int:
        return len(self.row)


def windows(num_tokens: int, length: int, column: int = 0, overlap: int = 0) -> list[tuple[int, int]]:
    """The half-open token ranges of the pieces of a document that begins at `column` of its row. overlap: tokens before
    each range but the first that its window has, too."""
    later = range(length - column, num_tokens, length - overlap)
    return [*pairwise([0, *later, num_tokens])] if num_tokens else []


def pad(sizes: Int64[np.ndarray, "P"], rows: int) -> Placement:
    """One piece per row, in stream order."""
    count = min(len(sizes), rows)
    return Placement(np.arange(count), np.zeros(count, np.int64), np.ones(count, np.int64), count)


def join(sizes: Int64[np.ndarray, "P"], rows: int, length: int) -> Placement:
    """One piece after another, in stream order. Their sizes are such that none crosses the end of a row."""
    starts = np.cumsum(sizes) - sizes
    starts = starts[starts < rows * length]
    row, column = np.divmod(starts, length)
    return Placement(row, column, np.ones(len(row), np.int64), len(np.unique(row)), is_joined=True)


def pack(
    sizes: Int64[np.ndarray, "P"],
    rows: int,
    length: int,
    costs: Int64[np.ndarray, "P"] | None = None,
    capacity: int | None = None,
) -> Placement:
    """Places as many of the pieces, in order, as best-fit decreasing fits into `rows` rows of `length` positions.

    Their number is found by bisection, below the longest prefix whose tokens fit in total. The result only depends on
    the arguments. Rows filled by one piece come first, in stream order, followed by mixed rows in the order of their
    first pieces. Within a row, pieces are in stream order. So a document's tokens are in order of rows and positions if
    all its pieces but the last fill a row.

    costs, capacity: how much of a row's capacity each piece takes, if not only sizes must fit. A piece of size `length`
    must cost `capacity`, and pieces whose costs fit must have sizes that fit.
    """
    costs, capacity = (sizes, length) if costs is None else (costs, capacity)
    too_many = int(np.searchsorted(np.cumsum(costs), rows * capacity, side="right"))
    count, bins = too_many, _best_fit_decreasing(costs[:too_many], rows, capacity)
    if bins is None:
        count, bins = 0, np.empty(0, np.int64)
        while too_many - count > 1:
            middle = (count + too_many) // 2
            attempt = _best_fit_decreasing(costs[:middle], rows, capacity)
            if attempt is None:
                too_many = middle
            else:
                count, bins = middle, attempt
    return _ordered(sizes[:count], bins, costs[:count] == capacity)


def pack_in_order(sizes: Int64[np.ndarray, "P"], rows: int, costs: Int64[np.ndarray, "P"], capacity: int) -> Placement:
    """As `pack`, but each piece that does not fit begins the next row: pieces are in order of rows and columns. For
    documents that have several short pieces, whose order `pack` does not keep."""
    bins, row, room = [], -1, 0
    for cost in costs.tolist():
        if cost > room:
            row, room = row + 1, capacity
        if row == rows:
            break
        bins.append(row)
        room -= cost
    return _ordered(sizes[: len(bins)], np.array(bins, np.int64), np.zeros(len(bins), bool))


def _best_fit_decreasing(sizes: Int64[np.ndarray, "P"], rows: int, length: int) -> Int64[np.ndarray, "P"] | None:
    """The bin of each piece, or None if they do not all fit. `bins` has the sorted values `room * rows + bin`."""
    bins = [length * rows + row for row in range(rows)]
    result = np.empty(len(sizes), np.int64)
    order = np.argsort(-sizes, kind="stable")
    for piece, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        fullest = bisect_left(bins, size * rows)  # of those with room for the piece
        if fullest == len(bins):
            return None
        room, row = divmod(bins.pop(fullest), rows)
        insort(bins, (room - size) * rows + row)
        result[piece] = row
    return result


def _ordered(
    sizes: Int64[np.ndarray, "P"], bins: Int64[np.ndarray, "P"], fills_row: Bool[np.ndarray, "P"]
) -> Placement:
    """Numbers the bins as rows, in the order documented in `pack`, and arranges the pieces of each row."""
    count = len(sizes)
    used, first, bin_index = np.unique(bins, return_index=True, return_inverse=True)
    rank = np.empty(len(used), np.int64)
    rank[np.lexsort((first, ~fills_row[first]))] = np.arange(len(used))
    row = rank[bin_index]

    order = np.argsort(row, kind="stable")
    starts = np.flatnonzero(np.diff(row[order], prepend=-1))
    row_pieces = np.diff(starts, append=count)
    offsets = np.cumsum(sizes[order]) - sizes[order]
    column, segment = np.empty(count, np.int64), np.empty(count, np.int64)
    column[order] = offsets - np.repeat(offsets[starts], row_pieces)
    segment[order] = np.arange(count) - np.repeat(starts, row_pieces) + 1
    return Placement(row, column, segment, len(used))


def fill(
    placement: Placement,
    tokens: list[Int32[np.ndarray, "_"]],
    documents: Int64[np.ndarray, "P"],
    length: int,
    labels: Sequence[Int16[np.ndarray, "_ 5"]] = (),
    contexts: Sequence[int] = (),
) -> dict[str, np.ndarray | None]:
    """The arrays of a `TokenBlock` with the given pieces, by name; padding is 0, and -1 in `documents`. tokens: of each
    piece. documents: each piece's document number. labels: of each piece, or none. contexts: how many of each piece's
    tokens, its first, are of no document; or none. Positions restart at 0 in every piece, or with joined pieces in
    every row."""
    sizes = np.array([len(piece) for piece in tokens], np.int64)
    first = np.cumsum(sizes) - sizes
    position = np.arange(sizes.sum()) - np.repeat(first, sizes)
    slot = np.repeat(placement.row * length + placement.column, sizes) + position
    numbers = np.repeat(documents, sizes)
    if any(contexts):
        numbers[position < np.repeat(contexts, sizes)] = -1
    if placement.is_joined:
        position += np.repeat(placement.column, sizes)

    def scatter(values: np.ndarray, dtype: type, padding: int) -> np.ndarray:
        array = np.full((placement.num_rows, length, *values.shape[1:]), padding, dtype)
        array.reshape(-1, *values.shape[1:])[slot] = values
        return array

    return {
        "tokens": scatter(np.concatenate(tokens) if tokens else np.empty(0, np.int32), np.int32, 0),
        "segments": scatter(np.repeat(placement.segment, sizes), np.int32, 0),
        "positions": scatter(position, np.int32, 0),
        "documents": scatter(numbers, np.int64, -1),
        "labels": scatter(np.concatenate(labels), np.int16, 0) if labels else None,
    }
