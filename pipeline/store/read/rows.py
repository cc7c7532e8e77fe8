"""The stored rows of a store, their values in its arrays, and the slots of selected tokens.

Shapes: R rows, T positions per row, S slots per row for activations, K slots per row for selected tokens (unused slots
are -1 in `selected`).
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import SupportsIndex

import numpy as np
from jaxtyping import Bool, Int32, Int64, Shaped

from pipeline.core.errors import ArgumentError, StoreError, StoreInvalid
from pipeline.core.messages import shown
from pipeline.store.format.block_table import BlockTable
from pipeline.store.format.layout import SELECTED, SIDE_ARRAYS, dequantised, scale_name
from pipeline.store.io.failures import DAMAGE_REMEDY
from pipeline.store.read.shard_reads import ShardReads

Rows = SupportsIndex | slice | Sequence[SupportsIndex] | np.ndarray


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
        if index.ndim > 1 or (index.size and index.dtype.kind not in "iu"):
            raise StoreError(
                f"rows have the shape {list(index.shape)} and dtype {index.dtype}; expected a row number of the store "
                f"{self._reads.storage.path}, a list of them, or a slice. For a mask, use store.rows[mask]."
            )
        given, numbers = np.atleast_1d(index), np.atleast_1d(index).astype(np.int64)
        absent = given[(numbers != given) | ~self._are_stored(numbers)][:8].tolist()
        if absent:
            path = self._reads.storage.path
            raise StoreError(f"rows {absent} are not in the store {path}; `rows` lists those that are.")
        return numbers

    def read(
        self, names: Sequence[str], rows: Int64[np.ndarray, " n"], slots: Int64[np.ndarray, " n"] | None = None
    ) -> dict[str, np.ndarray]:
        """The values of arrays by name, of rows in any order, [n, S, ...], or of one slot of each, [n, ...]. Scaled
        activations are dequantised. Raises StoreError if one is damaged or missing."""
        scales = {spec.name for spec in self._layout.scales} & set(map(scale_name, names))
        values, reads = {}, []
        for name in dict.fromkeys((*names, *scales)):
            row = self._reads.memory(name, 1)
            num_slots, *sizes = row.shape[1:]
            wanted = rows[:, None] * num_slots + (np.arange(num_slots) if slots is None else slots[:, None])
            out = np.empty((wanted.size, *sizes), row.dtype)
            reads += self._reads.start_slots(name, wanted.ravel(), out)
            values[name] = out if slots is not None else out.reshape(len(rows), num_slots, *sizes)
        for read in (*reads, self._reads.start_check()):
            read.result()
        for name in (name for name in dict.fromkeys(names) if scale_name(name) in scales):
            values[name] = dequantised(values[name], values.pop(scale_name(name)))
        return values


def is_one_row(rows: Rows) -> bool:
    return np.ndim(rows) == 0 and not isinstance(rows, slice)


def slot_side_arrays(sides: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The side arrays at the slots for activations: unchanged [R, T, ...], or [R, K, ...] at `selected` if it is among
    them."""
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
    values: Shaped[np.ndarray, "R T *k"], selected: Int32[np.ndarray, "R K"], fill: int
) -> Shaped[np.ndarray, "R K *k"]:
    """The values at the selected positions, and `fill` in unused slots. Raises StoreInvalid for other positions."""
    require_positions(selected, values.shape[1])
    selected_values = values[np.arange(len(values))[:, None], np.maximum(selected, 0)]
    selected_values[selected < 0] = fill
    return selected_values
