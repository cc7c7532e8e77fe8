"""Reads pieces of blocks, from one store or several with the same tokens, into the memories of buffers."""

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cached_property, partial
from itertools import chain, count, cycle, pairwise

import numpy as np
from jaxtyping import Int64

from pipeline.store.format.block_table import BlockTable
from pipeline.store.format.layout import DOCUMENTS, MIB, SELECTED, SIDE_ARRAYS
from pipeline.store.format.tables import read_tables
from pipeline.store.generated.completions import completion_slots
from pipeline.store.read.gathering import TokenMemory, refuse_epoch
from pipeline.store.read.iterating import Position
from pipeline.store.read.options import COMPLETIONS, BatchArrays, BatchOptions, TokenFilter
from pipeline.store.read.order import Filling, ReadingOrder
from pipeline.store.read.rows import slot_side_arrays
from pipeline.store.read.shard_reads import REMOTE_PIECES, REMOTE_REQUESTS, ShardReads

# Memory for the side arrays (20 bytes per token) and outputs of a window's blocks, whose pieces are shuffled together.
WINDOW_MIB = 64.0

# Without shuffling, a buffer of this size is enough to read ahead.
SEQUENTIAL_BUFFER_MIB = 64.0

# How much of all positions' side arrays is read at a time. If tokens are selected, it is then reduced to these.
WHOLE_MIB = 64.0

_Kept = dict[int, tuple[int, Sequence[dict[str, np.ndarray]]]]
"""By block: its window, and for each store its arrays [rows, S, ...] by name."""

Stores = Sequence[tuple[ShardReads, BatchArrays]]
"""The stores of a reader, which have the same tokens: one, or several that are read together."""


