"""In which order a reader meets a store. Pure arithmetic on integers; nothing is read.

Blocks are put in random order; consecutive blocks of that order form a window, and the pieces of a window are put in
random order again. So what is held in memory beside the activations is that of one window. A buffer takes the next
`pieces_per_buffer` pieces, and its tokens come out in random order. Without a seed everything stays in storage order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

_PIECES, _TOKENS = 1, 2  # what a random generator is for


class Piece(NamedTuple):
    """Rows `first` .. `first + num_rows` of a block: what is read at a time. `block` counts the stored blocks."""

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
    """Which pieces rank `rank` of `world` reads, and in which order.

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
        rng = self._rng(epoch, _PIECES, self.rank)
        begin, end = np.searchsorted(ends, (first, last - 1), side="right").tolist()
        for window, at in enumerate(range(begin, end + 1, self.window_blocks)):
            pieces = []
            for i in range(at, min(at + self.window_blocks, end + 1)):
                block, before = int(blocks[i]), int(ends[i - 1]) if i else 0
                for piece in range(max(first, before) - before, min(last, int(ends[i])) - before):
                    start = piece * self.piece_rows
                    num_rows = min(self.piece_rows, self.block_rows[block] - start)
                    pieces.append(Piece(block, start, num_rows, window))
            yield from (pieces if rng is None else (pieces[i] for i in rng.permutation(len(pieces))))

    def buffers(self, epoch: int, start: int = 0) -> Iterator[Buffer]:
        """This rank's buffers of an epoch, from buffer `start` on."""
        pieces = islice(self.pieces(epoch), start * self.pieces_per_buffer, None)
        index = start
        while taken := tuple(islice(pieces, self.pieces_per_buffer)):
            yield Buffer(epoch, index, taken)
            index += 1

    def shuffled(self, buffer: Buffer, slots: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
        """The slots of a buffer in the order in which they are handed out."""
        rng = self._rng(buffer.epoch, _TOKENS, self.rank, buffer.index)
        return slots if rng is None else rng.permutation(slots)

    def tokens_of_ranks(self, epoch: int, piece_tokens: Sequence[Sequence[int]]) -> list[int]:
        """How many tokens each rank has in an epoch; `piece_tokens` are those of each piece of each block."""
        blocks = self._share(epoch)[0]
        sums = np.cumsum([0, *(tokens for block in blocks.tolist() for tokens in piece_tokens[block])])
        bounds = [(len(sums) - 1) * rank // self.world for rank in range(self.world + 1)]
        return np.diff(sums[bounds]).tolist()

    def _share(self, epoch: int) -> tuple[Int64[np.ndarray, " blocks"], Int64[np.ndarray, " blocks"], int, int]:
        """The epoch's order of blocks, the number of pieces up to and with each, and the pieces of this rank."""
        rng = self._rng(epoch)
        num_blocks = len(self.block_rows)
        blocks = np.arange(num_blocks) if rng is None else rng.permutation(num_blocks)
        ends = np.cumsum(-(-np.asarray(self.block_rows, np.int64)[blocks] // self.piece_rows))
        total = int(ends[-1]) if num_blocks else 0
        return blocks, ends, total * self.rank // self.world, total * (self.rank + 1) // self.world

    def _rng(self, epoch: int, *purpose: int) -> np.random.Generator | None:
        return None if self.seed is None else np.random.default_rng([self.seed, epoch, *purpose])
