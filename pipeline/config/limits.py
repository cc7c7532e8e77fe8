"""What the values of keys may be, in words for messages and as a check."""

import datetime
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_MAX_PATH_BYTES = 3800  # Linux allows 4095; a store appends its keys
_MAX_NAME_BYTES = 255


@dataclass(frozen=True)
class Limit:
    """The values that a key allows. words: as after "Set it to"."""

    words: str
    admits: Callable[[Any], bool]


def between(first: float, last: float, *, above_first: bool = False, below_last: bool = False) -> Limit:
    """Finite numbers from `first` to `last`, without the ends that are excluded."""

    def admits(value: float) -> bool:
        is_excluded = (above_first and value == first) or (below_last and value == last)
        return first <= value <= last and not is_excluded  # not NaN

    least = f"more than {first:,}" if above_first else f"at least {first:,}"
    return Limit(f"number of {least} and {'less than' if below_last else 'at most'} {last:,}", admits)


def _is_location(value: str) -> bool:
    names = [] if "://" in value else value.split("/")
    sizes = [len(value.encode()) <= _MAX_PATH_BYTES, *(len(name.encode()) <= _MAX_NAME_BYTES for name in names)]
    return bool(value.strip()) and all(sizes)


def _is_folder(value: str) -> bool:
    """Whether a folder exists there, or can be created."""
    if not _is_location(value) or "://" in value:
        return _is_location(value)
    path = os.path.abspath(os.path.expanduser(value))
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return os.path.isdir(path)


def _is_address(value: str) -> bool:
    match = re.fullmatch(r"(?:[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})", value)
    return match is not None and 1 <= int(match[1]) <= 65535


def _are_names(value: object) -> bool:
    values = value if isinstance(value, list) else [value]
    return bool(values) and all(isinstance(name, str) and name.strip() for name in values)


def _is_date(value: str) -> bool:
    try:
        return datetime.date.fromisoformat(value).isoformat() == value
    except ValueError:
        return False


# Ranges without a technical limit end where a value can only be a typing error.
COUNT = between(1, 1_000_000_000)
FEW = between(1, 1_000_000)  # processes, devices and seconds
SIZE = between(0, 1_000_000_000, above_first=True)
SHARE = between(0, 1, above_first=True)
NOT_NEGATIVE = between(0, 1_000_000_000)
TEMPERATURE = Limit(  # dividing logits by less can make them infinite
    "number: 0 (greedy), or 1e-6 to 1,000,000", lambda value: value == 0 or 1e-6 <= value <= 1_000_000
)
SEED = between(-(1 << 63), (1 << 63) - 1)
NAME = Limit("a non-empty string", lambda value: bool(value.strip()))
NAMES = Limit("a non-empty string, or a list of them", _are_names)
TEXTS = Limit(
    r"a list of non-empty texts, with line breaks for \n; bash makes these in $'data.stop=[\"...\n...\"]'",
    lambda texts: all(text and r"\n" not in text for text in texts),
)
DATE = Limit("a date, as in 2026-07-01", _is_date)
ADDRESS = Limit("host:port, with a port from 1 to 65535", _is_address)
_LOCATION = f"a non-empty path or URL, of at most {_MAX_PATH_BYTES} bytes and {_MAX_NAME_BYTES} between slashes"
_FOLDER = f"folder that exists or can be created, not a file or inside a file: {_LOCATION}"
LOCATION = Limit(_LOCATION, _is_location)  # or a name on the Hub
FOLDER = Limit(f"a {_FOLDER}", _is_folder)
LOCAL_FOLDER = Limit(f"a local {_FOLDER}", lambda value: "://" not in value and _is_folder(value))
