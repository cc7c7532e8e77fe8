"""Batches of a store's tokens: read, shuffled and gathered ahead of training.

There are two buffers: batches are taken from one while the other is filled.
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
from typing import Any, NamedTuple, NoReturn, Self

import numpy as np
from jaxtyping import Int64

from pipeline.core.arguments import integer
from pipeline.core.errors import ArgumentError
from pipeline.store.format.block_table import BlockTable
from pipeline.store.format.layout import MIB, SIDE_ARRAYS, StoreLayout
from pipeline.store.format.scaled import scale_name
from pipeline.store.read.batch_options import BatchOptions, Reading
from pipeline.store.read.buffers import StoredBlocks
from pipeline.store.read.documents import blocks_with_documents
from pipeline.store.read.filters import TokenFilter
from pipeline.store.read.frameworks import Dtype, Framework
from pipeline.store.read.gathering import Batch, Gatherer, Position, Reader, TokenMemory, sealed, unsealed
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


class BatchReader(Reader[Batch]):
    """Iterates over the batches of a store.

    A new reader with this one's `state()` continues after the last batch that this one returned.
    """

    def __init__(self, sources: Sequence["BatchSource"], state: "SavedState | None" = None) -> None:
        """sources: one, or those of several stores with the same order, of the blocks that the state covers."""
        # The generator refers to the sources and not to the reader, so that there is no reference cycle: dropping the
        # reader ends its threads at once instead of at the next garbage collection.
        self._sources = sources
        position, epochs = Position(), sources[0].epochs
        if state is not None:
            position = Position(state.epoch) if state.rest is None else sources[0].restored(state.rest)
        end = None
        if epochs is not None:  # at the end of a pass, nothing of it is left
            at_begin = state is not None and state.rest is None
            end = max(1, -(-(position.epoch + (at_begin or position.batch > 0)) // epochs)) * epochs
        super().__init__(position, end, epochs)

    @classmethod
    def of(
        cls,
        stores: Sequence[tuple[ShardReads, Reading]],
        blocks: BlockTable,
        state: Mapping[str, Any] | None = None,
        warns: bool = True,
    ) -> Self:
        """A reader of several stores with the same tokens, or of one. blocks: of each store.

        warns: log a warning if shuffling mixes tokens from only a few places.
        """
        store_id = "+".join(reads.identity.id for reads, _ in stores)
        saved = SavedState.parse(state, store_id)
        reading, num_streams = stores[0][1], stores[0][0].layout.num_streams
        covered = blocks if saved is None else saved.covered(blocks, num_streams)
        fixed_state = {"store": store_id, "blocks": _packed_counts(covered, num_streams)}
        if (documents := reading.options.token_filter.documents) is not None:
            covered = blocks_with_documents(covered, num_streams, np.array(documents, np.int64))
        order = reading_order(covered, [(reads.layout, reading) for reads, reading in stores])
        sources = [BatchSource(reads, covered, reading, order, fixed_state) for reads, reading in stores]
        if warns:
            sources[0].warn_of_few_places(sum(source.piece_mib for source in sources))
        return cls(sources, saved)

    def _start(self) -> Iterator[tuple[Batch, Position]]:
        return self._sources[0].read(self._position, self._end)

    def __len__(self) -> int:
        """The number of batches in a pass. Raises TypeError where only reading tells: with a filter or epochs=None."""
        if self._end is None:
            raise TypeError("a reader with epochs=None has no length")
        return self._sources[0].num_batches(range(self._end - self._epochs, self._end))

    def __bool__(self) -> bool:
        return True

    def state(self) -> dict[str, Any]:
        """The reader's position, as JSON values: epoch, batch, buffer, token, the number of blocks of each stream that
        it reads, a checksum of everything else that the order depends on, rank, world, the store's identity and a
        checksum of all this. It is valid as long as the store exists, also after an extension. At the beginning and end
        of an epoch it is valid for any rank and world. A state {"epoch": 3} is the beginning of that epoch."""
        return sealed(self._position.numbers | self._sources[0].fixed_state)

    def close(self) -> None:
        super().close()
        for source in self._sources:
            source.close()


class SavedState(NamedTuple):
    """A reader's state. rest: None at the beginning of an epoch, without anything that must agree with a reader."""

    epoch: int
    rest: dict[str, Any] | None = None

    @classmethod
    def parse(cls, state: Mapping[str, Any] | None, store_id: str) -> "SavedState | None":
        """Raises ArgumentError if the state was changed, or is from a reader of a store with another id."""
        if state is None:
            return None
        if isinstance(state, Mapping) and list(state) == ["epoch"]:
            return cls(integer("the state's epoch", state["epoch"]))
        content = unsealed(state)
        if content.pop("store", None) != store_id:
            raise ArgumentError("the state is from a reader of a different store. Start again without a state.")
        return cls(content["epoch"], content)

    def covered(self, blocks: BlockTable, num_streams: int) -> BlockTable:
        """Those of the store's blocks that a reader with this state reads. Raises ArgumentError if some are missing."""
        if self.rest is None:
            return blocks
        counts = np.frombuffer(zlib.decompress(base64.b64decode(self.rest["blocks"])), "<u4")
        if (counts > blocks.per_stream(num_streams)).any():
            raise ArgumentError(
                "the state covers blocks that were committed after this store was opened. Open it again, or use "
                "refresh()."
            )
        return blocks.first_blocks(counts)