class Buffers:
    """The buffers of a reader, in its order, and the numbers of tokens in them.

    Activations and features are read by pieces. Side arrays and outputs, whose chunks hold many tokens, are read by
    blocks, and kept for the other pieces of the window's blocks.

    arrays: of each store. order: the order in which they are read.
    """

    def __init__(self, stores: Stores, blocks: BlockTable, options: BatchOptions) -> None:
        """blocks: of each store, all with rows."""
        self.arrays = [arrays for _, arrays in stores]
        self.order = reading_order(blocks, self.arrays, options)
        self._blocks = blocks
        self._options = options
        self._reads = [reads for reads, _ in stores]

    def filled(self, start: Position, end: int | None) -> Iterator[TokenMemory]:
        """The buffers from position `start` to epoch `end` (None: no end): two memories in turn, filled in threads."""
        pieces, sides = ([reads.another(most) for reads in self._reads] for most in (REMOTE_PIECES, REMOTE_REQUESTS))
        fill = partial(self._fill, pieces, sides, {})
        rows = self.order.piece_rows * min(self.order.pieces_per_buffer, self.num_pieces)
        memories = cycle([TokenMemory(self.arrays, rows) for _ in range(2)])
        filler = ThreadPoolExecutor(1, thread_name_prefix="fill")
        try:
            fillings = zip(self._fillings(start, end), memories, strict=False)
            started = ((filling, memory, filler.submit(fill, memory, filling)) for filling, memory in fillings)
            for (filling, memory, task), following in pairwise(chain(started, [None])):
                for check in task.result():
                    check.result()
                memory.start = Position(filling.epoch, buffer=filling.index)
                memory.is_last = following is None or following[0].epoch != filling.epoch
                yield memory
        finally:
            # Without waiting, since a dropped reader may be garbage-collected in one of these threads. The threads that
            # read shards are not shut down here: garbage collection may run in `filler` while it submits to them and
            # holds the lock that their shutdown needs. They end when nothing refers to them.
            filler.shutdown(wait=False, cancel_futures=True)

    def _fillings(self, start: Position, end: int | None) -> Iterator[Filling]:
        if next(self.order.pieces(start.epoch), None) is None:
            if end is None:
                refuse_epoch(0, self._options)
            return
        for epoch in count(start.epoch) if end is None else range(start.epoch, end):
            yield from self.order.fillings(epoch, start.buffer if epoch == start.epoch else 0)

    @cached_property
    def num_pieces(self) -> int:
        return int((-(-np.asarray(self.order.block_rows) // self.order.piece_rows)).sum())

    @property
    def piece_mib(self) -> float:
        return sum(_piece_mib(arrays, self.order.piece_rows) for arrays in self.arrays)

    def max_batches(self, epoch: int) -> int | None:
        """How many batches every rank has in an epoch; None if ranks need not have the same number."""
        if self._options.world == 1 or self._options.epochs is None:
            return None
        tokens = min(self.order.tokens_per_rank(epoch, self._piece_tokens))
        if tokens < self._options.batch_size:
            refuse_epoch(tokens, self._options)
        return tokens // self._options.batch_size

    def num_batches(self, epochs: range) -> int:
        """How many batches the epochs have. Raises TypeError if only reading tells."""
        if self._options.token_filter != TokenFilter():
            raise TypeError("a reader with a token_filter has no length: only reading tells how many tokens pass it")
        if self._options.world > 1:
            return sum(map(self.max_batches, epochs))
        tokens, size = self._blocks.total("activations"), self._options.batch_size
        return (tokens // size if self._options.drop_last else -(-tokens // size)) * len(epochs)

    @cached_property
    def _piece_tokens(self) -> list[Int64[np.ndarray, " pieces"]]:
        """How many tokens of each piece of each block pass the filter. Reads the segments of the whole store, once."""
        token_filter, counts = self._options.token_filter, []
        names = ("segments", *token_filter.side_arrays)
        for side_arrays in read_block_arrays(self._reads[0], names, self._blocks):
            per_row = token_filter.keeps(side_arrays).sum(axis=1)
            counts.append(np.add.reduceat(per_row, range(0, len(per_row), self.order.piece_rows)))
        return counts

    def _fill(
        self,
        pieces: Sequence[ShardReads],
        sides: Sequence[ShardReads],
        kept: _Kept,
        memory: TokenMemory,
        filling: Filling,
    ) -> list[Future[None]]:
        """Waits until no task uses the memory, then reads the filling's pieces into it. Raises StoreError.

        pieces, sides: of each store; side arrays are read at the same time. kept: those of earlier fillings.
        Use the memory after the futures are done: they raise StoreInvalid if a store was replaced by another one.
        """
        token_filter = self._options.token_filter
        memory.wait_for_users()
        row, reads = 0, []
        try:
            for piece in filling.pieces:
                for store, arrays, out in zip(pieces, self.arrays, memory.arrays, strict=True):
                    first_row = arrays.layout.first_row(*self._blocks[piece.block][:2]) + piece.first
                    for name in arrays.by_piece:
                        reads += store.start(name, first_row, out[name][row : row + piece.num_rows])
                row += piece.num_rows
            completions = {COMPLETIONS: np.empty((row, self.arrays[0].layout.slots), bool)}
            memories = [memory.arrays[0] | completions, *memory.arrays[1:]]
            self._copy_block_arrays(sides, kept, filling, memories)  # while activations are being read
            slots = memory.chosen(token_filter, row, completions)
            for read in reads:
                read.result()
        finally:  # also after an error, none of them writes to memory that is used again
            wait([read for read in reads if not read.cancel()])
        memory.order = self.order.shuffled(filling, memory.within_norms(token_filter, slots))
        return [store.start_check() for store in pieces]

    def _copy_block_arrays(
        self, sides: Sequence[ShardReads], kept: _Kept, filling: Filling, memories: Sequence[dict[str, np.ndarray]]
    ) -> None:
        """Copies the pieces' side arrays and outputs. Drops those of earlier windows."""
        oldest = min(piece.window for piece in filling.pieces)
        for block in [block for block, (window, _) in kept.items() if window < oldest]:
            del kept[block]
        missing = {piece.block: piece.window for piece in filling.pieces if piece.block not in kept}
        names = [arrays.by_block for arrays in self.arrays]
        names[0] = (*names[0], *(spec.name for spec in SIDE_ARRAYS), *self._options.token_filter.side_arrays)
        tables = self._blocks[np.array(list(missing), np.int64)]
        by_store = [read_block_arrays(*store, tables) for store in zip(sides, names, strict=True)]
        kept |= {block: (missing[block], arrays) for block, *arrays in zip(missing, *by_store, strict=True)}
        row = 0
        for piece in filling.pieces:
            for out, arrays in zip(memories, kept[piece.block][1], strict=True):
                for name, values in arrays.items():
                    out[name][row : row + piece.num_rows] = values[piece.first : piece.first + piece.num_rows]
            row += piece.num_rows


def read_block_arrays(reads: ShardReads, names: Sequence[str], blocks: BlockTable) -> Iterator[dict[str, np.ndarray]]:
    """Side arrays, outputs and `COMPLETIONS` of the given blocks, at the slots for activations: [rows, S] or
    [rows, S, k] by name.

    Raises StoreError if an array is damaged or missing, and for `COMPLETIONS` in a store without them.
    """
    layout = reads.layout
    block_bytes = sum(spec.position_bytes for spec in SIDE_ARRAYS) * layout.length * layout.rows_per_block
    at_once = max(1, int(WHOLE_MIB * MIB / block_bytes))
    for start in range(0, len(blocks), at_once):
        yield from _read_some(reads, set(names), blocks[start : start + at_once])


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


def reading_order(blocks: BlockTable, stores: Sequence[BatchArrays], options: BatchOptions) -> ReadingOrder:
    """The order in which one or several stores with the same `blocks`, all with rows, are read. Their buffers have
    `buffer_mib` together."""
    mib = options.buffer_mib if options.shuffle else min(options.buffer_mib, SEQUENTIAL_BUFFER_MIB)
    # With activations, pieces need not be whole chunks of features: such pieces could be many times as large.
    rows = (arrays.layout.piece_rows(arrays.names or arrays.sparse, arrays.sparse) for arrays in stores)
    piece_rows = min(math.lcm(*rows), stores[0].layout.rows_per_block)
    piece_mib = sum(_piece_mib(arrays, piece_rows) for arrays in stores)
    return ReadingOrder(
        block_rows=tuple(blocks.column("rows").tolist()),
        piece_rows=piece_rows,
        pieces_per_buffer=max(1, int(mib / piece_mib)),
        window_blocks=max(1, int(WINDOW_MIB / max(map(_block_arrays_mib, stores)))),
        seed=options.order_seed,
        rank=options.rank,
        world=options.world,
    )


def _piece_mib(arrays: BatchArrays, piece_rows: int) -> float:
    """The size of one piece of all arrays that are read by pieces, in MiB."""
    layout, names = arrays.layout, set(arrays.by_piece)
    return sum(layout.row_bytes(spec) for spec in layout.all_arrays if spec.name in names) * piece_rows / MIB


def _block_arrays_mib(arrays: BatchArrays) -> float:
    """The size of a block's side arrays and of the outputs that are read, in MiB."""
    layout = arrays.layout
    outputs = (spec for spec in layout.outputs if spec.name in arrays.by_block)
    return sum(spec.position_bytes for spec in (*SIDE_ARRAYS, *outputs)) * layout.slots * layout.rows_per_block / MIB
