"""Reads pieces of blocks into the memory from which batches are gathered."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Int64, Shaped

from pipeline.store.format.block_table import BlockTable
from pipeline.store.format.layout import DOCUMENTS, MIB, POSITIONS, SEGMENTS, SELECTED, SIDE_ARRAYS
from pipeline.store.format.tables import read_tables
from pipeline.store.generated.completions import completion_slots
from pipeline.store.read.filters import COMPLETIONS, TokenFilter
from pipeline.store.read.gathering import TokenMemory
from pipeline.store.read.order import Buffer, ReadingOrder
from pipeline.store.read.rows import (
    ReadsAhead,
    RowRead,
    has_nonzero_positions,
    has_plain_chunks,
    require_selected,
    slot_side_arrays,
)
from pipeline.store.read.stored_objects import StoredObjects

# If tokens are selected, side arrays of all positions are read, this much at a time, and reduced to the selected ones.
WHOLE_MIB = 64.0

FILES_AT_ONCE = 4  # threads that read local store shards


class StoredBlocks:
    """The committed blocks of a store, and the side arrays of the current window's blocks."""

    def __init__(self, objects: StoredObjects, blocks: BlockTable) -> None:
        self._storage = objects.storage
        self.layout = objects.layout
        self.arrays = objects.arrays
        self.blocks = blocks
        self._objects = objects
        self._plain = frozenset(name for name, array in self.arrays.items() if has_plain_chunks(array))
        self._threads = ThreadPoolExecutor(FILES_AT_ONCE, thread_name_prefix="read") if self._plain else None
        # By block: its window, and side arrays [rows, slots] by name.
        self._side_arrays: dict[int, tuple[int, dict[str, np.ndarray]]] = {}

    def fill(self, memory: TokenMemory, buffer: Buffer, order: ReadingOrder, token_filter: TokenFilter) -> None:
        """Waits until no task uses the memory, then reads the buffer's pieces into it. Raises StoreError."""
        memory.wait_for_users()
        self._storage.retry_read(lambda: self._fill(memory, buffer, order, token_filter))

    def _fill(self, memory: TokenMemory, buffer: Buffer, order: ReadingOrder, token_filter: TokenFilter) -> None:
        row_numbers: list[np.ndarray] = []
        row, file_threads = 0, self._threads  # those of a reader that is closed meanwhile accept no more reads
        with ReadsAhead(self._storage.is_remote) as reads:
            for piece in buffer.pieces:
                first = self._first_row(piece.block) + piece.first
                for name, target in memory.targets.items():
                    threads = file_threads if name in self._plain else None
                    reads.add(RowRead(self.arrays[name], first, target[row : row + piece.num_rows], threads))
                row_numbers.append(np.arange(first, first + piece.num_rows))
                row += piece.num_rows
            completions = {COMPLETIONS: np.empty((row, self.layout.slots), bool)}
            arrays = memory.side_arrays | completions
            names = list(dict.fromkeys((*memory.side_arrays, *token_filter.side_arrays)))
            side_arrays = self._pieces_side_arrays(buffer, names)  # while activations are being read
            for name in names:
                np.concatenate([sides[name] for sides in side_arrays], out=arrays[name][:row])
            slots = memory.chosen(token_filter, row, completions)
            reads.wait()
        has_any = memory.side_arrays["segments"][:row, 0] > 0
        for name, target in memory.targets.items():
            self._require(name, np.concatenate(row_numbers), target[:row], has_any)
        memory.order = order.shuffled(buffer, memory.within_norms(token_filter, slots))

    def close(self) -> None:
        """Ends the threads after their current reads."""
        if self._threads is not None:
            threads, self._threads = self._threads, ThreadPoolExecutor(FILES_AT_ONCE, thread_name_prefix="read")
            threads.shutdown(wait=False)

    def _first_row(self, block: int) -> int:
        return self.layout.first_row(*self.blocks[block][:2])

    def _require(
        self,
        name: str,
        rows: Int64[np.ndarray, " n"],
        values: Shaped[np.ndarray, "n ..."],
        filled: Bool[np.ndarray, " n"] | None = None,
    ) -> None:
        """Raises StoreInvalid if an object with some of an array's `rows` is missing, which Zarr reads as fill values.
        `filled`: which rows have a value in their first slot; None for all."""
        doubtful = self._objects.are_doubtful(name, rows, values)
        self._objects.require(name, rows[doubtful if filled is None else doubtful & filled])

    def _pieces_side_arrays(self, buffer: Buffer, names: Sequence[str]) -> list[dict[str, np.ndarray]]:
        """See `read_side_arrays`, for each of the buffer's pieces. Drops the arrays of earlier windows."""
        oldest = min(piece.window for piece in buffer.pieces)
        kept = {b: (window, values) for b, (window, values) in self._side_arrays.items() if window >= oldest}
        missing = {piece.block: piece.window for piece in buffer.pieces if piece.block not in kept}
        read = self.read_side_arrays(list(missing), names)
        # An interrupted reader starts again while its last buffer may still be read in another thread.
        sides = kept | {b: (missing[b], values) for b, values in zip(missing, read, strict=True)}
        self._side_arrays = sides
        return [
            {name: side[p.first : p.first + p.num_rows] for name, side in sides[p.block][1].items()}
            for p in buffer.pieces
        ]

    def read_side_arrays(self, blocks: Sequence[int], names: Sequence[str]) -> list[dict[str, np.ndarray]]:
        """Side arrays, outputs and `COMPLETIONS` of the given blocks, at the slots for activations: [rows, slots] or
        [rows, slots, k] by name.

        Raises StoreError if an array is damaged or missing, and for `COMPLETIONS` in a store without them.
        """
        blocks_at_once = len(blocks) or 1
        if self.layout.selected is not None:
            row_bytes = sum(spec.position_bytes for spec in SIDE_ARRAYS) * self.layout.length
            blocks_at_once = max(1, int(WHOLE_MIB * MIB / (row_bytes * self.layout.rows_per_block)))
        parts = (blocks[start : start + blocks_at_once] for start in range(0, len(blocks), blocks_at_once))
        read = (self._storage.retry_read(lambda part=part: self._read_side_arrays(part, names)) for part in parts)
        return [sides for part in read for sides in part]

    def _read_side_arrays(self, blocks: Sequence[int], names: Sequence[str]) -> list[dict[str, np.ndarray]]:
        arrays = [name for name in names if name != COMPLETIONS]
        if COMPLETIONS in names and DOCUMENTS.name not in names:
            arrays.append(DOCUMENTS.name)
        if self.layout.selected is not None:
            arrays.append(SELECTED.name)
        reads = [(b, name, *self._start(b, name)) for b in blocks for name in arrays]
        side_arrays: dict[int, dict[str, np.ndarray]] = {b: {} for b in blocks}
        for block, name, values, read in reads:
            read.wait()
            if name == SELECTED.name:
                require_selected(self.arrays[name], self.blocks[block], values)
            elif name not in (POSITIONS.name, *self._output_names):  # whose values may all be 0
                self._require(name, self._rows(block), values)
            side_arrays[block][name] = values
        for block, sides in side_arrays.items():
            self._require_outputs(block, sides)
            if {POSITIONS.name, SEGMENTS.name} <= set(sides):
                counting = has_nonzero_positions(sides[SEGMENTS.name])
                self._require(POSITIONS.name, self._rows(block), sides[POSITIONS.name], counting)
        if COMPLETIONS in names:
            tables = read_tables(self._storage, [self.blocks[b] for b in blocks])
            for sides, table in zip(side_arrays.values(), tables, strict=True):
                sides[COMPLETIONS] = completion_slots(sides[DOCUMENTS.name], table)
        return [
            {name: sides.pop(name) for name in self._output_names if name in sides} | slot_side_arrays(sides)
            for sides in side_arrays.values()
        ]

    @cached_property
    def _output_names(self) -> tuple[str, ...]:
        return tuple(spec.name for spec in self.layout.outputs)

    def _require_outputs(self, block: int, sides: Mapping[str, np.ndarray]) -> None:
        """Raises StoreInvalid if an object of outputs is missing. Rows without a selected token may be all zeros."""
        for name in (name for name in self._output_names if name in sides):
            filled = sides[SELECTED.name][:, 0] >= 0 if SELECTED.name in sides else None
            self._require(name, self._rows(block), sides[name], filled)

    def _rows(self, block: int) -> Int64[np.ndarray, " rows"]:
        return self._first_row(block) + np.arange(self.blocks[block].rows)

    def _start(self, block: int, name: str) -> tuple[np.ndarray, RowRead]:
        array = self.arrays[name]
        values = np.empty((self.blocks[block].rows, *array.shape[1:]), array.dtype.numpy_dtype)
        return values, RowRead(array, self._first_row(block), values)
