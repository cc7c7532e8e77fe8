import numpy as np
import pytest

from pipeline.data.packing import fill, pack, pad


def test_pack_places_pieces_by_best_fit():
    """Two rows of 10. The fourth piece fills a row and takes the first one; the fifth does not fit."""
    placement = pack(np.array([3, 4, 3, 10, 1]), rows=2, length=10)
    assert placement.num_rows == 2
    assert placement.row.tolist() == [1, 1, 1, 0]
    assert placement.column.tolist() == [0, 3, 7, 0]
    assert placement.segment.tolist() == [1, 2, 3, 1]
    placement = pad(np.array([3, 4, 3]), rows=2)  # one piece per row
    assert placement.num_rows == 2
    assert (placement.row.tolist(), placement.column.tolist(), placement.segment.tolist()) == ([0, 1], [0, 0], [1, 1])


def test_fill_writes_tokens_segments_positions_and_documents():
    sizes = [2, 1, 4]
    tokens = [np.array([5, 6], np.int32), np.array([7], np.int32), np.array([1, 2, 3, 4], np.int32)]
    assert pack(np.array([6, 5, 5, 4, 10]), rows=3, length=10).num_pieces == 5  # a block is not closed early
    assert fill(pack(np.array([], np.int64), 4, 8), [], np.array([], np.int64), 8)["tokens"].shape == (0, 8)
    rows = fill(pack(np.array(sizes), 2, 4), tokens, np.array([10, 11, 12]), 4)
    assert rows["tokens"].tolist() == [[1, 2, 3, 4], [5, 6, 7, 0]]
    assert rows["segments"].tolist() == [[1, 1, 1, 1], [1, 1, 2, 0]]
    assert rows["positions"].tolist() == [[0, 1, 2, 3], [0, 1, 0, 0]]
    assert rows["documents"].tolist() == [[12, 12, 12, 12], [10, 10, 11, -1]]


def fills(rng: np.random.Generator, low: int, high: int, rows: int, length: int, blocks: int) -> list[float]:
    pieces = np.array([], np.int64)
    result = []
    for _ in range(blocks):
        while pieces.sum() <= rows * length:
            pieces = np.append(pieces, rng.integers(low, high + 1, 64))
        count = pack(pieces, rows, length).num_pieces
        result.append(pieces[:count].sum() / (rows * length))
        pieces = pieces[count:]
    return result


@pytest.mark.parametrize(("low", "high", "length", "least"), [(20, 250, 256, 0.93), (1, 100, 1024, 0.99)])
def test_rows_are_well_filled(low, high, length, least):
    assert np.mean(fills(np.random.default_rng(0), low, high, 64, length, 40)) >= least
