"""The rows that a store holds, and the values that its arrays have in them."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import SupportsIndex

import numpy as np
import tensorstore as ts
from jaxtyping import Bool, Int64, Shaped

from pipeline.core.errors import StoreError
from pipeline.store.format.block_table import BlockTable
from pipeline.store.format.int8 import dequantised, scale_name
from pipeline.store.format.layout import MIB, POSITIONS, SEGMENTS, SELECTED, SIDE_ARRAYS, StoreLayout
from pipeline.store.io.storage import Storage
from pipeline.store.read.rows import RunsRead, counts_positions
from pipeline.store.read.stored_objects import StoredObjects

BYTES_AHEAD = 256 * MIB  # of arrays that are read at once, besides the last of them

Rows = SupportsIndex | slice | Sequence[SupportsIndex] | np.ndarray


class StoredRows:
    """Reads rows of the committed `blocks`, which are in the order of their rows."""

    def __init__(
        self,
        storage: Storage,
        layout: StoreLayout,
        arrays: Mapping[str, ts.TensorStore],
        blocks: BlockTable,
    ) -> None:
        self._storage = storage
        self._layout = layout
        self._arrays = arrays
        self._blocks = blocks
        self._objects = StoredObjects(storage, layout, arrays)

    @cached_property
    def _first_rows(self) -> Int64[np.ndarray, " blocks"]:
        return self._layout.first_row(self._blocks.column("stream"), self._blocks.column("block"))

    @cached_property
    def _num_rows(self) -> Int64[np.ndarray, " blocks"]:
        return self._blocks.column("rows")

    @cached_property
    def numbers(self) -> Int64[np.ndarray, " n"]:
        """The numbers of all stored rows, ascending."""
        return _ranges(self._first_rows, self._num_rows)

    def of_blocks(self, blocks: BlockTable) -> Int64[np.ndarray, " n"]:
        """The numbers of the rows of some blocks."""
        firsts = self._layout.first_row(blocks.column("stream"), blocks.column("block"))
        return _ranges(firsts, blocks.column("rows"))

    def _are_stored(self, rows: Int64[np.ndarray, " n"]) -> Bool[np.ndarray, " n"]:
        if not len(self._first_rows):
            return np.zeros(len(rows), bool)
        block = np.searchsorted(self._first_rows, rows, side="right") - 1
        return (block >= 0) & (rows - self._first_rows[block] < self._num_rows[block])

    def chosen(self, rows: Rows) -> Int64[np.ndarray, " n"]:
        """The numbers of the rows that a reader asks for. Raises StoreError for rows that are not stored."""
        if isinstance(rows, slice):
            end = int((self._first_rows + self._num_rows).max(initial=0))
            wanted = np.arange(*rows.indices(end), dtype=np.int64)
            return wanted[self._are_stored(wanted)]
        chosen = np.asarray(rows)
        if chosen.dtype == bool and chosen.shape == (self._num_rows.sum(),):
            return self.numbers[chosen]
        if chosen.ndim > 1 or (chosen.size and chosen.dtype.kind not in "iu"):
            raise StoreError(
                f"rows have the shape {list(chosen.shape)} and dtype {chosen.dtype}; expected a row number, a list of "
                f"them, a slice, or a mask of the {self._num_rows.sum()} rows of the store {self._storage.path}."
            )
        wanted = np.atleast_1d(chosen).astype(np.int64)
        absent = wanted[~self._are_stored(wanted)][:8].tolist()
        if absent:
            raise StoreError(f"rows {absent} are not in the store {self._storage.path}; `rows` lists those that are.")
        return wanted

    def activations(
        self, names: Sequence[str], rows: Int64[np.ndarray, " n"]
    ) -> Iterator[tuple[str, Shaped[np.ndarray, "n S D"]]]:
        """Arrays of activations by name, of int8 dequantised. Raises StoreError."""
        scaled = bool(self._layout.scales)
        reads = self.reads([part for name in names for part in ([name, scale_name(name)] if scaled else [name])], rows)
        for name, values in reads:
            yield name, dequantised(values, next(reads)[1]) if scaled else values

    def read(self, name: str, rows: Int64[np.ndarray, " n"]) -> np.ndarray:
        """An array's rows as they are stored, [n, ...]. Raises StoreError where one is damaged or missing."""
        return next(self.reads([name], rows))[1]

    def reads(self, names: Sequence[str], rows: Int64[np.ndarray, " n"]) -> "ArrayReads":
        """Starts reading several arrays' rows as they are stored. Raises StoreError where something else than a file
        is in the place of a store shard."""
        return ArrayReads(names, lambda name: RunsRead(self._arrays[name], rows), partial(self._finish, rows))

    def _finish(self, rows: Int64[np.ndarray, " n"], name: str, read: RunsRead) -> np.ndarray:
        """The values that were read, or those that are read again. Raises StoreError."""
        under_way = [read]

        def read_once() -> np.ndarray:
            values = (under_way.pop() if under_way else RunsRead(self._arrays[name], rows)).wait()
            doubtful = rows[self._objects.are_doubtful(name, rows, values)]
            if len(doubtful):
                self._objects.require(name, doubtful[self._are_filled(name, doubtful)])
            return values

        return self._storage.retry_read(read_once)

    def _are_filled(self, name: str, rows: Int64[np.ndarray, " n"]) -> Bool[np.ndarray, " n"]:
        """Which rows of an array begin with a token, a selected token or an activation."""
        if name == POSITIONS.name:  # all positions are 0 where every window of the row has one token
            return counts_positions(self.read(SEGMENTS.name, rows))
        if self._layout.selected is None or name in (spec.name for spec in SIDE_ARRAYS):
            return np.ones(len(rows), bool)
        if name == SELECTED.name:
            block = np.searchsorted(self._first_rows, rows, side="right") - 1
            return self._blocks[block].column("activations") > 0
        return self.read(SELECTED.name, rows)[:, 0] >= 0


class ArrayReads(Iterator[tuple[str, np.ndarray]]):
    """Names and values of arrays, in order. As many reads are under way as memory allows, before the first is asked
    for; raises StoreError where one fails."""

    def __init__(
        self,
        names: Iterable[str],
        start: Callable[[str], RunsRead],
        finish: Callable[[str, RunsRead], np.ndarray],
    ) -> None:
        self._names = deque(names)
        self._start, self._finish = start, finish
        self._under_way: deque[tuple[str, RunsRead]] = deque()
        self._start_some()

    def _start_some(self) -> None:
        while self._names and sum(read.num_bytes for _, read in self._under_way) < BYTES_AHEAD:
            name = self._names.popleft()
            self._under_way.append((name, self._start(name)))

    def __next__(self) -> tuple[str, np.ndarray]:
        if not self._under_way:
            raise StopIteration
        name, read = self._under_way.popleft()
        values = self._finish(name, read)
        self._start_some()
        return name, values


def _ranges(firsts: Int64[np.ndarray, " k"], lengths: Int64[np.ndarray, " k"]) -> Int64[np.ndarray, " n"]:
    """Numbers in ranges of some lengths, one range after the other."""
    before = np.cumsum(lengths) - lengths
    return np.arange(lengths.sum()) + np.repeat(firsts - before, lengths)


def is_one_row(rows: Rows) -> bool:
    return np.ndim(rows) == 0 and not isinstance(rows, slice)
