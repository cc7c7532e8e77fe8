"""Batches of a store's tokens: read, shuffled and gathered ahead of training.

    BatchOptions, BatchArrays      what batches contain
    -> ReadingOrder                which pieces of which blocks a buffer takes, and the order of their tokens
    -> Buffers, ShardReads         read these pieces into a TokenMemory
    -> gathered                    takes batches from it, by the order
    -> BatchReader                 returns them, and knows its position

There are two memories: batches are taken from one while the other is filled. Each arrow is a thread or several.
"""

import base64
import logging
import math
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from itertools import count
from typing import Any

import numpy as np
from jaxtyping import Int64

from pipeline.core.arguments import integer
from pipeline.core.errors import ArgumentError
from pipeline.store.format.block_table import BlockTable
from pipeline.store.format.layout import MIB, SIDE_ARRAYS
from pipeline.store.read.buffers import Buffers, read_block_arrays
from pipeline.store.read.documents import blocks_with_documents
from pipeline.store.read.frameworks import Dtype, Framework
from pipeline.store.read.gathering import Batch, Filled, TokenMemory, gathered, refuse_epoch
from pipeline.store.read.iterating import Position, Reader, sealed, unsealed
from pipeline.store.read.options import BatchArrays, BatchOptions, TokenFilter
from pipeline.store.read.order import Buffer, ReadingOrder
from pipeline.store.read.shard_reads import ShardReads

log = logging.getLogger(__name__)

# Memory for the side arrays (20 bytes per token) and outputs of a window's blocks, whose pieces are shuffled together.
WINDOW_MIB = 64.0

# Without shuffling, a buffer of this size is enough to read ahead.
SEQUENTIAL_BUFFER_MIB = 64.0

# A shuffled reader warns if a buffer holds fewer pieces, each from one place in the store.
MIN_PLACES = 32

# How many blocks' side arrays are read at a time to count tokens.
BLOCKS_COUNTED_AT_ONCE = 64

_warned: set[tuple[str, str]] = set()  # the store and text of each warning that was logged

Stores = Sequence[tuple[ShardReads, BatchArrays]]
"""The stores of a reader, which have the same tokens: one, or several that are read together."""


