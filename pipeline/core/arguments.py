"""Checks of the arguments of library calls. All raise ArgumentError."""

import math
import operator
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from pipeline.core.errors import ArgumentError, ConfigError
from pipeline.core.messages import shown

_NAMES = "the names of different arrays, in a tuple such as ('loss',)"
_MOST = (1 << 63) - 1

_owners: dict[str, int] = {}  # by library, the process that first used it


def integer(name: str, value: object, least: int = 0, most: int = _MOST) -> int:
    """An integer of Python, numpy or another library, but not a bool, from `least` to `most`."""
    try:
        number = None if isinstance(value, bool | np.bool_) else operator.index(value)  # type: ignore[arg-type]
    except Exception:  # whatever an object's own __index__ raises
        number = None
    if number is None or not least <= number <= most:
        end = "" if most == _MOST and (number or 0) <= most else f" and at most {most}"
        raise ArgumentError(f"{name} is {shown(value)}, expected an integer of at least {least}{end}.")
    return number


def number(name: str, value: object) -> float:
    """A finite or infinite number, but neither a bool nor NaN."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.number) or value != value:
        raise ArgumentError(f"{name} is {shown(value)}, expected a number.")
    try:
        return float(value)
    except (OverflowError, TypeError):
        return math.inf if value > 0 else -math.inf


def flag(name: str, value: object) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise ArgumentError(f"{name} is {shown(value)}, expected True or False.")
    return bool(value)


def items(name: str, value: object, expected: str) -> list[Any]:
    """The items of an iterable that is neither a string nor a dict."""
    try:
        if isinstance(value, str | bytes | Mapping):
            raise TypeError
        return list(value)  # type: ignore[call-overload]
    except Exception as error:  # whatever an object's own iterator raises
        raise ArgumentError(f"{name} is {shown(value)}, expected {expected}.") from error


def path(name: str, value: object) -> str:
    """A path or URL, given as a string or a Path."""
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str):
        raise ArgumentError(f"{name} is {shown(value)}, expected a path or a URL.")
    return text


def names(name: str, value: object) -> tuple[str, ...]:
    """Several different strings."""
    given = tuple(items(name, value, _NAMES))
    if not all(isinstance(item, str) for item in given) or len(set(given)) < len(given):
        raise ArgumentError(f"{name} is {shown(value)}, expected {_NAMES}.")
    return given


def require_not_forked(library: str) -> None:
    """Raises ConfigError in a process that was forked from one that has used `library`, whose threads it then lacks."""
    if _owners.setdefault(library, os.getpid()) != os.getpid():
        raise ConfigError(
            f"this process was forked from one that has used {library}, which does not survive that. Start processes "
            'with "spawn", e.g. DataLoader(..., multiprocessing_context="spawn"), or read in the first process '
            "(num_workers=0)."
        )
