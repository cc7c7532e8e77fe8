"""Packing: which row and column of a block each piece of a document takes. Pure functions of lengths.

A piece is a window of one document, at most `length` tokens. A block takes a prefix of the stream's next pieces, so
nothing is reordered between blocks and the next block's start is simply the first piece that was not placed.

Shapes: P pieces, N tokens of these pieces, R rows of the block, T = length positions of a row.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int32, Int64

from pipeline.config.choices import LongDocuments


@dataclass(frozen=True)
class Placement:
    """Where the first P of the pieces go: `row`, first `column` and `segment` (from 1 in each row) of each."""

    row: Int64[np.ndarray, "P"]
    column: Int64[np.ndarray, "P"]
    segment: Int64[np.ndarray, "P"]
    num_rows: int

    @property
    def num_pieces(self) -> int:
        return len(self.row)


def windows(num_tokens: int, length: int, long_documents: LongDocuments, first: int = 0) -> list[tuple[int, int]]:
    """The half-open token ranges of a document's pieces, from token `first` (a multiple of `length`) on."""
    end = min(num_tokens, length) if long_documents is LongDocuments.cut else num_tokens
    return [(begin, min(begin + length, end)) for begin in range(first, end, length)]


def pad(sizes: Int64[np.ndarray, "P"], rows: int) -> Placement:
    """One piece per row, in stream order."""
    count = min(len(sizes), rows)
    return Placement(np.arange(count), np.zeros(count, np.int64), np.ones(count, np.int64), count)


def pack(
    sizes: Int64[np.ndarray, "P"],
    rows: int,
    length: int,
    costs: Int64[np.ndarray, "P"] | None = None,
    capacity: int | None = None,
) -> Placement:
    """As many of the pieces, in order, as best-fit decreasing can place in `rows` rows of `length` positions.

    The count is searched by bisection below the longest prefix whose tokens fit in total; the result depends on the
    arguments alone. Rows that one piece fills come first, in stream order, then the mixed rows by their first piece;
    within a row pieces keep the stream's order. Reading rows upward therefore meets each document's tokens in order.

    `costs` are what the pieces take of a row's `capacity`, where something besides their sizes must fit: a piece whose
    size is `length` costs `capacity`, and the sizes of pieces whose costs fit do too.
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


def _best_fit_decreasing(sizes: Int64[np.ndarray, "P"], rows: int, length: int) -> Int64[np.ndarray, "P"] | None:
    """The bin of each piece, or None if they do not all fit.

    Pieces of equal size are placed as one run: the fullest bin that still has room for one keeps being the fullest
    until it has none, so it takes as many as it can at once. `bins` holds (room, bin) as `room * rows + bin`, sorted.
    """
    lengths, counts = np.unique(sizes, return_counts=True)
    bins = [length * rows + row for row in range(rows)]
    chosen: list[int] = []
    taken: list[int] = []
    for size, count in zip(lengths[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while count:
            place = bisect_left(bins, size * rows)
            if place == len(bins):
                return None
            room, row = divmod(bins.pop(place), rows)
            run = min(count, room // size)
            insort(bins, (room - run * size) * rows + row)
            chosen.append(row)
            taken.append(run)
            count -= run
    result = np.empty(len(sizes), np.int64)
    result[np.argsort(-sizes, kind="stable")] = np.repeat(np.array(chosen, np.int64), taken)
    return result


def _ordered(
    sizes: Int64[np.ndarray, "P"], bins: Int64[np.ndarray, "P"], fills_row: Bool[np.ndarray, "P"]
) -> Placement:
    """Names the bins as rows in the documented order, and lays the pieces of each row side by side."""
    count = len(sizes)
    used, first, row_of = np.unique(bins, return_index=True, return_inverse=True)
    rank = np.empty(len(used), np.int64)
    rank[np.lexsort((first, ~fills_row[first]))] = np.arange(len(used))
    row = rank[row_of]

    order = np.argsort(row, kind="stable")
    starts = np.flatnonzero(np.diff(row[order], prepend=-1))
    members = np.diff(starts, append=count)
    before = np.cumsum(sizes[order]) - sizes[order]
    column, segment = np.empty(count, np.int64), np.empty(count, np.int64)
    column[order] = before - np.repeat(before[starts], members)
    segment[order] = np.arange(count) - np.repeat(starts, members) + 1
    return Placement(row, column, segment, len(used))


@dataclass(frozen=True)
class Rows:
    """The arrays of a block. Padding is 0, and -1 in `documents`."""

    tokens: Int32[np.ndarray, "R T"]
    segments: Int32[np.ndarray, "R T"]
    positions: Int32[np.ndarray, "R T"]
    documents: Int64[np.ndarray, "R T"]


def fill(
    placement: Placement, tokens: list[Int32[np.ndarray, "_"]], documents: Int64[np.ndarray, "P"], length: int
) -> Rows:
    """Writes the pieces' `tokens` and document numbers to their places. Positions restart at 0 in every piece."""
    sizes = np.array([len(piece) for piece in tokens], np.int64)
    first = np.cumsum(sizes) - sizes
    position = np.arange(sizes.sum()) - np.repeat(first, sizes)
    place = np.repeat(placement.row * length + placement.column, sizes) + position

    def scatter(values: np.ndarray, dtype: type, padding: int) -> np.ndarray:
        array = np.full((placement.num_rows, length), padding, dtype)
        array.reshape(-1)[place] = values
        return array

    return Rows(
        tokens=scatter(np.concatenate(tokens) if tokens else np.empty(0, np.int32), np.int32, 0),
        segments=scatter(np.repeat(placement.segment, sizes), np.int32, 0),
        positions=scatter(position, np.int32, 0),
        documents=scatter(np.repeat(documents, sizes), np.int64, -1),
    )