class BatchReader(Reader[Batch]):
    """Iterates over the batches of a store, or of several with the same tokens.

    A new reader with this one's `state()` continues after the last batch that this one returned.
    """

    def __init__(
        self, stores: Stores, blocks: BlockTable, options: BatchOptions, state: Mapping[str, Any] | None = None
    ) -> None:
        """blocks: of each store; only those that the state covers are read."""
        store_id, num_streams = "+".join(reads.store_id for reads, _ in stores), stores[0][0].layout.num_streams
        saved = _parsed(state, store_id)
        if "blocks" in saved:
            blocks = _covered(blocks, saved["blocks"], num_streams)
        fixed_state = {"store": store_id, "blocks": _packed_counts(blocks, num_streams)}
        if (documents := options.token_filter.documents) is not None:
            blocks = blocks_with_documents(blocks, num_streams, np.array(documents, np.int64))
        # The generator of batches refers to the source and not to the reader, so that there is no reference cycle:
        # dropping the reader ends its threads at once instead of at the next garbage collection.
        self._source = BatchSource(stores, blocks[blocks.column("rows") > 0], options)
        self._fixed_state = self._source.fixed_state | fixed_state
        position = self._source.restored(saved) if "blocks" in saved else Position(saved["epoch"])
        end, epochs = None, options.epochs
        if epochs is not None:  # at the end of a pass, nothing of it is left
            begins_pass = "blocks" not in saved or position.batch > 0
            end = max(1, -(-(position.epoch + begins_pass) // epochs)) * epochs
        super().__init__(position, end, epochs)

    def _start(self) -> Iterator[tuple[Batch, Position]]:
        return self._source.read(self._position, self._end)

    def __len__(self) -> int:
        """The number of batches in a pass. Raises TypeError where only reading tells: with a filter or epochs=None."""
        if self._end is None:
            raise TypeError("a reader with epochs=None has no length")
        return self._source.num_batches(range(self._end - self._epochs, self._end))

    def __bool__(self) -> bool:
        return True

    def state(self) -> dict[str, Any]:
        """The reader's position, as JSON values: epoch, batch, buffer, token, the number of blocks of each stream that
        it reads, a checksum of everything else that the order depends on, rank, world, the store's identity and a
        checksum of all this. It is valid as long as the store exists, also after an extension, for a reader with the
        same arguments. A state {"epoch": 3} is the beginning of that epoch, for any rank and world."""
        return sealed(self._position.numbers | self._fixed_state)


def _parsed(state: Mapping[str, Any] | None, store_id: str) -> dict[str, Any]:
    """The content of a state; only an epoch if that begins there. Raises ArgumentError if the state was changed, or is
    from a reader of a store with another id."""
    if state is None or (isinstance(state, Mapping) and list(state) == ["epoch"]):
        return {"epoch": 0 if state is None else integer("the state's epoch", state["epoch"])}
    content = unsealed(state)
    if content.get("store") != store_id:
        raise ArgumentError("the state is from a reader of a different store. Start again without a state.")
    return content


def _packed_counts(blocks: BlockTable, num_streams: int) -> str:
    """The number of blocks of each stream, for a state."""
    counts = blocks.per_stream(num_streams).astype("<u4")
    return base64.b64encode(zlib.compress(counts.tobytes())).decode()


def _covered(blocks: BlockTable, packed_counts: str, num_streams: int) -> BlockTable:
    """Those of the store's blocks that a state covers. Raises ArgumentError if some are missing."""
    counts = np.frombuffer(zlib.decompress(base64.b64decode(packed_counts)), "<u4")
    if (counts > blocks.per_stream(num_streams)).any():
        raise ArgumentError(
            "the state covers blocks that were committed after this store was opened. Open it again, or use refresh()."
        )
    return blocks.first_blocks(counts)


class HasBatches:
    """What batches can be read from."""

    def batches(
        self,
        keys: Any,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        epochs: int | None = 1,
        rank: int = 0,
        world: int = 1,
        token_filter: TokenFilter | None = None,
        normalisation: Any = None,
        stack: bool = False,
        dtype: Dtype = None,
        framework: Framework | str = "numpy",
        outputs: Sequence[str] = (),
        features: bool = False,
        pin_memory: bool = False,
        drop_last: bool = False,
        buffer_mib: float = 256.0,
        labels: bool = False,
        state: Mapping[str, Any] | None = None,
    ) -> BatchReader:
        """Iterates over all stored tokens, each exactly once per epoch, in batches of `batch_size`, without padding.

        keys: one activation, e.g. "blocks.5.resid_post", or a list of them for the same tokens (see `Batch`). The list
        may be empty with `features=True`.
        shuffle: read blocks in random order; their pieces fill a buffer, from which tokens are taken in random order
        while a second one is filled. Otherwise, tokens are in row order.
        seed: the random order depends on the seed, the epoch and the other arguments, but not on timing.
        epochs: of a pass, i.e. of one `for`; None for endless reading. A batch never mixes epochs.
        rank, world: this reader is number `rank` of `world` readers with disjoint shares of the store. All have the
        same number of batches, all full. This requires reading the segments of the whole store first (4 bytes per
        token), except with epochs=None, where readers never end.
        token_filter: which tokens to leave out.
        normalisation: by array name; gives float32.
        stack: return activations of the same width as one array [n, K, D].
        dtype: of the activations: of numpy, torch or JAX, or its name. None: the store's (float32 if that is int8),
        but float32 for numpy instead of a narrower one, whose sums are wrong in numpy; "stored": always the store's.
        framework: numpy, jax or torch.
        outputs: arrays of `capture.outputs` to read, too: loss, entropy, top_logprobs, top_ids. They take memory in
        addition to `buffer_mib`. Different outputs change the order.
        features: read the features of all SAEs of `capture.encode`, too. They count towards `buffer_mib`, so they may
        change the order.
        pin_memory: return torch tensors in page-locked memory, which a GPU copies faster, and asynchronously.
        drop_last: drop the last batch of an epoch if it is not full.
        buffer_mib: the size of a buffer for activations in MiB; there are two buffers.
        labels: return the tokens' labels, too, of a store of conversations (data.messages).
        state: from `BatchReader.state()`, to resume. That reader must have had the same arguments. The new reader reads
        the same blocks, also if the store has more by now. {"epoch": 3} is the beginning of an epoch, of all blocks.

        Logs a warning if shuffling mixes tokens from only a few places in the store. Raises StoreError for a damaged
        block, for activations, outputs or features that the store lacks, and if there is nothing to read; ArgumentError
        for arguments that are wrong or contradict each other or the state; ImportError if the framework is not
        installed.
        """
        options = BatchOptions(
            **dict(batch_size=batch_size, shuffle=shuffle, seed=seed, epochs=epochs, rank=rank, world=world),
            **dict(token_filter=token_filter, stack=stack, dtype=dtype, framework=framework, outputs=outputs),
            **dict(features=features, pin_memory=pin_memory, drop_last=drop_last, buffer_mib=buffer_mib),
            labels=labels,
        )
        reader = BatchReader(*self._stored(keys, options, normalisation), options, state)
        reader._source.warn_of_few_places()
        return reader

    def _stored(self, keys: Any, options: BatchOptions, normalisation: Any) -> tuple[Stores, BlockTable]:
        """The arrays to read, and their blocks. Raises StoreError and ArgumentError."""
        raise NotImplementedError


class BatchSource:
    """Makes a reader's batches, in threads."""

    def __init__(self, stores: Stores, blocks: BlockTable, options: BatchOptions) -> None:
        self._stores = stores
        self._arrays = [arrays for _, arrays in stores]
        self._blocks = blocks
        self._options = options
        self._order = reading_order(blocks, self._arrays, options)

    @property
    def fixed_state(self) -> dict[str, Any]:
        """The part of a reader's state that says what the order of tokens depends on, but for the blocks."""
        options, order = self._options, replace(self._order, block_rows=(), rank=0, world=1)
        values = (order, options.token_filter, options.batch_size, options.drop_last, *options.token_filter.labels)
        checksum = zlib.crc32(repr(values).encode())
        return {"order": checksum, "rank": options.rank, "world": options.world}

    def warn_of_few_places(self) -> None:
        """Logs a warning if shuffling mixes tokens from only a few places."""
        places, options = self._order.pieces_per_buffer, self._options
        if options.shuffle and places < min(MIN_PLACES, self._num_pieces() // options.world):
            piece_mib = sum(_piece_mib(arrays, self._order.piece_rows) for arrays in self._arrays)
            warning = (
                f"a buffer of {options.buffer_mib:g} MiB shuffles tokens from only {places} places in the store, "
                f"{piece_mib:.0f} MiB each, so a batch has few documents. Use "
                f"buffer_mib={math.ceil(MIN_PLACES * piece_mib)} for {MIN_PLACES} places (there are two buffers), or "
                "fewer keys."
            )
            if (warned := (self._stores[0][0].storage.path, warning)) not in _warned:
                _warned.add(warned)
                log.warning(warning)

    def restored(self, state: Mapping[str, Any]) -> Position:
        """The position from an earlier reader's state. Raises ArgumentError if that reader had different options."""
        own = self.fixed_state
        if state["order"] != own["order"]:
            raise ArgumentError(
                "the state belongs to a different reader configuration: the order of tokens depends on the keys, "
                "batch_size, seed, filter, outputs and buffer_mib. Use those of the reader that the state came from, "
                "or start again without a state."
            )
        position = Position.of(state)
        if position.batch and any(state[name] != own[name] for name in ("rank", "world")):
            raise ArgumentError(
                f"the state is from rank {state['rank']} of {state['world']}, after {position.batch} batches of epoch "
                f"{position.epoch}; this reader is rank {own['rank']} of {own['world']}, which reads a different share "
                "of the epoch. Finish the epoch with the old rank and world, and then begin the next one: "
                f"state={{'epoch': {position.epoch + 1}}}."
            )
        return position

    def read(self, start: Position, end: int | None) -> Iterator[tuple[Batch, Position]]:
        """The batches from position `start` to epoch `end` (None: no end), each with the position after it."""
        options = replace(self._options, drop_last=self._options.drop_last or self._options.world > 1)
        filler = ThreadPoolExecutor(1, thread_name_prefix="fill")
        try:
            yield from gathered(self._filled(filler, start, end), start, self._arrays, options, self._limit)
        finally:
            # Without waiting, since a dropped reader may be garbage-collected in one of these threads. The threads that
            # read shards are not shut down here: garbage collection may run in `filler` while it submits to them and
            # holds the lock that their shutdown needs. They end when nothing refers to them.
            filler.shutdown(wait=False, cancel_futures=True)

    def _filled(self, filler: ThreadPoolExecutor, start: Position, end: int | None) -> Filled:
        buffers = Buffers(self._stores, self._blocks)
        rows = self._order.piece_rows * min(self._order.pieces_per_buffer, self._num_pieces())
        free = [TokenMemory(self._arrays, rows) for _ in range(2)]
        filling: deque[tuple[Buffer, TokenMemory, Future[list[Future[None]]]]] = deque()
        for buffer in self._buffers(start, end):
            memory = free.pop()
            started = filler.submit(buffers.fill, memory, buffer, self._order, self._options.token_filter)
            filling.append((buffer, memory, started))
            if len(filling) > 1:
                before, memory, started = filling.popleft()
                _wait(started)
                yield before, memory, before.epoch != buffer.epoch
                free.append(memory)
        for buffer, memory, started in filling:
            _wait(started)
            yield buffer, memory, True

    def _buffers(self, start: Position, end: int | None) -> Iterator[Buffer]:
        """The buffers from position `start` to epoch `end`, epoch after epoch."""
        if next(self._order.pieces(start.epoch), None) is None:
            if end is None:
                refuse_epoch(0, self._options)
            return
        for epoch in count(start.epoch) if end is None else range(start.epoch, end):
            yield from self._order.buffers(epoch, start.buffer if epoch == start.epoch else 0)

    def _num_pieces(self) -> int:
        return int((-(-np.asarray(self._order.block_rows) // self._order.piece_rows)).sum())

    def _limit(self, epoch: int) -> int | None:
        """How many batches every rank has in an epoch; None if ranks need not have the same number."""
        if self._options.world == 1 or self._options.epochs is None:
            return None
        tokens = min(self._order.tokens_per_rank(epoch, self._block_tokens, self._count_tokens))
        if tokens < self._options.batch_size:
            refuse_epoch(tokens, self._options)
        return tokens // self._options.batch_size

    def num_batches(self, epochs: range) -> int:
        """How many batches the epochs have. Raises TypeError if only reading tells."""
        if self._options.token_filter != TokenFilter():
            raise TypeError("a reader with a token_filter has no length: only reading tells how many tokens pass it")
        if self._options.world > 1:
            return sum(map(self._limit, epochs))
        tokens, size = int(self._block_tokens.sum()), self._options.batch_size
        return (tokens // size if self._options.drop_last else -(-tokens // size)) * len(epochs)

    @cached_property
    def _block_tokens(self) -> Int64[np.ndarray, " blocks"]:
        """How many tokens of each block pass the filter. With a filter, reads the segments of the whole store, once."""
        if not self._options.token_filter.side_arrays:
            return self._blocks.column("activations")
        return np.array([sum(pieces) for pieces in self._count_tokens(range(len(self._blocks)))], np.int64)

    def _count_tokens(self, blocks: Sequence[int]) -> list[list[int]]:
        """How many tokens of each piece of the given blocks pass the filter."""
        token_filter, counts = self._options.token_filter, []
        names, table = ("segments", *token_filter.side_arrays), self._blocks[np.array(blocks, np.int64)]
        for start in range(0, len(table), BLOCKS_COUNTED_AT_ONCE):
            some = table[start : start + BLOCKS_COUNTED_AT_ONCE]
            for side_arrays in read_block_arrays(self._stores[0][0], names, some):
                per_row = token_filter.keeps(side_arrays).sum(axis=1)
                counts.append(np.add.reduceat(per_row, range(0, len(per_row), self._order.piece_rows)).tolist())
        return counts


def _wait(started: Future[list[Future[None]]]) -> None:
    for check in started.result():
        check.result()


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
