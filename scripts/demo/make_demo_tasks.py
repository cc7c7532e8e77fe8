"""Writes grid puzzles in ARC-AGI's task format, one JSON file per task.

    python scripts/demo/make_demo_tasks.py --out DIR [--tasks 120] [--seed 0]

    {"train": [{"input": grid, "output": grid}, ...], "test": [...]}      grid: rows of colours 0..9

A kind of task is a function from a random generator to a `Rule`: how to draw an input grid, and how to transform it.
The generator determines what all pairs of a task have in common (the colour map, the direction); the transformation is
a pure function of the input, so that every puzzle has an answer. Grids are int8 [height, width], both 3..20; 0 is
background.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int8
from scipy import ndimage

Grid = Int8[np.ndarray, "height width"]
Rng = np.random.Generator

MIN_SIDE = 3


@dataclass(frozen=True)
class Rule:
    """A task's rule: `draw` makes an input, and `transform` its output."""

    draw: Callable[[Rng], Grid]
    transform: Callable[[Grid], Grid]


# Inputs.


def empty(rng: Rng, low: int = 8, high: int = 16) -> Grid:
    return np.zeros(rng.integers(low, high + 1, size=2), np.int8)


def pick_colours(rng: Rng, count: int) -> list[int]:
    """Different colours other than the background."""
    return [int(colour) for colour in rng.permutation(np.arange(1, 10))[:count]]


def noise(rng: Rng, low: int = 3, high: int = 8) -> Grid:
    """Coloured cells on a background that covers about half of the grid."""
    grid = empty(rng, low, high)
    return (rng.integers(1, 10, grid.shape) * (rng.random(grid.shape) < 0.5)).astype(np.int8)


def pixels(rng: Rng) -> Grid:
    """Two to five single cells in different rows, columns and colours."""
    grid = empty(rng)
    count = int(rng.integers(2, 6))
    rows, columns = (rng.permutation(side)[:count] for side in grid.shape)
    grid[rows, columns] = pick_colours(rng, count)
    return grid


def boxes(rng: Rng, hollow: bool = False, sides: tuple[int, int] = (3, 5)) -> Grid:
    """Up to four rectangles of different colours that do not touch each other, with a margin of one cell."""
    grid = empty(rng, 10, 18)
    for colour in pick_colours(rng, 4):
        height, width = rng.integers(sides[0], sides[1] + 1, size=2)
        top, left = (int(rng.integers(1, grid.shape[axis] - side)) for axis, side in enumerate((height, width)))
        if not grid[top - 1 : top + height + 1, left - 1 : left + width + 1].any():
            grid[top : top + height, left : left + width] = colour
            if hollow:
                grid[top + 1 : top + height - 1, left + 1 : left + width - 1] = 0
    return grid


def sprite(rng: Rng) -> Grid:
    """One object, filled with noise in two colours, on an empty grid."""
    grid = empty(rng, 9, 15)
    height, width = rng.integers(3, 6, size=2)
    top, left = (int(rng.integers(0, grid.shape[axis] - side + 1)) for axis, side in enumerate((height, width)))
    grid[top : top + height, left : left + width] = rng.choice(pick_colours(rng, 2), size=(height, width))
    return grid


# Kinds of tasks.


def rotate(rng: Rng) -> Rule:
    quarter_turns = int(rng.integers(1, 4))
    return Rule(noise, lambda grid: np.rot90(grid, quarter_turns))


def flip(rng: Rng) -> Rule:
    axis = int(rng.integers(2))
    return Rule(noise, lambda grid: np.flip(grid, axis))


def transpose(rng: Rng) -> Rule:
    return Rule(noise, lambda grid: grid.T)


def roll(rng: Rng) -> Rule:
    axis, steps = int(rng.integers(2)), int(rng.choice([-2, -1, 1, 2]))
    return Rule(noise, lambda grid: np.roll(grid, steps, axis))


def recolour(rng: Rng) -> Rule:
    mapping = np.concatenate([[0], rng.permutation(np.arange(1, 10))]).astype(np.int8)
    return Rule(noise, lambda grid: mapping[grid])


