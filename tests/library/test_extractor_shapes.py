"""The few shapes for which an Extractor compiles, and the choice among them."""

import numpy as np
import pytest

from pipeline.config.choices import Packing
from pipeline.library.shapes import MAX_SHAPES, ladder, smallest


@pytest.mark.parametrize(
    ("rows", "length", "devices", "halves_length", "expected"),
    [
        (4, 128, 1, True, [(1, 64), (1, 128), (2, 128), (4, 128)]),
        (8, 512, 1, True, [(1, 64), (1, 128), (1, 256), (2, 512), (4, 512), (8, 512)]),
        (8, 512, 4, True, [(4, 64), (4, 128), (4, 256), (4, 512), (8, 512)]),
        (8, 512, 1, False, [(1, 512), (2, 512), (4, 512), (8, 512)]),
        (6, 100, 1, True, [(3, 100), (6, 100)]),
        (6, 100, 6, True, [(6, 100)]),
        (1, 130, 1, True, [(1, 65), (1, 130)]),
    ],
)
def test_a_ladder_doubles_lengths_then_rows(rows, length, devices, halves_length, expected):
    assert ladder(rows, length, devices, halves_length) == tuple(expected)


def test_a_ladder_is_short_and_ascending():
    for rows in (1, 8, 256, 4096):
        for length in (1, 64, 1024, 131072):
            shapes = ladder(rows, length, 1, True)
            assert len(shapes) <= MAX_SHAPES
            assert shapes[-1] == (rows, length)
            assert [shape.rows * shape.length for shape in shapes] == sorted({r * t for r, t in shapes})


@pytest.mark.parametrize(
    ("sizes", "packing", "expected"),
    [
        ([1], Packing.pack, (1, 64)),
        ([64], Packing.pack, (1, 64)),
        ([32, 33], Packing.pack, (1, 128)),
        ([65], Packing.pack, (1, 128)),
        ([100, 100], Packing.pack, (2, 128)),
        ([86, 86, 84], Packing.pack, (4, 128)),  # as many tokens as two rows have, but they do not fit into two
        ([128] * 5, Packing.pack, (4, 128)),  # more than a step has
        ([3, 3], Packing.pad, (2, 128)),
    ],
)
def test_the_smallest_shape_that_takes_all(sizes, packing, expected):
    assert smallest(ladder(4, 128, 1, True), np.array(sizes), packing) == expected
