import itertools

import numpy as np
import pytest

from pipeline.store.read.order import ReadingOrder, permutation

BLOCK_ROWS = (10, 3, 10, 10, 1, 7, 10, 10)
PIECE_ROWS = 4
ALL = {(block, row) for block, rows in enumerate(BLOCK_ROWS) for row in range(rows)}


def order(**changes) -> ReadingOrder:
    given = {"block_rows": BLOCK_ROWS, "piece_rows": PIECE_ROWS, "pieces_per_buffer": 3, "window_blocks": 2, "seed": 7}
    return ReadingOrder(**(given | changes))


def rows(pieces) -> list[tuple[int, int]]:
    return [(piece.block, piece.first + r) for piece in pieces for r in range(piece.num_rows)]


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("world", [1, 2, 3, 5, 19, 40])
@pytest.mark.parametrize("window_blocks", [1, 2, 100])
def test_the_ranks_together_read_every_row_once(seed, world, window_blocks):
    orders = [order(seed=seed, world=world, rank=rank, window_blocks=window_blocks) for rank in range(world)]
    for epoch in range(3):
        shares = [list(o.pieces(epoch)) for o in orders]
        found = [row for share in shares for row in rows(share)]
        assert len(found) == len(ALL)
        assert set(found) == ALL
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_windows_are_consecutive_and_limit_the_mixed_blocks():
    windows = [piece.window for piece in order().pieces(0)]
    assert windows == sorted(windows)
    for _, pieces in itertools.groupby(order().pieces(0), key=lambda piece: piece.window):
        assert len({piece.block for piece in pieces}) <= 2


def test_the_order_does_not_change_between_versions():
    """These numbers may not change, since readers resume from saved states, also with other versions of numpy."""
    assert permutation(10, 7, 0).tolist() == [6, 3, 4, 9, 0, 2, 8, 7, 5, 1]
    assert [rows(order().pieces(1))[i] for i in (0, 9, 30)] == [(3, 0), (1, 1), (7, 5)]
    assert order().shuffled(next(order().fillings(1)), np.arange(10)).tolist() == [1, 8, 7, 2, 4, 9, 3, 6, 5, 0]
    second = order(rank=1, world=2).shuffled(next(order().fillings(1)), np.arange(10))
    assert second.tolist() != order().shuffled(next(order().fillings(1)), np.arange(10)).tolist()
    assert permutation(0, 1).tolist() == []
    many = permutation(100_000, 5)
    assert np.array_equal(np.sort(many), np.arange(100_000))
    assert abs(np.corrcoef(many, np.arange(100_000))[0, 1]) < 0.02