def tile(rng: Rng) -> Rule:
    repeats = (int(rng.integers(2, 4)), int(rng.integers(1, 4)))
    return Rule(lambda rng: noise(rng, 3, 6), lambda grid: np.tile(grid, repeats))


def mirror_append(rng: Rng) -> Rule:
    axis = int(rng.integers(2))
    return Rule(noise, lambda grid: np.concatenate([grid, np.flip(grid, axis)], axis))


def scale_up(rng: Rng) -> Rule:
    factor = int(rng.integers(2, 4))
    return Rule(lambda rng: noise(rng, 3, 6), lambda grid: np.kron(grid, np.ones((factor, factor), np.int8)))


def gravity(rng: Rng) -> Rule:
    quarter_turns = int(rng.integers(4))

    def transform(grid: Grid) -> Grid:
        turned = np.rot90(grid, quarter_turns)
        fallen = np.take_along_axis(turned, np.argsort(turned != 0, axis=0, kind="stable"), axis=0)
        return np.rot90(fallen, -quarter_turns)

    return Rule(noise, transform)


def outline(rng: Rng) -> Rule:
    (colour,) = pick_colours(rng, 1)

    def transform(grid: Grid) -> Grid:
        border = ndimage.binary_dilation(grid != 0, np.ones((3, 3))) & (grid == 0)
        return np.where(border, np.int8(colour), grid)

    return Rule(boxes, transform)


def hollow_out(rng: Rng) -> Rule:
    return Rule(boxes, lambda grid: np.where(ndimage.binary_erosion(grid != 0, np.ones((3, 3))), np.int8(0), grid))


def fill_enclosed(rng: Rng) -> Rule:
    (colour,) = pick_colours(rng, 1)

    def transform(grid: Grid) -> Grid:
        return np.where(ndimage.binary_fill_holes(grid != 0) & (grid == 0), np.int8(colour), grid)

    return Rule(lambda rng: boxes(rng, hollow=True), transform)


def crop_to_object(rng: Rng) -> Rule:
    return Rule(sprite, lambda grid: grid[ndimage.find_objects((grid != 0).astype(np.int8))[0]])


def move_object(rng: Rng) -> Rule:
    shift = tuple(int(step) for step in rng.choice([-2, -1, 1, 2], size=2))

    def draw(rng: Rng) -> Grid:
        return np.pad(sprite(rng), 2)

    return Rule(draw, lambda grid: np.roll(grid, shift, (0, 1)))


