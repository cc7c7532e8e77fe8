"""ARC-AGI tasks: grids, pairs, parsing the formats in which datasets store them, and augmented versions.

Version k of a task has another geometry, other colours, or another order of examples. It only depends on the seed, the
task's name and k, not on the order in which tasks are read or on the process. All examples are kept, and the store has
what is needed to undo the changes.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int8

from pipeline.config.schema import ArcData
from pipeline.core.errors import ConfigError, InputError
from pipeline.core.messages import shown

Grid = Int8[np.ndarray, "_ _"]  # rows, columns; unnamed axes, since one call may have grids of different shapes
NUM_COLORS = 10

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
class Pair:
    """An input grid and its output; None if that is unknown."""

    input: Grid
    output: Grid | None


@dataclass(frozen=True)
class Task:
    """Examples, all with outputs, and at least one test pair."""

    name: str
    examples: tuple[Pair, ...]
    tests: tuple[Pair, ...]


def parse_task(name: str, place: str, value: Any, solutions: Any = None) -> Task:
    """Parses a task from JSON: `{"train": [pair, ...], "test": [pair, ...]}`, or `{"examples": [pair, ...]}`.

    A pair is `{"input": grid, "output": grid}` or `[input, output]`. The last pair of `examples` is the test.
    place: for messages. solutions: the list of test outputs, if these are stored separately.

    Raises InputError for a missing key, a name that is not UTF-8, and a grid that is empty, ragged, or has values other
    than the colours 0 to 9.
    """
    try:
        return _task(name, value, solutions)
    except ValueError as error:
        printed = name.encode(errors="backslashreplace").decode()
        raise InputError(f"{place}, task {printed}: {error}. Repair the task or set data.on_error=skip.") from error


def _grid(value: Any, what: str) -> Grid:
    """A grid from nested lists. Raises ValueError with `what` as the subject of the message."""
    try:
        grid = np.array(value)
    except ValueError:  # rows of different lengths
        grid = np.array(None)
    is_grid = grid.ndim == 2 and grid.size and grid.dtype.kind == "i"
    has_booleans = is_grid and any(isinstance(cell, bool) for row in value for cell in row)  # 1 and 0 to numpy
    if not is_grid or has_booleans or grid.min() < 0 or grid.max() >= NUM_COLORS:
        raise ValueError(
            f"{what} is {_brief(value)}, expected rows of the same length of colours 0 to {NUM_COLORS - 1}"
        )
    return grid.astype(np.int8)


def _task(name: str, value: Any, solutions: Any) -> Task:
    if any(0xD800 <= ord(character) < 0xE000 for character in name):
        raise ValueError("its name has a lone surrogate, so is not UTF-8")
    if not isinstance(value, Mapping):
        raise ValueError(f"the task is {_brief(value)}, expected an object")
    if value.get("examples") is not None:
        pairs = _list(value["examples"], "examples")
        examples, tests = pairs[:-1], pairs[-1:]
    else:
        examples, tests = _list(value.get("train"), "train"), _list(value.get("test"), "test")
    if not tests:
        raise ValueError("it has no test pair")
    outputs = [None] * len(tests) if solutions is None else _list(solutions, "the solution")
    if len(outputs) != len(tests):
        raise ValueError(f"it has {len(tests)} test inputs and {len(outputs)} solutions")
    return Task(
        name,
        tuple(_pair(pair, f"example {number}", None, complete=True) for number, pair in enumerate(examples)),
        tuple(
            _pair(pair, f"test {number}", output, complete=False)
            for number, (pair, output) in enumerate(zip(tests, outputs, strict=True))
        ),
    )


def _pair(value: Any, what: str, solution: Any, *, complete: bool) -> Pair:
    if _is_list(value) and len(value) == 2:
        value = {"input": value[0], "output": value[1]}
    if not isinstance(value, Mapping) or value.get("input") is None:
        raise ValueError(f"{what} is {_brief(value)}, expected an input and an output")
    output = value.get("output") if solution is None else solution
    if output is None and complete:
        raise ValueError(f"{what} has no output")
    return Pair(
        _grid(value["input"], f"the input of {what}"),
        None if output is None else _grid(output, f"the output of {what}"),
    )


def _list(value: Any, what: str) -> Sequence[Any]:
    if not _is_list(value):
        raise ValueError(f"{what} is {_brief(value)}, expected a list")
    return value


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _brief(value: Any) -> str:
    return "missing" if value is None else shown(value)


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
