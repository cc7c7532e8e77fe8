"""Writes grid puzzles in ARC-AGI's task format, one JSON file per task.

    python scripts/demo/make_demo_tasks.py --out DIR [--tasks 120]

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

Grid = Int8[np.ndarray, "height width"]
Rng = np.random.Generator


@dataclass(frozen=True)
class Rule:
    """A task's rule: `draw` makes an input, and `transform` its output."""

    draw: Callable[[Rng], Grid]
    transform: Callable[[Grid], Grid]


def noise(rng: Rng, low: int = 3, high: int = 8) -> Grid:
    """Coloured cells on a background that covers about half of the grid."""
    shape = rng.integers(low, high + 1, size=2)
    return (rng.integers(1, 10, shape) * (rng.random(shape) < 0.5)).astype(np.int8)


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


def crop_to_object(rng: Rng) -> Rule:
    def draw(rng: Rng) -> Grid:
        margins = rng.integers(1, 5, size=(2, 2))
        return np.pad(rng.integers(1, 10, rng.integers(3, 6, size=2)).astype(np.int8), margins)

    def transform(grid: Grid) -> Grid:
        return grid[np.ix_(grid.any(axis=1), grid.any(axis=0))]

    return Rule(draw, transform)


KINDS: tuple[Callable[[Rng], Rule], ...] = (
    *(rotate, flip, transpose, roll, recolour),
    *(tile, mirror_append, scale_up, gravity, crop_to_object),
)


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


def write_tasks(out: Path, num_tasks: int) -> None:
    """Writes tasks to a folder, divided among the kinds; always the same ones."""
    out.mkdir(parents=True, exist_ok=True)
    for number in range(num_tasks):
        kind = KINDS[number % len(KINDS)]
        task = make_task(kind, np.random.default_rng([0, number]))
        (out / f"{kind.__name__}-{number // len(KINDS):03}.json").write_text(json.dumps(task))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the task files")
    parser.add_argument("--tasks", type=int, default=120, help="number of tasks, divided among the kinds")
    args = parser.parse_args()
    write_tasks(args.out, args.tasks)
    print(f"{args.tasks} tasks in {args.out}")
