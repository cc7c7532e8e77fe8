"""The rows that a store holds, and the values that its arrays have in them."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import SupportsIndex

import numpy as np
import tensorstore as ts
from jaxtyping import Bool, Int64

from pipeline.core.errors import StoreError
from pipeline.store.format.block_table import BlockTable
from pipeline.store.format.int8 import dequantised, scale_name
from pipeline.store.format.layout import POSITIONS, SEGMENTS, SELECTED, SIDE_ARRAYS, StoreLayout
from pipeline.store.io.storage import Storage
from pipeline.store.read.rows import counts_positions, read_runs
from pipeline.store.read.stored_objects import StoredObjects

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
        before = np.cumsum(self._num_rows) - self._num_rows
        return np.arange(self._num_rows.sum()) + np.repeat(self._first_rows - before, self._num_rows)

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

    def activations(self, name: str, rows: Int64[np.ndarray, " n"]) -> np.ndarray:
        """[n, S, D], of int8 dequantised. Raises StoreError."""
        values = self.read(name, rows)
        return dequantised(values, self.read(scale_name(name), rows)) if self._layout.scales else values

    def read(self, name: str, rows: Int64[np.ndarray, " n"]) -> np.ndarray:
        """An array's rows as they are stored, [n, ...]. Raises StoreError where one is damaged or missing."""
        return self._storage.retry_read(lambda: self._read_once(name, rows))

    def _read_once(self, name: str, rows: Int64[np.ndarray, " n"]) -> np.ndarray:
        values = read_runs(self._arrays[name], rows)
        doubtful = rows[self._objects.are_doubtful(name, rows, values)]
        if len(doubtful):
            self._objects.require(name, doubtful[self._are_filled(name, doubtful)])
        return values

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


def is_one_row(rows: Rows) -> bool:
    return np.ndim(rows) == 0 and not isinstance(rows, slice)