def _packed_counts(blocks: BlockTable, num_streams: int) -> str:
    """The number of blocks of each stream, for a `SavedState`."""
    counts = blocks.per_stream(num_streams).astype("<u4")
    return base64.b64encode(zlib.compress(counts.tobytes())).decode()


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
        state: from `BatchReader.state()`, to resume. That reader must have had the same arguments; at the beginning or
        end of an epoch its rank and world may differ. The new reader reads the same blocks, also if the store has more
        by now. {"epoch": 3} is the beginning of an epoch, of all blocks.

        Logs a warning if shuffling mixes tokens from only a few places in the store. Raises StoreError for a damaged
        block, for activations, outputs or features that the store lacks, and if there is nothing to read; ArgumentError
        for arguments that are wrong or contradict each other or the state; ImportError if the framework is not
        installed.
        """
        options = BatchOptions(
            **dict(shuffle=shuffle, seed=seed, epochs=epochs, rank=rank, world=world, token_filter=token_filter),
            **dict(stack=stack, dtype=dtype, framework=framework, outputs=outputs, features=features),
            **dict(pin_memory=pin_memory, drop_last=drop_last, buffer_mib=buffer_mib),
        )
        return self._batches(keys, batch_size, normalisation, options, state)


class BatchSource:
    """Makes a reader's batches, in threads. fixed_state: the part of a reader's state that does not change."""

    def __init__(
        self,
        reads: ShardReads,
        blocks: BlockTable,
        reading: Reading,
        order: ReadingOrder,
        fixed_state: Mapping[str, Any],
    ) -> None:
        """blocks: those that `order` was made from. fixed_state: the store's identity and blocks."""
        self._path = reads.storage.path
        self._reading = reading
        self._options = reading.options
        self._blocks = StoredBlocks(reads, blocks[blocks.column("rows") > 0])
        self._order = order
        self.fixed_state = {"order": self._checksum(order), "rank": order.rank, "world": order.world, **fixed_state}

    @property
    def epochs(self) -> int | None:
        return self._options.epochs

    @property
    def piece_mib(self) -> float:
        return _piece_mib(self._blocks.layout, self._reading, self._order.piece_rows)

    def warn_of_few_places(self, piece_mib: float) -> None:
        places, options = self._order.pieces_per_buffer, self._options
        num_pieces = self._num_pieces() // options.world
        if options.shuffle and places < min(MIN_PLACES, num_pieces):
            warning = (
                f"a buffer of {options.buffer_mib:g} MiB shuffles tokens from only {places} places in the store, "
                f"{piece_mib:.0f} MiB each, so a batch has few documents. Use "
                f"buffer_mib={math.ceil(MIN_PLACES * piece_mib)} for {MIN_PLACES} places (there are two buffers), or "
                "fewer keys."
            )
            if (warned := (self._path, warning)) not in _warned:
                _warned.add(warned)
                log.warning(warning)

    def close(self) -> None:
        self._blocks.close()

    def _checksum(self, order: ReadingOrder) -> int:
        """A checksum of everything but the blocks that the order of tokens depends on."""
        filtered = (self._options.token_filter, self._reading.batch_size, self._options.drop_last)
        return zlib.crc32(repr((replace(order, block_rows=()), filtered)).encode())

    def restored(self, state: Mapping[str, Any]) -> Position:
        """The position from an earlier reader's state. Raises ArgumentError if that reader had different options."""
        order = replace(self._order, rank=state["rank"], world=state["world"])
        if state["order"] != self._checksum(order):
            raise ArgumentError(
                "the state belongs to a different reader configuration: the order of tokens depends on the keys, "
                "batch_size, seed, rank, world, filter, outputs and buffer_mib. Use those of the reader that the state "
                "came from, or start again without a state."
            )
        position = Position(**{name: state[name] for name in Position().numbers})
        if order == self._order:
            return position
        if not position.batch:
            return Position(position.epoch)
        if self._ends_epoch(position, order):
            return Position(position.epoch + 1)
        raise ArgumentError(
            f"the state is from rank {order.rank} of {order.world}, after {position.batch} batches of epoch "
            f"{position.epoch}; this reader is rank {self._order.rank} of {self._order.world}, which reads a different "
            "share of the epoch. Finish the epoch with the old rank and world, or restart it: "
            f"state={{'epoch': {position.epoch}}}."
        )

    def read(self, start: Position, end: int | None) -> Iterator[tuple[Batch, Position]]:
        """The batches from position `start` to epoch `end` (None: no end), each with the position after it."""
        gatherer = Gatherer(self._reading, self._drops_last(self._order), self._limit, self._refuse_endless)
        filler = ThreadPoolExecutor(1, thread_name_prefix="fill")
        try:
            yield from gatherer.batches(self._filled(filler, start, end), start)
        finally:
            # Without waiting, since a dropped reader may be garbage-collected in one of these threads. The threads of
            # `_blocks` are not shut down here: garbage collection may run in `filler` while it submits to them and
            # holds the lock that their shutdown needs. They end when nothing refers to them.
            filler.shutdown(wait=False, cancel_futures=True)

    def _filled(
        self, filler: ThreadPoolExecutor, start: Position, end: int | None
    ) -> Iterator[tuple[Buffer, TokenMemory, bool]]:
        """Buffers, their filled memory, and whether each is the epoch's last. A memory is reused after the next buffer
        is requested."""
        free = [TokenMemory(self._blocks.layout, self._reading, self._memory_rows()) for _ in range(2)]
        filling: deque[tuple[Buffer, TokenMemory, Future[Future[None]]]] = deque()
        for buffer in self._buffers(start, end):
            memory = free.pop()
            done = filler.submit(self._blocks.fill, memory, buffer, self._order, self._options.token_filter)
            filling.append((buffer, memory, done))
            if len(filling) > 1:
                before, memory, done = filling.popleft()
                done.result().result()
                yield before, memory, before.epoch != buffer.epoch
                free.append(memory)
        for buffer, memory, done in filling:
            done.result().result()
            yield buffer, memory, True

    def _buffers(self, start: Position, end: int | None) -> Iterator[Buffer]:
        """The buffers from position `start` to epoch `end`, epoch after epoch."""
        if next(self._order.pieces(start.epoch), None) is None:
            if end is None:
                self._refuse(0)
            return
        for epoch in count(start.epoch) if end is None else range(start.epoch, end):
            yield from self._order.buffers(epoch, start.buffer if epoch == start.epoch else 0)

    def _memory_rows(self) -> int:
        return self._order.piece_rows * min(self._order.pieces_per_buffer, self._num_pieces())

    def _num_pieces(self) -> int:
        return int((-(-np.asarray(self._order.block_rows) // self._order.piece_rows)).sum())

    def _limit(self, epoch: int) -> int | None:
        """How many batches every rank has in an epoch; None if ranks need not have the same number."""
        if self._options.world == 1 or self._options.epochs is None:
            return None
        tokens = self._num_tokens(epoch, self._order)
        if tokens < self._reading.batch_size:
            self._refuse(tokens)
        return tokens // self._reading.batch_size

    def num_batches(self, epochs: range) -> int:
        """How many batches the epochs have. Raises TypeError if only reading tells."""
        if self._options.token_filter != TokenFilter():
            raise TypeError("a reader with a token_filter has no length: only reading tells how many tokens pass it")
        if self._options.world > 1:
            return sum(self._num_tokens(epoch, self._order) // self._reading.batch_size for epoch in epochs)
        tokens, size = int(self._block_tokens.sum()), self._reading.batch_size
        return (tokens // size if self._options.drop_last else -(-tokens // size)) * len(epochs)

    def _num_tokens(self, epoch: int, order: ReadingOrder) -> int:
        """How many tokens of an epoch a reader with this `order` may yield: as many as the rank with the fewest has, or
        as many as it has itself if epochs is None. A filter by norms may leave out some of them."""
        tokens = order.tokens_per_rank(epoch, self._block_tokens, self._count_tokens)
        return tokens[order.rank] if self._options.epochs is None else min(tokens)

    def _ends_epoch(self, position: Position, order: ReadingOrder) -> bool:
        """Whether a reader with this `order` has no more batches in the epoch."""
        num_left = self._num_tokens(position.epoch, order) - position.batch * self._reading.batch_size
        return num_left <= 0 or (num_left < self._reading.batch_size and self._drops_last(order))

    def _drops_last(self, order: ReadingOrder) -> bool:
        return self._options.drop_last or order.world > 1

    def _refuse_endless(self, tokens: int) -> None:
        """Raises ArgumentError if epochs is None, since a reader without batches would then never end."""
        if self._options.epochs is None:
            self._refuse(tokens)

    def _refuse(self, tokens: int) -> NoReturn:
        size, world = self._reading.batch_size, self._options.world
        if world > 1:
            raise ArgumentError(
                f"one of {world} readers has {tokens} tokens in an epoch, less than one batch of {size}. Use fewer "
                "readers or a smaller batch_size."
            )
        remedy = "Use a smaller batch_size." if tokens else "The store is empty, or no token passes the filter."
        raise ArgumentError(f"an epoch has {tokens} tokens, less than one batch of {size}. {remedy}")

    @cached_property
    def _block_tokens(self) -> Int64[np.ndarray, " blocks"]:
        """How many tokens of each block pass the filter. With a filter, reads the segments of the whole store, once."""
        if not self._options.token_filter.side_arrays:
            return self._blocks.blocks.column("activations")
        return np.array([sum(pieces) for pieces in self._count_tokens(range(len(self._blocks.blocks)))], np.int64)

    def _count_tokens(self, blocks: Sequence[int]) -> list[list[int]]:
        """How many tokens of each piece of the given blocks pass the filter."""
        names = ("segments", *self._options.token_filter.side_arrays)
        counts = []
        for start in range(0, len(blocks), BLOCKS_COUNTED_AT_ONCE):
            for side_arrays in self._blocks.read_side_arrays(blocks[start : start + BLOCKS_COUNTED_AT_ONCE], names):
                per_row = self._options.token_filter.keeps(side_arrays).sum(axis=1)
                counts.append(np.add.reduceat(per_row, range(0, len(per_row), self._order.piece_rows)).tolist())
        return counts


def _piece_mib(layout: StoreLayout, reading: Reading, piece_rows: int) -> float:
    """The size of one piece of all arrays that are read by pieces, with their scales, in MiB."""
    stored = {*reading.names, *map(scale_name, reading.names), *reading.sparse}
    return sum(layout.row_bytes(spec) for spec in layout.all_arrays if spec.name in stored) * piece_rows / MIB


def reading_order(blocks: BlockTable, readings: Sequence[tuple[StoreLayout, Reading]]) -> ReadingOrder:
    """The order in which one or several stores with the same `blocks` are read.

    readings: each store's layout and what to read from it; they only differ in their arrays. Their buffers have
    `buffer_mib` together.
    """
    options = readings[0][1].options
    mib = options.buffer_mib if options.shuffle else min(options.buffer_mib, SEQUENTIAL_BUFFER_MIB)
    rows_per_block = readings[0][0].rows_per_block
    # With activations, pieces need not be whole chunks of features: such pieces could be many times as large.
    rows = (layout.piece_rows(reading.names or reading.sparse, reading.sparse) for layout, reading in readings)
    piece_rows = min(math.lcm(*rows), rows_per_block)
    piece_mib = sum(_piece_mib(layout, reading, piece_rows) for layout, reading in readings)
    return ReadingOrder(
        block_rows=tuple(blocks.column("rows")[blocks.column("rows") > 0].tolist()),
        piece_rows=piece_rows,
        pieces_per_buffer=max(1, int(mib / piece_mib)),
        window_blocks=max(1, int(WINDOW_MIB / max(_side_arrays_mib(*reading) for reading in readings))),
        seed=readings[0][1].seed,
        rank=options.rank,
        world=options.world,
    )


def _side_arrays_mib(layout: StoreLayout, reading: Reading) -> float:
    """The size of a block's side arrays and of the outputs that are read, in MiB."""
    outputs = (spec for spec in layout.outputs if spec.name in reading.outputs)
    return sum(spec.position_bytes for spec in (*SIDE_ARRAYS, *outputs)) * layout.slots * layout.rows_per_block / MIB
