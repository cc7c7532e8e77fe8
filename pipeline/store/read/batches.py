"""Batches of a store's tokens: read, shuffled and gathered ahead of training.

    BatchOptions, BatchArrays      what batches contain
    -> ReadingOrder                which pieces of which blocks a buffer takes, and the order of their tokens
    -> Buffers, ShardReads         read these pieces into a TokenMemory
    -> gathered                    takes batches from it, by the order
    -> BatchReader                 returns them, and knows its position

There are two memories: batches are taken from one while the other is filled. Each arrow is a thread or several.
"""

import logging
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pipeline.core.arguments import integer
from pipeline.core.errors import ArgumentError
from pipeline.store.format.block_table import BlockTable
from pipeline.store.read.buffers import Buffers, Stores
from pipeline.store.read.documents import blocks_with_documents
from pipeline.store.read.frameworks import Dtype, Framework
from pipeline.store.read.gathering import Batch, gathered
from pipeline.store.read.iterating import Position, Reader, sealed, unsealed
from pipeline.store.read.options import BatchOptions, TokenFilter

log = logging.getLogger(__name__)

# A shuffled reader warns if a buffer holds fewer pieces, each from one place in the store.
MIN_PLACES = 32


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
        counts = blocks.per_stream(num_streams).tolist()
        if (documents := options.token_filter.documents) is not None:
            blocks = blocks_with_documents(blocks, num_streams, np.array(documents, np.int64))
        self._options = options
        self._buffers = Buffers(stores, blocks[blocks.column("rows") > 0], options)
        order = replace(self._buffers.order, block_rows=()), options.token_filter, options.batch_size, options.drop_last
        self._fixed_state = {"store": store_id, "blocks": counts, "order": zlib.crc32(repr(order).encode())}
        position = _restored(saved, self._fixed_state["order"])
        end, epochs = None, options.epochs
        if epochs is not None:  # at the end of a pass, nothing of it is left
            begins_pass = "blocks" not in saved or position.batch > 0
            end = max(1, -(-(position.epoch + begins_pass) // epochs)) * epochs
        super().__init__(position, end, epochs)

    def _start(self) -> Iterator[tuple[Batch, Position]]:
        # The generator of batches refers to the buffers and not to the reader, so that there is no reference cycle:
        # dropping the reader ends its threads at once instead of at the next garbage collection.
        buffers, options = self._buffers, self._options
        options = replace(options, drop_last=options.drop_last or options.world > 1)
        filled = buffers.filled(self._position, self._end)
        return gathered(filled, self._position, buffers.arrays, options, buffers.max_batches)

    def __len__(self) -> int:
        """The number of batches in a pass. Raises TypeError where only reading tells: with a filter or epochs=None."""
        if self._end is None:
            raise TypeError("a reader with epochs=None has no length")
        return self._buffers.num_batches(range(self._end - self._epochs, self._end))

    def __bool__(self) -> bool:
        return True

    def state(self) -> dict[str, Any]:
        """The reader's position, as JSON values: epoch, batch, buffer, token, the number of blocks of each stream that
        it reads, a checksum of everything else that the order depends on, the store's identity and a checksum of all
        this. It is valid as long as the store exists, also after an extension, for a reader with the same arguments. A
        state {"epoch": 3} is the beginning of that epoch, for any arguments."""
        return sealed(self._position.numbers | self._fixed_state)

    def warn_of_few_places(self) -> None:
        """Logs a warning if shuffling mixes tokens from only a few places in the store."""
        places, options, piece_mib = self._buffers.order.pieces_per_buffer, self._options, self._buffers.piece_mib
        if options.shuffle and places < min(MIN_PLACES, self._buffers.num_pieces // options.world):
            log.warning(
                f"a buffer of {options.buffer_mib:g} MiB shuffles tokens from only {places} places in the store, "
                f"{piece_mib:.0f} MiB each, so a batch has few documents. Use "
                f"buffer_mib={math.ceil(MIN_PLACES * piece_mib)} for {MIN_PLACES} places (there are two buffers), or "
                "fewer keys."
            )


def _parsed(state: Mapping[str, Any] | None, store_id: str) -> dict[str, Any]:
    """The content of a state; only an epoch if that begins there. Raises ArgumentError if the state was changed, or is
    from a reader of a store with another id."""
    if state is None or (isinstance(state, Mapping) and list(state) == ["epoch"]):
        return {"epoch": 0 if state is None else integer("the state's epoch", state["epoch"])}
    content = unsealed(state)
    if content.get("store") != store_id or not isinstance(content.get("blocks"), list):
        raise ArgumentError(
            "the state is from a reader of a different store, or of another version of this program. Start again "
            "without a state."
        )
    return content


def _covered(blocks: BlockTable, counts: Sequence[int], num_streams: int) -> BlockTable:
    """The first `counts` blocks of each stream. Raises ArgumentError if some are missing."""
    if (np.array(counts) > blocks.per_stream(num_streams)).any():
        raise ArgumentError(
            "the state covers blocks that were committed after this store was opened. Open it again, or use refresh()."
        )
    return blocks.first_blocks(np.array(counts))


def _restored(state: Mapping[str, Any], order: int) -> Position:
    """The position of a parsed state. Raises ArgumentError if it is in a different order."""
    if "blocks" not in state:
        return Position(state["epoch"])
    if state["order"] != order:
        raise ArgumentError(
            "the state belongs to a different reader configuration: the order of tokens depends on the keys, "
            "batch_size, seed, filter, outputs, buffer_mib, rank and world. Use those of the reader that the state "
            f"came from, or begin an epoch: state={{'epoch': {state['epoch'] + (state['batch'] > 0)}}}."
        )
    return Position.of(state)


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
        stores, blocks = self._stored(keys, options, normalisation)
        reader = BatchReader(stores, blocks, options, state)
        reader.warn_of_few_places()
        return reader

    def _stored(self, keys: Any, options: BatchOptions, normalisation: Any) -> tuple[Stores, BlockTable]:
        """The arrays to read, and their blocks. Raises StoreError and ArgumentError."""
        raise NotImplementedError
