"""The stored rows of a store, and their values in its arrays."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from typing import SupportsIndex

import numpy as np
from jaxtyping import Bool, Int64, Shaped

from pipeline.core.arguments import shown
from pipeline.core.errors import ArgumentError, StoreError
from pipeline.store.format.block_table import BlockTable
from pipeline.store.format.layout import MIB, POSITIONS, SEGMENTS, SELECTED, SIDE_ARRAYS
from pipeline.store.format.scaled import dequantised, scale_name
from pipeline.store.read.rows import RunsRead, has_nonzero_positions
from pipeline.store.read.stored_objects import StoredObjects

BYTES_AHEAD = 256 * MIB  # reads of further arrays are started until this many bytes are being read

Rows = SupportsIndex | slice | Sequence[SupportsIndex] | np.ndarray


class StoredRows:
    """Reads rows of the committed `blocks`, which are in row order."""

    def __init__(self, objects: StoredObjects, blocks: BlockTable) -> None:
        self._storage = objects.storage
        self._layout = objects.layout
        self._arrays = objects.arrays
        self._blocks = blocks
        self._objects = objects

    @cached_property
    def _first_rows(self) -> Int64[np.ndarray, " blocks"]:
        return self._layout.first_row(self._blocks.column("stream"), self._blocks.column("block"))

    @cached_property
    def _num_rows(self) -> Int64[np.ndarray, " blocks"]:
        return self._blocks.column("rows")

    @cached_property
    def numbers(self) -> Int64[np.ndarray, " n"]:
        """The numbers of all stored rows, ascending."""
        return self.row_numbers(self._blocks)

    def row_numbers(self, blocks: BlockTable) -> Int64[np.ndarray, " n"]:
        """The numbers of the rows of the given blocks."""
        firsts, lengths = self._layout.first_row(blocks.column("stream"), blocks.column("block")), blocks.column("rows")
        starts = np.cumsum(lengths) - lengths
        return np.arange(lengths.sum()) + np.repeat(firsts - starts, lengths)

    def _are_stored(self, rows: Int64[np.ndarray, " n"]) -> Bool[np.ndarray, " n"]:
        if not len(self._first_rows):
            return np.zeros(len(rows), bool)
        block = np.searchsorted(self._first_rows, rows, side="right") - 1
        return (block >= 0) & (rows - self._first_rows[block] < self._num_rows[block])

    def chosen(self, rows: Rows) -> Int64[np.ndarray, " n"]:
        """The row numbers selected by an index. Raises StoreError for rows that are not stored."""
        if isinstance(rows, slice):
            end = int((self._first_rows + self._num_rows).max(initial=0))
            try:
                numbers = np.arange(*rows.indices(end), dtype=np.int64)
            except (TypeError, ValueError) as error:
                raise ArgumentError(f"rows is {shown(rows)}, expected a slice of integers.") from error
            return numbers[self._are_stored(numbers)]
        try:
            index = np.asarray(rows)
        except Exception as error:  # whatever a wrong object's conversion raises
            raise ArgumentError(f"rows is {shown(rows)}, expected row numbers.") from error
        if index.dtype == bool and index.shape == (self._num_rows.sum(),):
            return self.numbers[index]
        if index.ndim > 1 or (index.size and index.dtype.kind not in "iu"):
            raise StoreError(
                f"rows have the shape {list(index.shape)} and dtype {index.dtype}; expected a row number, a list of "
                f"them, a slice, or a mask of the {self._num_rows.sum()} rows of the store {self._storage.path}."
            )
        given, numbers = np.atleast_1d(index), np.atleast_1d(index).astype(np.int64)
        absent = given[(numbers != given) | ~self._are_stored(numbers)][:8].tolist()
        if absent:
            raise StoreError(f"rows {absent} are not in the store {self._storage.path}; `rows` lists those that are.")
        return numbers

    def activations(
        self, names: Sequence[str], rows: Int64[np.ndarray, " n"]
    ) -> Iterator[tuple[str, Shaped[np.ndarray, "n S D"]]]:
        """The names and values of activation arrays, dequantised if they are scaled. Raises StoreError."""
        scaled = bool(self._layout.scales)
        reads = self.reads([part for name in names for part in ([name, scale_name(name)] if scaled else [name])], rows)
        for name, values in reads:
            yield name, dequantised(values, next(reads)[1]) if scaled else values

    def read(self, name: str, rows: Int64[np.ndarray, " n"]) -> np.ndarray:
        """An array's rows as stored, [n, ...]. Raises StoreError if one is damaged or missing."""
        return next(self.reads([name], rows))[1]

    def reads(self, names: Sequence[str], rows: Int64[np.ndarray, " n"]) -> "ArrayReads":
        """Starts reading rows of several arrays, as stored. Raises StoreError if there is something other than a file
        at a store shard's path."""
        return ArrayReads(names, lambda name: RunsRead(self._arrays[name], rows), partial(self._finish, rows))

    def _finish(self, rows: Int64[np.ndarray, " n"], name: str, read: RunsRead) -> np.ndarray:
        """Waits for the values, and reads them again if they seem damaged. Raises StoreError."""
        started = [read]

        def read_once() -> np.ndarray:
            values = (started.pop() if started else RunsRead(self._arrays[name], rows)).wait()
            doubtful = rows[self._objects.are_doubtful(name, rows, values)]
            if len(doubtful):
                self._objects.require(name, doubtful[self._are_filled(name, doubtful)])
            return values

        return self._storage.retry_read(read_once)

    def _are_filled(self, name: str, rows: Int64[np.ndarray, " n"]) -> Bool[np.ndarray, " n"]:
        """Which rows of an array must have a value other than the fill value in their first chunk, unless a value
        happens to equal it."""
        if name == POSITIONS.name:  # all positions are 0 if every window of the row has one token
            return has_nonzero_positions(self.read(SEGMENTS.name, rows))
        if self._layout.selected is None or name in (spec.name for spec in SIDE_ARRAYS):
            return np.ones(len(rows), bool)
        if name == SELECTED.name:
            block = np.searchsorted(self._first_rows, rows, side="right") - 1
            return self._blocks[block].column("activations") > 0
        return self.read(SELECTED.name, rows)[:, 0] >= 0


class ArrayReads(Iterator[tuple[str, np.ndarray]]):
    """Iterates over the names and values of arrays, in order. The first reads start at once, up to BYTES_AHEAD.
    Raises StoreError if one fails."""

    def __init__(
        self,
        names: Iterable[str],
        start: Callable[[str], RunsRead],
        finish: Callable[[str, RunsRead], np.ndarray],
    ) -> None:
        self._names = deque(names)
        self._start, self._finish = start, finish
        self._started: deque[tuple[str, RunsRead]] = deque()
        self._start_some()

    def _start_some(self) -> None:
        while self._names and sum(read.num_bytes for _, read in self._started) < BYTES_AHEAD:
            name = self._names.popleft()
            self._started.append((name, self._start(name)))

    def __next__(self) -> tuple[str, np.ndarray]:
        if not self._started:
            raise StopIteration
        name, read = self._started.popleft()
        values = self._finish(name, read)
        self._start_some()
        return name, values


def is_one_row(rows: Rows) -> bool:
    return np.ndim(rows) == 0 and not isinstance(rows, slice)
