"""The few shapes that an Extractor compiles its step for, so that calls of different sizes share programs."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

from pipeline.config.choices import Packing
from pipeline.data.packing import pack, pad

MAX_SHAPES = 6
_MIN_LENGTH = 64  # of halved rows: shorter steps are dominated by launch time


class Shape(NamedTuple):
    """Rows per step, and tokens per row."""

    rows: int
    length: int


def ladder(rows: int, length: int, row_multiple: int, halves_length: bool) -> tuple[Shape, ...]:
    """At most `MAX_SHAPES` shapes in ascending order, the last of which is the whole step.

    Halves the rows first, as long as they stay a multiple of `row_multiple` (the devices that share the rows), then the
    length.
    """
    shapes = [Shape(rows, length)]
    while shapes[-1].rows % (2 * row_multiple) == 0:
        shapes.append(Shape(shapes[-1].rows // 2, length))
    while halves_length and shapes[-1].length % 2 == 0 and shapes[-1].length >= 2 * _MIN_LENGTH:
        shapes.append(Shape(shapes[-1].rows, shapes[-1].length // 2))
    last = len(shapes) - 1
    kept = {round(last * step / (MAX_SHAPES - 1)) for step in range(MAX_SHAPES)}
    return tuple(shapes[number] for number in sorted(kept, reverse=True))


def smallest(shapes: Sequence[Shape], sizes: Int64[np.ndarray, " P"], packing: Packing) -> Shape:
    """The first shape that fits all windows of these sizes into one step; the last shape if none does."""
    return next((shape for shape in shapes if _fits(shape, sizes, packing)), shapes[-1])


def _fits(shape: Shape, sizes: Int64[np.ndarray, " P"], packing: Packing) -> bool:
    if sizes.max() > shape.length or sizes.sum() > shape.rows * shape.length:
        return False
    placement = pad(sizes, shape.rows) if packing is Packing.pad else pack(sizes, *shape)
    return placement.num_pieces == len(sizes)
