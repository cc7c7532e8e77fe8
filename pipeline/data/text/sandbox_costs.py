"""The costs of a template's operations, in the sandbox's units: by how much a result may exceed its input."""

import datetime
import decimal
import re
from collections.abc import Callable, Mapping
from typing import Any

import jinja2

OPERATION = 16  # units
BASE = 1 << 23  # units allowed for any rendering: half a million operations, or 8 million characters

# Types whose text representation is the same in every process.
_PLAIN = (str, bytes, int, float, type(None), list, tuple, dict, range, decimal.Decimal)
_PLAIN += (datetime.date, datetime.time, datetime.timedelta, jinja2.Undefined)


class Unbounded(jinja2.TemplateError):
    """A template takes more work than allowed for the size of its input."""


def weight(value: Any, most: int | None = None, *, printed: bool = False) -> int:
    """The units of a value, for its characters and elements, counted until they exceed `most`.

    Raises jinja2.TemplateError for a `printed` value whose text differs between processes.
    """
    total, remaining = 0, [value]
    while remaining and (most is None or total <= most):
        item = remaining.pop()
        total += OPERATION
        if isinstance(item, str | bytes):
            total += len(item)
        elif isinstance(item, dict):
            remaining.extend(item.keys())
            remaining.extend(item.values())
        elif isinstance(item, list | tuple):
            remaining.extend(item)
        elif isinstance(item, int):
            total += item.bit_length() // 8
        elif printed and not isinstance(item, _PLAIN):
            raise jinja2.TemplateError(
                f"a {type(item).__name__} has no fixed text. Print its values, e.g. call the method or add | list"
            )
    return total


def bounded_range(*args: int) -> range:
    """`range` for templates. Raises Unbounded if it is too long."""
    numbers = range(*args)
    if abs((numbers.stop - numbers.start) // numbers.step) > BASE // OPERATION:
        raise Unbounded(f"{numbers} is too long")
    return numbers


def method_growth(name: str, text: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """By how many characters the result of a method of `str` may exceed its text and arguments."""
    if not args and not kwargs:
        return 0
    match name:
        case "center" | "ljust" | "rjust" | "zfill":
            return max(0, args[0])
        case "expandtabs":
            return text.count("\t") * max(0, *args, *kwargs.values())
        case "replace":
            return text.count(args[0]) * len(args[1]) if len(args) > 1 else 0
        case "join":
            return len(text) * len(args[0])
    return 0


PRINTF = re.compile(r"%(?:\([^)]*\))?[-#0 +]*(\*|\d+)?(?:\.(\*|\d+))?")


def _indent_growth(text: Any, width: int | str = 4, *_: Any, **__: Any) -> int:
    return (1 + len(str(text).splitlines())) * (len(width) if isinstance(width, str) else width)


def _replace_growth(text: Any, old: Any, new: Any, *_: Any, **__: Any) -> int:
    return str(text).count(str(old)) * len(str(new))


def _join_growth(values: Any, d: Any = "", *_: Any, **__: Any) -> int:
    return 0 if isinstance(values, jinja2.Undefined) else len(values) * len(str(d))


def _round_growth(_value: Any, precision: int = 0, *_: Any, **__: Any) -> int:
    return abs(precision) ** 2  # 10 ** precision


FILTER_GROWTH: dict[str, Callable[..., int]] = {
    "batch": lambda values, linecount, *_, **__: linecount,
    "center": lambda text, width=80: width,
    "indent": _indent_growth,
    "join": _join_growth,
    "replace": _replace_growth,
    "round": _round_growth,
    "slice": lambda values, slices, *_, **__: slices,
    "sum": lambda values, attribute=None, start=0: BASE if isinstance(start, list | tuple) else 0,
    "wordwrap": lambda text, width=79, break_long_words=True, wrapstring=None, *_, **__: (
        len(str(text)) * len(wrapstring or "")
    ),
}