def complete_symmetry(rng: Rng) -> Rule:
    axis, (cover, *colours) = int(rng.integers(2)), pick_colours(rng, 5)

    def draw(rng: Rng) -> Grid:
        half = rng.choice(colours, size=rng.integers(4, 9, size=2)).astype(np.int8)
        covered = half.copy()
        covered[: half.shape[0] // 2, : half.shape[1] // 2] = cover
        return np.concatenate([covered, np.flip(half, axis)], axis)

    return Rule(draw, lambda grid: np.where(grid == cover, np.flip(grid, axis), grid))


def remove_noise(rng: Rng) -> Rule:
    def draw(rng: Rng) -> Grid:
        grid = boxes(rng)
        far = ~ndimage.binary_dilation(grid != 0, np.ones((5, 5)))
        far[1::2], far[:, 1::2] = False, False
        return np.where(far & (rng.random(grid.shape) < 0.3), rng.integers(1, 10, grid.shape), grid).astype(np.int8)

    def transform(grid: Grid) -> Grid:
        return np.where(ndimage.binary_opening(grid != 0, np.ones((2, 2))), grid, np.int8(0))

    return Rule(draw, transform)


def keep_largest(rng: Rng) -> Rule:
    def sizes(grid: Grid) -> np.ndarray:
        return np.bincount(grid.ravel(), minlength=10)[1:]

    def draw(rng: Rng) -> Grid:
        grid = boxes(rng, sides=(3, 7))
        *_, second, largest = np.sort(sizes(grid))
        return grid if second < largest else draw(rng)  # a tie has no answer

    return Rule(draw, lambda grid: np.where(grid == 1 + sizes(grid).argmax(), grid, np.int8(0)))


def extend_lines(rng: Rng) -> Rule:
    quarter_turns = int(rng.integers(2))

    def transform(grid: Grid) -> Grid:
        turned = np.rot90(grid, quarter_turns)
        lines = np.broadcast_to(turned.max(axis=1, keepdims=True), turned.shape)
        return np.rot90(lines, -quarter_turns)

    return Rule(pixels, transform)


def sort_bars(rng: Rng) -> Rule:
    ascending = bool(rng.integers(2))

    def draw(rng: Rng) -> Grid:
        height, width = int(rng.integers(7, 13)), int(rng.integers(4, 8))
        heights = 1 + rng.permutation(height)[:width]
        bars = np.arange(height)[::-1, None] < heights
        return np.where(bars, rng.integers(1, 10, size=width), 0).astype(np.int8)

    def transform(grid: Grid) -> Grid:
        order = np.argsort(np.count_nonzero(grid, axis=0), kind="stable")
        return grid[:, order if ascending else order[::-1]]

    return Rule(draw, transform)


def count_to_bars(rng: Rng) -> Rule:
    colours = pick_colours(rng, int(rng.integers(3, 6)))

    def draw(rng: Rng) -> Grid:
        grid = empty(rng)
        cells = rng.permutation(grid.size)[: rng.integers(8, 13)]
        grid.flat[cells] = rng.choice(colours, size=len(cells))
        return grid

    def transform(grid: Grid) -> Grid:
        counts = np.array([np.count_nonzero(grid == colour) for colour in colours])
        bars = np.arange(max(counts.max(), MIN_SIDE)) < counts[:, None]
        return np.where(bars, np.array(colours)[:, None], 0).astype(np.int8)

    return Rule(draw, transform)


def combine_halves(rng: Rng) -> Rule:
    left_colour, wall, right_colour, result = pick_colours(rng, 4)
    combine = [np.logical_and, np.logical_or, np.logical_xor][rng.integers(3)]

    def draw(rng: Rng) -> Grid:
        shape = rng.integers(3, 9, size=2)
        left, right = (rng.integers(0, 2, shape) * colour for colour in (left_colour, right_colour))
        return np.concatenate([left, np.full((shape[0], 1), wall), right], axis=1).astype(np.int8)

    def transform(grid: Grid) -> Grid:
        width = grid.shape[1] // 2
        return (combine(grid[:, :width], grid[:, width + 1 :]) * result).astype(np.int8)

    return Rule(draw, transform)


KINDS: tuple[Callable[[Rng], Rule], ...] = (
    rotate, flip, transpose, roll, recolour, tile, mirror_append, scale_up, gravity, outline, hollow_out, fill_enclosed,
    crop_to_object, move_object, complete_symmetry, remove_noise, keep_largest, extend_lines, sort_bars, count_to_bars,
    combine_halves,
)  # fmt: skip


def make_task(kind: Callable[[Rng], Rule], rng: Rng) -> dict[str, list[dict[str, list[list[int]]]]]:
    """Makes a task of 3-5 train and 1-2 test pairs. Inputs are different, and no output equals its input."""
    rule = kind(rng)
    num_train, num_test = int(rng.integers(3, 6)), int(rng.integers(1, 3))
    pairs: list[dict[str, list[list[int]]]] = []
    while len(pairs) < num_train + num_test:
        grid = rule.draw(rng)
        pair = {"input": grid.tolist(), "output": rule.transform(grid).tolist()}
        if pair["input"] != pair["output"] and pair not in pairs:
            pairs.append(pair)
    return {"train": pairs[:num_train], "test": pairs[num_train:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the task files")
    parser.add_argument("--tasks", type=int, default=120, help="number of tasks, divided among the kinds")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for number in range(args.tasks):
        kind = KINDS[number % len(KINDS)]
        task = make_task(kind, np.random.default_rng([args.seed, number]))
        (args.out / f"{kind.__name__}-{number // len(KINDS):03}.json").write_text(json.dumps(task))
    print(f"{args.tasks} tasks of {min(args.tasks, len(KINDS))} kinds in {args.out}")


if __name__ == "__main__":
    main()
