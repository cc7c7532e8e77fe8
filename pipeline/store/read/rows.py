"""The stored rows of a store, their values in its arrays, and the slots of selected tokens.

Shapes: R rows, T positions per row, S slots per row for activations, K slots per row for selected tokens (unused slots
are -1 in `selected`).
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property
from typing import NamedTuple, SupportsIndex

import numpy as np
from jaxtyping import Bool, Int32, Int64, Shaped

from pipeline.core.arguments import shown
from pipeline.core.errors import ArgumentError, StoreError, StoreInvalid
from pipeline.store.format.block_table import BlockTable
from pipeline.store.format.layout import MIB, SELECTED, SIDE_ARRAYS
from pipeline.store.format.scaled import dequantised, scale_name
from pipeline.store.io.failures import DAMAGE_REMEDY
from pipeline.store.read.shard_reads import ShardReads

BYTES_AHEAD = 256 * MIB  # reads of further arrays are started until this many bytes are being read

Rows = SupportsIndex | slice | Sequence[SupportsIndex] | np.ndarray


class StartedRead(NamedTuple):
    """Values that are being read."""

    values: np.ndarray
    reads: Sequence[Future[object]]

    def wait(self) -> np.ndarray:
        """The values. Raises StoreError."""
        for read in self.reads:
            read.result()
        return self.values


class StoredRows:
    """Reads rows of the committed `blocks`, which are in row order."""

    def __init__(self, reads: ShardReads, blocks: BlockTable) -> None:
        self._reads = reads
        self._layout = reads.layout
        self._blocks = blocks

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

    @property
    def end(self) -> int:
        """How many rows the arrays have: up to the last committed block's last."""
        return int((self._first_rows + self._layout.rows_per_block).max(initial=0))

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
            last = int((self._first_rows + self._num_rows).max(initial=0))
            try:
                numbers = np.arange(*rows.indices(last), dtype=np.int64)
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
                f"them, a slice, or a mask of the {self._num_rows.sum()} rows of the store {self._path}."
            )
        given, numbers = np.atleast_1d(index), np.atleast_1d(index).astype(np.int64)
        absent = given[(numbers != given) | ~self._are_stored(numbers)][:8].tolist()
        if absent:
            raise StoreError(f"rows {absent} are not in the store {self._path}; `rows` lists those that are.")
        return numbers

    @property
    def _path(self) -> str:
        return self._reads.storage.path

    def activations(
        self, names: Sequence[str], rows: Int64[np.ndarray, " n"]
    ) -> Iterator[tuple[str, Shaped[np.ndarray, "n S D"]]]:
        """The names and values of activation arrays, dequantised if they are scaled. Raises StoreError."""
        return self._dequantised(self.reads(self._with_scales(names), rows))

    def _with_scales(self, names: Sequence[str]) -> list[str]:
        scaled = bool(self._layout.scales)
        return [part for name in names for part in ([name, scale_name(name)] if scaled else [name])]

    def _dequantised(self, arrays: Iterator[tuple[str, np.ndarray]]) -> Iterator[tuple[str, np.ndarray]]:
        for name, values in arrays:
            yield name, dequantised(values, next(arrays)[1]) if self._layout.scales else values

    def read(self, name: str, rows: Int64[np.ndarray, " n"]) -> np.ndarray:
        """An array's rows as stored, [n, ...]. Raises StoreError if one is damaged or missing."""
        [(_, values)] = self.reads([name], rows)
        return values

    def reads(self, names: Sequence[str], rows: Int64[np.ndarray, " n"]) -> Iterator[tuple[str, np.ndarray]]:
        """The names of arrays and their rows as stored, in order; up to BYTES_AHEAD are read ahead. Raises
        StoreError."""
        started: deque[tuple[str, StartedRead]] = deque()
        for name in names:
            started.append((name, self.start(name, rows)))
            while sum(read.values.nbytes for _, read in started) > BYTES_AHEAD:
                name, read = started.popleft()
                yield name, read.wait()
        if not names:
            return
        check = self._reads.start_check()
        for name, read in started:
            values = read.wait()
            check.result()
            yield name, values
        check.result()

    def start(self, name: str, rows: Int64[np.ndarray, " n"]) -> StartedRead:
        """Starts reading an array's rows, in any order."""
        out = self._reads.memory(name, len(rows))
        starts = np.flatnonzero(np.diff(rows, prepend=np.iinfo(np.int64).min) != 1)  # of runs of consecutive rows
        stops = np.append(starts, len(rows))[1:]
        runs = zip(starts.tolist(), stops.tolist(), strict=True)
        parts = (self._reads.start(name, int(rows[start]), out[start:stop]) for start, stop in runs)
        return StartedRead(out, [read for part in parts for read in part])

    def tokens(
        self, names: Sequence[str], rows: Int64[np.ndarray, " n"], slots: Int64[np.ndarray, " n"]
    ) -> Iterator[tuple[str, Shaped[np.ndarray, "n D"]]]:
        """The names of activation arrays, and their values in one slot of each row. Raises StoreError."""
        numbers = rows * self._layout.slots + slots
        started = []
        for name in self._with_scales(names):
            out = self._reads.memory(name, 1)
            out = np.empty((len(rows), *out.shape[2:]), out.dtype)
            started.append((name, StartedRead(out, self._reads.start_slots(name, numbers, out))))
        check = self._reads.start_check()
        yield from self._dequantised((name, read.wait()) for name, read in started)
        check.result()


def is_one_row(rows: Rows) -> bool:
    return np.ndim(rows) == 0 and not isinstance(rows, slice)


def slot_side_arrays(sides: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The side arrays at the slots for activations: unchanged [R, T], or [R, K] at `selected` if it is among them."""
    sides = dict(sides)
    selected = sides.pop(SELECTED.name, None)
    if selected is None:
        return sides
    fills = {spec.name: spec.fill for spec in SIDE_ARRAYS}
    return {name: at_selected(values, selected, fills.get(name, 0)) for name, values in sides.items()}


def require_positions(selected: Int32[np.ndarray, "R K"], length: int) -> None:
    """Raises StoreInvalid unless the selected positions are in rows of this length."""
    if selected.size and not -1 <= selected.min() <= selected.max() < length:
        raise StoreInvalid(
            f"{SELECTED.name} has positions from {selected.min()} to {selected.max()}, expected -1 to {length - 1}. "
            f"{DAMAGE_REMEDY}"
        )


def at_selected(
    values: Shaped[np.ndarray, "R T"], selected: Int32[np.ndarray, "R K"], fill: int
) -> Shaped[np.ndarray, "R K"]:
    """The values at the selected positions, and `fill` in unused slots. Raises StoreInvalid for other positions."""
    require_positions(selected, values.shape[1])
    selected_values = np.take_along_axis(values, np.maximum(selected, 0), axis=1)
    return np.where(selected >= 0, selected_values, np.array(fill, values.dtype))
