"""Augmented versions of a task: geometry, colours and the order of examples. The store has what is needed to undo them.

Version k of a task only depends on the seed, the task's name and k, not on the order in which tasks are read or on the
process. All examples are kept.
"""

import hashlib
from dataclasses import dataclass

import numpy as np

from pipeline.config.choices import Geometry
from pipeline.data.arc.tasks import NUM_COLORS, Grid, Pair, Task

# name -> (quarter turns counterclockwise, then mirrored left to right)
_GEOMETRIES = {
    "identity": (0, False),
    "rot90": (1, False),
    "rot180": (2, False),
    "rot270": (3, False),
    "flip": (0, True),
    "rot90_flip": (1, True),
    "rot180_flip": (2, True),
    "rot270_flip": (3, True),
}
_ALLOWED = {
    Geometry.none: ("identity",),
    Geometry.rotations: ("identity", "rot90", "rot180", "rot270"),
    Geometry.dihedral: tuple(_GEOMETRIES),
}


@dataclass(frozen=True)
class Augmentation:
    """colors: `colors[c]` is the new colour of c. order: `order[i]` is the original number of the i-th example."""

    geometry: str
    colors: tuple[int, ...]
    order: tuple[int, ...]

    def apply(self, task: Task) -> Task:
        """The augmented task. Test pairs keep their order."""
        examples = tuple(self._pair(task.examples[number]) for number in self.order)
        return Task(task.name, examples, tuple(self._pair(pair) for pair in task.tests))

    def apply_grid(self, grid: Grid) -> Grid:
        turns, mirrored = _GEOMETRIES[self.geometry]
        turned = np.rot90(grid, turns)
        return np.array(self.colors, np.int8)[np.fliplr(turned) if mirrored else turned]

    def _pair(self, pair: Pair) -> Pair:
        return Pair(self.apply_grid(pair.input), None if pair.output is None else self.apply_grid(pair.output))


def augmentation(
    seed: int,
    task: str,
    version: int,
    num_examples: int,
    *,
    geometry: Geometry,
    permute_colors: bool,
    permute_examples: bool,
) -> Augmentation:
    """The augmentation of version `version` of a task. Version 0 is the unchanged task."""
    colors, order = tuple(range(NUM_COLORS)), tuple(range(num_examples))
    if version == 0:
        return Augmentation("identity", colors, order)
    allowed = _ALLOWED[geometry]
    key = f"{seed}/{task}/{version}"
    return Augmentation(
        geometry=allowed[_permutation(f"{key}/geometry", len(allowed))[0]],
        colors=_permutation(f"{key}/colors", NUM_COLORS) if permute_colors else colors,
        order=_permutation(f"{key}/examples", num_examples) if permute_examples else order,
    )


def _permutation(key: str, count: int) -> tuple[int, ...]:
    """A permutation made by sorting hashes, so that it is the same in every version of Python and numpy."""
    return tuple(sorted(range(count), key=lambda item: hashlib.sha256(f"{key}/{item}".encode()).digest()))
