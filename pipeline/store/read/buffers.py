"""Reads pieces of blocks, from one store or several with the same tokens, into the memory of a buffer."""

from collections.abc import Sequence
from concurrent.futures import Future, wait

import numpy as np

from pipeline.store.format.block_table import BlockTable
from pipeline.store.format.layout import DOCUMENTS, MIB, SELECTED, SIDE_ARRAYS
from pipeline.store.format.tables import read_tables
from pipeline.store.generated.completions import completion_slots
from pipeline.store.read.gathering import TokenMemory
from pipeline.store.read.options import COMPLETIONS, BatchArrays, TokenFilter
from pipeline.store.read.order import Buffer, ReadingOrder
from pipeline.store.read.rows import slot_side_arrays
from pipeline.store.read.shard_reads import REMOTE_PIECES, ShardReads

# If tokens are selected, side arrays of all positions are read, this much at a time, and reduced to the selected ones.
WHOLE_MIB = 64.0


class Buffers:
    """Fills buffers from stores with the same tokens.

    Activations and features are read by pieces. Side arrays and outputs, whose chunks hold many tokens, are read by
    blocks, and kept for the other pieces of the window's blocks.
    """

    def __init__(self, stores: Sequence[tuple[ShardReads, BatchArrays]], blocks: BlockTable) -> None:
        """blocks: of each store."""
        self._blocks = blocks
        self._arrays = [arrays for _, arrays in stores]
        self._pieces = [reads.another(REMOTE_PIECES) for reads, _ in stores]
        self._sides = [reads.another() for reads, _ in stores]  # side arrays are read at the same time
        # By block: its window, and for each store its arrays [rows, S, ...] by name.
        self._kept: dict[int, tuple[int, Sequence[dict[str, np.ndarray]]]] = {}

    def fill(
        self, memory: TokenMemory, buffer: Buffer, order: ReadingOrder, token_filter: TokenFilter
    ) -> list[Future[None]]:
        """Waits until no task uses the memory, then reads the buffer's pieces into it. Raises StoreError.

        Use the memory after the futures are done: they raise StoreInvalid if a store was replaced by another one.
        """
        memory.wait_for_users()
        row, reads = 0, []
        try:
            for piece in buffer.pieces:
                for pieces, arrays, targets in zip(self._pieces, self._arrays, memory.arrays, strict=True):
                    first_row = arrays.layout.first_row(*self._blocks[piece.block][:2]) + piece.first
                    for name in arrays.by_piece:
                        reads += pieces.start(name, first_row, targets[name][row : row + piece.num_rows])
                row += piece.num_rows
            completions = {COMPLETIONS: np.empty((row, self._arrays[0].layout.slots), bool)}
            targets = [memory.arrays[0] | completions, *memory.arrays[1:]]
            self._copy_block_arrays(buffer, targets, token_filter)  # while activations are being read
            slots = memory.chosen(token_filter, row, completions)
            for read in reads:
                read.result()
        finally:  # also after an error, none of them writes to memory that is used again
            wait([read for read in reads if not read.cancel()])
        memory.order = order.shuffled(buffer, memory.within_norms(token_filter, slots))
        return [pieces.start_check() for pieces in self._pieces]

    def _copy_block_arrays(
        self, buffer: Buffer, targets: Sequence[dict[str, np.ndarray]], token_filter: TokenFilter
    ) -> None:
        """Copies the pieces' side arrays and outputs. Drops those of earlier windows."""
        oldest = min(piece.window for piece in buffer.pieces)
        self._kept = {block: kept for block, kept in self._kept.items() if kept[0] >= oldest}
        missing = {piece.block: piece.window for piece in buffer.pieces if piece.block not in self._kept}
        names = [arrays.by_block for arrays in self._arrays]
        names[0] = (*names[0], *(spec.name for spec in SIDE_ARRAYS), *token_filter.side_arrays)
        tables = self._blocks[np.array(list(missing), np.int64)]
        by_store = [read_block_arrays(*store, tables) for store in zip(self._sides, names, strict=True)]
        self._kept |= {block: (missing[block], arrays) for block, *arrays in zip(missing, *by_store, strict=True)}
        row = 0
        for piece in buffer.pieces:
            for target, arrays in zip(targets, self._kept[piece.block][1], strict=True):
                for name, values in arrays.items():
                    target[name][row : row + piece.num_rows] = values[piece.first : piece.first + piece.num_rows]
            row += piece.num_rows


def read_block_arrays(reads: ShardReads, names: Sequence[str], blocks: BlockTable) -> list[dict[str, np.ndarray]]:
    """Side arrays, outputs and `COMPLETIONS` of the given blocks, at the slots for activations: [rows, S] or
    [rows, S, k] by name.

    Raises StoreError if an array is damaged or missing, and for `COMPLETIONS` in a store without them.
    """
    layout, at_once = reads.layout, len(blocks) or 1
    if layout.selected is not None:
        row_bytes = sum(spec.position_bytes for spec in SIDE_ARRAYS) * layout.length
        at_once = max(1, int(WHOLE_MIB * MIB / (row_bytes * layout.rows_per_block)))
    parts = (blocks[start : start + at_once] for start in range(0, len(blocks), at_once))
    return [arrays for part in parts for arrays in _read_some(reads, set(names), part)]


def _read_some(reads: ShardReads, names: set[str], blocks: BlockTable) -> list[dict[str, np.ndarray]]:
    layout = reads.layout
    stored = names - {COMPLETIONS} | ({DOCUMENTS.name} if COMPLETIONS in names else set())
    if layout.selected is not None and stored:
        stored |= {SELECTED.name}
    arrays = [{name: reads.memory(name, block.rows) for name in stored} for block in blocks]
    started = [
        reads.start(name, layout.first_row(block.stream, block.block), values)
        for block, of_block in zip(blocks, arrays, strict=True)
        for name, values in of_block.items()
    ]
    for read in (read for parts in started for read in parts):
        read.result()
    if COMPLETIONS in names:
        for of_block, table in zip(arrays, read_tables(reads.storage, blocks), strict=True):
            of_block[COMPLETIONS] = completion_slots(of_block[DOCUMENTS.name], table)
    outputs = {spec.name for spec in layout.outputs}
    return [
        {name: of_block.pop(name) for name in outputs & of_block.keys()} | slot_side_arrays(of_block)
        for of_block in arrays
    ]
