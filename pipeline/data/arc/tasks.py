"""ARC-AGI tasks: grids, pairs, and parsing the formats in which datasets store them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int8

from pipeline.core.errors import InputError
from pipeline.core.messages import shown

Grid = Int8[np.ndarray, "_ _"]  # rows, columns; unnamed axes, since one call may have grids of different shapes
NUM_COLORS = 10


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
