"""The order in which a reader reads a store. Pure arithmetic on integers, without I/O.

`permutation` puts the blocks in random order. Consecutive blocks of that order form a window, whose pieces are then put
in random order, so that only the side arrays of one window need to be in memory. A buffer takes the next
`pieces_per_buffer` pieces and yields their tokens in random order. Without a seed, everything is in storage order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

_PIECES, _TOKENS = 1, 2  # what is permuted


class Piece(NamedTuple):
    """The unit of reading: rows `first` .. `first + num_rows` of a block. `block`: an index into the stored blocks."""

    block: int
    first: int
    num_rows: int
    window: int


class Filling(NamedTuple):
    """One filling of a buffer: pieces whose tokens are shuffled together. `index`: its number within its epoch and
    rank."""

    epoch: int
    index: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class ReadingOrder:
    """The pieces that rank `rank` of `world` reads, in order.

    block_rows: the number of rows of each stored block. seed: None for storage order.
    A rank reads a contiguous share of the epoch's sequence of pieces. Shares do not overlap, and their sizes differ by
    at most one piece.
    """

    block_rows: tuple[int, ...]
    piece_rows: int
    pieces_per_buffer: int
    window_blocks: int
    seed: int | None = None
    rank: int = 0
    world: int = 1

    def pieces(self, epoch: int) -> Iterator[Piece]:
        """This rank's pieces of an epoch."""
        blocks, ends, first, last = self._share(epoch)
        if first == last:
            return
        begin, end = np.searchsorted(ends, (first, last - 1), side="right").tolist()
        for window, window_begin in enumerate(range(begin, end + 1, self.window_blocks)):
            pieces = []
            for i in range(window_begin, min(window_begin + self.window_blocks, end + 1)):
                block, block_begin = int(blocks[i]), int(ends[i - 1]) if i else 0
                for piece in range(max(first, block_begin) - block_begin, min(last, int(ends[i])) - block_begin):
                    start = piece * self.piece_rows
                    num_rows = min(self.piece_rows, self.block_rows[block] - start)
                    pieces.append(Piece(block, start, num_rows, window))
            yield from (pieces[i] for i in self._permuted(len(pieces), epoch, _PIECES, self.rank, window))

    def fillings(self, epoch: int, start: int = 0) -> Iterator[Filling]:
        """This rank's fillings of an epoch, from number `start` on."""
        pieces = islice(self.pieces(epoch), start * self.pieces_per_buffer, None)
        index = start
        while buffer_pieces := tuple(islice(pieces, self.pieces_per_buffer)):
            yield Filling(epoch, index, buffer_pieces)
            index += 1

    def shuffled(self, filling: Filling, slots: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
        """The slots of a filled buffer, in the order in which batches use them."""
        return slots[self._permuted(len(slots), filling.epoch, _TOKENS, self.rank, filling.index)]

    def tokens_per_rank(self, epoch: int, block_tokens: Sequence[Int64[np.ndarray, " pieces"]]) -> list[int]:
        """How many tokens each rank has in an epoch. block_tokens: how many each piece of each block has."""
        blocks, *_ = self._share(epoch)
        sums = np.cumsum([0, *chain.from_iterable(block_tokens[block] for block in blocks.tolist())])
        bounds = [(len(sums) - 1) * rank // self.world for rank in range(self.world + 1)]
        return np.diff(sums[bounds]).tolist()

    def _share(self, epoch: int) -> tuple[Int64[np.ndarray, " blocks"], Int64[np.ndarray, " blocks"], int, int]:
        """The epoch's blocks in order, the number of pieces up to and including each, and the range of this rank's
        pieces."""
        num_blocks = len(self.block_rows)
        blocks = self._permuted(num_blocks, epoch)
        ends = np.cumsum(-(-np.asarray(self.block_rows, np.int64)[blocks] // self.piece_rows))
        total = int(ends[-1]) if num_blocks else 0
        return blocks, ends, total * self.rank // self.world, total * (self.rank + 1) // self.world

    def _permuted(self, count: int, epoch: int, *purpose: int) -> Int64[np.ndarray, " count"]:
        return np.arange(count) if self.seed is None else permutation(count, self.seed, epoch, *purpose)


def permutation(count: int, *seeds: int) -> Int64[np.ndarray, " count"]:
    """0 .. count - 1 in an order that depends only on the seeds.

    PCG64 with SeedSequence(seeds) gives one 64-bit number per index. The lowest bits of each are replaced by its index,
    and the numbers are sorted. numpy guarantees that these numbers are the same in all versions (NEP 19), which it does
    not for Generator.permutation.
    """
    index_bits = np.uint64((1 << max(0, count - 1).bit_length()) - 1)
    numbers = np.random.PCG64(np.random.SeedSequence(seeds)).random_raw(count)
    keys = (numbers & ~index_bits) | np.arange(count, dtype=np.uint64)
    return (np.sort(keys) & index_bits).astype(np.int64)
