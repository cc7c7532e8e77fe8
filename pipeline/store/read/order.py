"""The order in which a reader visits a store. Pure arithmetic on integers; nothing is read.

Blocks are put in random order; consecutive blocks of that order form a window, and the pieces of a window are put in
random order again, both by `permutation`. So only the side arrays of one window are held in memory. A buffer takes the
next `pieces_per_buffer` pieces, and its tokens come out in random order. Without a seed everything stays in storage
order.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

VERSION = 2  # of the random order; the first was numpy's Generator.permutation
_PIECES, _TOKENS = 1, 2  # the kinds of things that are put in order


class Piece(NamedTuple):
    """Rows `first` .. `first + num_rows` of a block: the unit of reading. `block` counts the stored blocks."""

    block: int
    first: int
    num_rows: int
    window: int


class Buffer(NamedTuple):
    """The pieces that are mixed with each other. `index` counts an epoch's buffers of one rank."""

    epoch: int
    index: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class ReadingOrder:
    """The pieces that rank `rank` of `world` reads, in their order.

    block_rows: rows of each stored block. seed: None for storage order. A rank takes a contiguous share of the epoch's
    sequence of pieces: shares do not overlap, and differ by at most one piece.
    """

    block_rows: tuple[int, ...]
    piece_rows: int
    pieces_per_buffer: int
    window_blocks: int
    seed: int | None = None
    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise ValueError(f"rank {self.rank} of {self.world}: rank must be 0 to world - 1")

    def pieces(self, epoch: int) -> Iterator[Piece]:
        """This rank's pieces of an epoch."""
        blocks, ends, first, last = self._share(epoch)
        if first == last:
            return
        begin, end = np.searchsorted(ends, (first, last - 1), side="right").tolist()
        for window, at in enumerate(range(begin, end + 1, self.window_blocks)):
            pieces = []
            for i in range(at, min(at + self.window_blocks, end + 1)):
                block, before = int(blocks[i]), int(ends[i - 1]) if i else 0
                for piece in range(max(first, before) - before, min(last, int(ends[i])) - before):
                    start = piece * self.piece_rows
                    num_rows = min(self.piece_rows, self.block_rows[block] - start)
                    pieces.append(Piece(block, start, num_rows, window))
            yield from (pieces[i] for i in self._permuted(len(pieces), epoch, _PIECES, self.rank, window))

    def buffers(self, epoch: int, start: int = 0) -> Iterator[Buffer]:
        """This rank's buffers of an epoch, from buffer `start` on."""
        pieces = islice(self.pieces(epoch), start * self.pieces_per_buffer, None)
        index = start
        while taken := tuple(islice(pieces, self.pieces_per_buffer)):
            yield Buffer(epoch, index, taken)
            index += 1

    def shuffled(self, buffer: Buffer, slots: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
        """The slots of a buffer in the order in which batches take them."""
        return slots[self._permuted(len(slots), buffer.epoch, _TOKENS, self.rank, buffer.index)]

    def tokens_of_ranks(
        self, epoch: int, block_tokens: Int64[np.ndarray, " blocks"], count: Callable[[list[int]], list[list[int]]]
    ) -> list[int]:
        """How many tokens each rank has in an epoch.

        block_tokens: those of each block. count: gives those of each piece of some blocks; it is called with the blocks
        that two ranks share.
        """
        blocks, ends, *_ = self._share(epoch)
        sums = np.cumsum([0, *block_tokens[blocks]])
        ends = np.array([0, *ends])
        bounds = np.array([int(ends[-1]) * rank // self.world for rank in range(self.world + 1)])
        at = np.searchsorted(ends, bounds, side="right") - 1  # whole blocks before each bound
        split = np.flatnonzero(bounds > ends[at])
        tokens = sums[at]
        for i, pieces in zip(split.tolist(), count(blocks[at[split]].tolist()), strict=True):
            tokens[i] += sum(pieces[: bounds[i] - ends[at[i]]])
        return np.diff(tokens).tolist()

    def _share(self, epoch: int) -> tuple[Int64[np.ndarray, " blocks"], Int64[np.ndarray, " blocks"], int, int]:
        """The epoch's order of blocks, the number of pieces up to and with each, and the pieces of this rank."""
        num_blocks = len(self.block_rows)
        blocks = self._permuted(num_blocks, epoch)
        ends = np.cumsum(-(-np.asarray(self.block_rows, np.int64)[blocks] // self.piece_rows))
        total = int(ends[-1]) if num_blocks else 0
        return blocks, ends, total * self.rank // self.world, total * (self.rank + 1) // self.world

    def _permuted(self, count: int, epoch: int, *purpose: int) -> Int64[np.ndarray, " count"]:
        return np.arange(count) if self.seed is None else permutation(count, self.seed, epoch, *purpose)


def permutation(count: int, *seeds: int) -> Int64[np.ndarray, " count"]:
    """0 .. count - 1 in an order that depends on the seeds alone.

    PCG64 with SeedSequence(seeds) gives one 64-bit number per place. The lowest bits of each are replaced by its place,
    and the numbers are sorted. numpy guarantees these numbers in all of its versions (NEP 19), but not the result of
    Generator.permutation.
    """
    place_bits = np.uint64((1 << max(0, count - 1).bit_length()) - 1)
    numbers = np.random.PCG64(np.random.SeedSequence(seeds)).random_raw(count)
    keys = (numbers & ~place_bits) | np.arange(count, dtype=np.uint64)
    return (np.sort(keys) & place_bits).astype(np.int64)
