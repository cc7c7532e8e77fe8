"""Augmented versions of a task: geometry, colours and the order of examples. The store has what is needed to undo them.

Version k of a task only depends on the seed, the task's name and k, not on the order in which tasks are read or on the
process. All examples are kept.
"""

import hashlib
from dataclasses import dataclass

import numpy as np

from pipeline.config.schema import ArcData
from pipeline.core.errors import ConfigError
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
_ALLOWED = {"dihedral": tuple(_GEOMETRIES), "rotations": tuple(_GEOMETRIES)[:4]}  # the first that is named counts
_NAMES = (*_ALLOWED, "colors", "examples")


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


def augmented_parts(config: ArcData) -> set[str]:
    """What `data.augment` names. Raises ConfigError for an unknown name."""
    names = config.augment.split("+")
    if unknown := [name for name in names if name not in _NAMES]:
        raise ConfigError(f"data.augment = {config.augment}: {unknown[0]!r} is unknown, expected {', '.join(_NAMES)}.")
    return set(names)


def augmentation(config: ArcData, task: Task, version: int) -> Augmentation:
    """The augmentation of version `version` of a task. Version 0 is the unchanged task."""
    parts = augmented_parts(config) if version else set()
    geometries = next((allowed for name, allowed in _ALLOWED.items() if name in parts), ("identity",))
    colors, order = tuple(range(NUM_COLORS)), tuple(range(len(task.examples)))
    key = f"{config.seed}/{task.name}/{version}"
    return Augmentation(
        geometry=geometries[_permutation(f"{key}/geometry", len(geometries))[0]],
        colors=_permutation(f"{key}/colors", NUM_COLORS) if "colors" in parts else colors,
        order=_permutation(f"{key}/examples", len(order)) if "examples" in parts else order,
    )


def _permutation(key: str, count: int) -> tuple[int, ...]:
    """A permutation made by sorting hashes, so that it is the same in every version of Python and numpy."""
    return tuple(sorted(range(count), key=lambda item: hashlib.sha256(f"{key}/{item}".encode()).digest()))
