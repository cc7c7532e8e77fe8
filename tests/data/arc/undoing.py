"""Recovers the original grids from prompts and augmented tasks."""

import re

import numpy as np

from pipeline.data.arc.prompts import GridEncoder
from pipeline.data.arc.tasks import Augmentation, Grid, Pair, Task

_LABEL = re.compile(r"(input|output):\n")
_TURNS = {"rot90": 1, "rot180": 2, "rot270": 3}  # counterclockwise, before the mirror


def decode_prompt(text: str, encoder: GridEncoder) -> list[Pair]:
    """The pairs of a prompt, plain or rendered by a chat template; the last is the test.

    Raises ValueError if labels or grids do not form a prompt.
    """
    grids: list[tuple[str, Grid]] = []
    labels = list(_LABEL.finditer(text))
    for label in labels:
        if label is labels[-1] and label[1] == "output" and not _has_grid(text, label.end(), encoder):
            break
        grids.append((label[1], encoder.decode_at(text, label.end())[0]))
    expected = ["input" if number % 2 == 0 else "output" for number in range(len(grids))]
    if not grids or [name for name, _ in grids] != expected:
        raise ValueError(f"labels {[name for name, _ in grids]}, expected inputs and outputs in turn")
    outputs = [grid for _, grid in grids[1::2]] + [None] * (len(grids) % 2)
    return [Pair(grid, output) for (_, grid), output in zip(grids[::2], outputs, strict=True)]


def _has_grid(text: str, begin: int, encoder: GridEncoder) -> bool:
    try:
        encoder.decode_at(text, begin)
    except ValueError:
        return False
    return True


def original_grid(change: Augmentation, grid: Grid) -> Grid:
    """The grid that `change` turned into `grid`."""
    colored = np.argsort(change.colors)[grid]
    turned = np.fliplr(colored) if change.geometry.endswith("flip") else colored
    return np.rot90(turned, -_TURNS.get(change.geometry.removesuffix("_flip"), 0))


def original_task(change: Augmentation, task: Task) -> Task:
    """The task that `change` turned into `task`."""

    def original(pair: Pair) -> Pair:
        return Pair(
            original_grid(change, pair.input), None if pair.output is None else original_grid(change, pair.output)
        )

    examples = tuple(original(task.examples[number]) for number in np.argsort(change.order))
    return Task(task.name, examples, tuple(map(original, task.tests)))
