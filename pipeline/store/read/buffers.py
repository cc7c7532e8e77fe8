"""Reads pieces of blocks into the memory from which batches are gathered."""

from collections.abc import Sequence
from concurrent.futures import Future
from functools import cached_property

import numpy as np

from pipeline.store.format.block_table import BlockTable
from pipeline.store.format.layout import DOCUMENTS, MIB, SELECTED, SIDE_ARRAYS
from pipeline.store.format.tables import read_tables
from pipeline.store.generated.completions import completion_slots
from pipeline.store.read.filters import COMPLETIONS, TokenFilter
from pipeline.store.read.gathering import TokenMemory
from pipeline.store.read.order import Buffer, ReadingOrder
from pipeline.store.read.rows import StartedRead, slot_side_arrays
from pipeline.store.read.shard_reads import ReadsAhead, ShardReads

# If tokens are selected, side arrays of all positions are read, this much at a time, and reduced to the selected ones.
WHOLE_MIB = 64.0


class StoredBlocks:
    """The committed blocks of a store, and the side arrays of the current window's blocks."""

    def __init__(self, reads: ShardReads, blocks: BlockTable) -> None:
        """reads: of the store; the blocks are read in other threads."""
        self.layout = reads.layout
        self.blocks = blocks
        self._storage = reads.storage
        self._pieces, self._sides = reads.another(), reads.another()  # side arrays are read at the same time
        # By block: its window, and side arrays [rows, slots] by name.
        self._side_arrays: dict[int, tuple[int, dict[str, np.ndarray]]] = {}

    def fill(self, memory: TokenMemory, buffer: Buffer, order: ReadingOrder, token_filter: TokenFilter) -> Future[None]:
        """Waits until no task uses the memory, then reads the buffer's pieces into it. Raises StoreError.

        Use the memory after the future is done: it raises StoreInvalid if the store was replaced by another one.
        """
        memory.wait_for_users()
        row, pieces = 0, self._pieces  # those of a reader that is closed meanwhile accept no more reads
        with ReadsAhead(self._storage.is_remote) as reads:
            for piece in buffer.pieces:
                first = self._first_row(piece.block) + piece.first
                for name, target in memory.targets.items():
                    part = target[row : row + piece.num_rows]
                    reads.add(pieces.start(name, first, part), part.nbytes)
                row += piece.num_rows
            completions = {COMPLETIONS: np.empty((row, self.layout.slots), bool)}
            arrays = memory.side_arrays | completions
            names = list(dict.fromkeys((*memory.side_arrays, *token_filter.side_arrays)))
            side_arrays = self._pieces_side_arrays(buffer, names)  # while activations are being read
            for name in names:
                np.concatenate([sides[name] for sides in side_arrays], out=arrays[name][:row])
            slots = memory.chosen(token_filter, row, completions)
            reads.wait()
        memory.order = order.shuffled(buffer, memory.within_norms(token_filter, slots))
        return pieces.start_check()

    def close(self) -> None:
        """Ends the threads after their current reads."""
        for reads in (self._pieces, self._sides):
            reads.close()
        self._pieces, self._sides = self._pieces.another(), self._sides.another()

    def _first_row(self, block: int) -> int:
        return self.layout.first_row(*self.blocks[block][:2])

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
        return [sides for part in parts for sides in self._read_side_arrays(part, names)]

    def _read_side_arrays(self, blocks: Sequence[int], names: Sequence[str]) -> list[dict[str, np.ndarray]]:
        arrays = [name for name in names if name != COMPLETIONS]
        if COMPLETIONS in names and DOCUMENTS.name not in names:
            arrays.append(DOCUMENTS.name)
        if self.layout.selected is not None:
            arrays.append(SELECTED.name)
        started = [{name: self._start(b, name) for name in arrays} for b in blocks]
        side_arrays = [{name: read.wait() for name, read in reads.items()} for reads in started]
        if COMPLETIONS in names:
            tables = read_tables(self._storage, [self.blocks[b] for b in blocks])
            for sides, table in zip(side_arrays, tables, strict=True):
                sides[COMPLETIONS] = completion_slots(sides[DOCUMENTS.name], table)
        return [
            {name: sides.pop(name) for name in self._output_names if name in sides} | slot_side_arrays(sides)
            for sides in side_arrays
        ]

    @cached_property
    def _output_names(self) -> tuple[str, ...]:
        return tuple(spec.name for spec in self.layout.outputs)

    def _start(self, block: int, name: str) -> StartedRead:
        values = self._sides.memory(name, self.blocks[block].rows)
        return StartedRead(values, self._sides.start(name, self._first_row(block), values))
