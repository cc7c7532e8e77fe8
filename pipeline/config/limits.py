"""A table of the values that each key of the configuration allows. All values are checked before anything uses them.

`pipeline.planning` checks values against each other; sources, models and tokenizers check what depends on their files.
"""

import datetime
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Protocol, get_args

from pipeline.core.addresses import has_credentials
from pipeline.core.errors import ConfigError

_MAX_PATH_BYTES = 3800  # Linux allows 4095; a store appends its keys
_MAX_NAME_BYTES = 255


class Limits(Protocol):
    """The values that a key allows. `str` describes them in a message."""

    def admits(self, value: Any) -> bool: ...


@dataclass(frozen=True)
class Between:
    """Finite numbers from `first` to `last`. Each end is allowed unless it is open."""

    first: float
    last: float
    is_first_open: bool = False
    is_last_open: bool = False

    def admits(self, value: float) -> bool:
        if not self.first <= value <= self.last:  # not for NaN
            return False
        return not (self.is_first_open and value == self.first) and not (self.is_last_open and value == self.last)

    def __str__(self) -> str:
        first = f"more than {self.first:,}" if self.is_first_open else f"at least {self.first:,}"
        return f"{first} and {'less than' if self.is_last_open else 'at most'} {self.last:,}"


@dataclass(frozen=True)
class Name:
    def admits(self, value: str) -> bool:
        return bool(value.strip())

    def __str__(self) -> str:
        return "a non-empty string"


@dataclass(frozen=True)
class Location:
    """A local path, a URL, or a name on the Hub."""

    def admits(self, value: str) -> bool:
        if not value.strip() or len(value.encode()) > _MAX_PATH_BYTES:
            return False
        if "://" in value:
            return True
        is_unknown_home = value.startswith("~") and os.path.expanduser(value) == value
        return not is_unknown_home and all(len(name.encode()) <= _MAX_NAME_BYTES for name in value.split("/"))

    def __str__(self) -> str:
        return (
            f"a non-empty path or URL, of at most {_MAX_PATH_BYTES} bytes and {_MAX_NAME_BYTES} between slashes; "
            f"a leading ~ stands for a home directory"
        )


@dataclass(frozen=True)
class Folder(Location):
    """A folder to write to."""

    is_local: bool = False

    def admits(self, value: str) -> bool:
        if not super().admits(value):
            return False
        if "://" in value:
            return not self.is_local
        path = os.path.abspath(os.path.expanduser(value))
        while not os.path.lexists(path):
            path = os.path.dirname(path)
        return os.path.isdir(path)

    def __str__(self) -> str:
        kind = "a local folder" if self.is_local else "a folder"
        return f"{kind} that exists or can be created, not a file or inside a file: {super().__str__()}"


@dataclass(frozen=True)
class Address:
    def admits(self, value: str) -> bool:
        match = re.fullmatch(r"(?:[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})", value)
        return match is not None and 1 <= int(match[1]) <= 65535

    def __str__(self) -> str:
        return "host:port, with a port from 1 to 65535"


@dataclass(frozen=True)
class Names:
    """A non-empty string, or a list of them."""

    def admits(self, value: object) -> bool:
        values = value if isinstance(value, list) else [value]
        return bool(values) and all(isinstance(name, str) and name.strip() for name in values)

    def __str__(self) -> str:
        return "a non-empty string, or a list of them"


@dataclass(frozen=True)
class Date:
    def admits(self, value: str) -> bool:
        try:
            return datetime.date.fromisoformat(value).isoformat() == value
        except ValueError:
            return False

    def __str__(self) -> str:
        return "a date, as in 2026-07-01"


# Ranges without a technical limit end where a value can only be a typing error.
_COUNT = Between(1, 1_000_000_000)
_FEW = Between(1, 1_000_000)  # processes and devices
_THREADS = Between(1, 10_000)
_SIZE = Between(0, 1_000_000_000, is_first_open=True)
_SHARE = Between(0, 1, is_first_open=True)
_SEED = Between(-(1 << 63), (1 << 63) - 1)
_DATA: dict[str, Limits] = {"num_streams": _COUNT, "date": Date()}

# By the names of the dataclasses in schema.py. Every number and every path has limits. null is allowed if the type is
# optional.
LIMITS: dict[str, dict[str, Limits]] = {
    "ModelConfig": {"path": Location(), "revision": Name(), "seed": _SEED, "tokenizer": Location()},
    "DataConfig": _DATA,
    "ParquetData": {
        **_DATA,
        **{"path": Location(), "repo": Name(), "subset": Name(), "revision": Name(), "row_groups_per_shard": _COUNT},
        **{"text_column": Name(), "id_column": Name()},
    },
    "ArcData": {
        **_DATA,
        **{"path": Location(), "split": Name(), "revision": Name(), "solutions": Location(), "encoder": Name()},
        **{"repeat": Between(1, 1000), "augmentations": _FEW, "seed": _SEED, "tasks_per_shard": _COUNT},
    },
    "HfData": {
        **_DATA,
        **{"path": Location(), "subset": Name(), "split": Name(), "revision": Name(), "id_column": Name()},
        "data_files": Names(),
    },
    "GenerateData": {
        **_DATA,
        **{"path": Location(), "prompt_length": _COUNT, "max_new_tokens": _COUNT, "temperature": Between(0, 1_000_000)},
        **{"top_k": _COUNT, "top_p": _SHARE, "rows": _COUNT, "group": _COUNT},
        "seed": Between(0, (1 << 32) - 1),  # JAX drops the other bits
    },
    "BatchConfig": {"rows": _COUNT, "length": _COUNT},
    "CaptureConfig": {
        **{"every": Between(2, 1_000_000_000), "rate": Between(0, 1, is_first_open=True, is_last_open=True)},
        **{"seed": Between(0, (1 << 63) - 1), "per_row": _COUNT, "scale_group": _COUNT},
        **{"top_logprobs": Between(1, 1000), "encode_top": Between(1, 4096), "encode_threshold": Between(0, 1e9)},
    },
    "StoreConfig": {
        **{"path": Folder(), "shard_mib": _SIZE, "retries": Between(0, 1_000_000), "retry_delay_s": Between(0, 86_400)},
        **{"rows_per_block": _COUNT, "concurrency": _THREADS, "copy_threads": _THREADS},
        "ramp_up": Between(1, 1_000_000),
    },
    "MeshConfig": {"data": _FEW, "tensor": _FEW},
    "DistributedConfig": {
        **{"coordinator": Address(), "num_processes": _FEW, "process_id": Between(0, 999_999)},
        **{"join_timeout_s": _FEW, "heartbeat_timeout_s": _FEW},
    },
    "RunOptions": {
        **{"max_tokens": Between(1, 10**18), "lease_s": Between(1, 1_000_000), "max_inflight_mib": _SIZE},
        **{"stall_timeout_s": Between(1, 1_000_000_000), "reserved_mib": Between(0, 1_000_000_000)},
        **{"compilation_cache": Folder(), "profile": Folder(is_local=True), "profile_after": Between(0, 1_000_000_000)},
        **{"profile_steps": _COUNT, "metrics_interval_s": Between(0, 1_000_000_000)},
    },
    "PlanConfig": {
        **{"mfu": _SHARE, "fill": _SHARE, "store_gb_per_s": _SIZE},
        **{"usd_per_chip_hour": Between(0, 1_000_000_000), "usd_per_tb_month": Between(0, 1_000_000_000)},
    },
    "RunConfig": {"topology": Name()},
}


def require_within_limits(config: Any, prefix: str = "") -> None:
    """Raises ConfigError for the first value in a configuration, a tree of dataclasses, that is not allowed."""
    limits = LIMITS[type(config).__name__]
    for field in fields(config):
        value, key = getattr(config, field.name), f"{prefix}{field.name}"
        if not _is_of_kind(value, field.type):
            quotes = " Text that looks like a number needs quotes." if isinstance(value, int | float | list) else ""
            raise ConfigError(f"{key} is {shown(value)}. Set it to {expected(type(config), field.name)}.{quotes}")
        if is_dataclass(value):
            require_within_limits(value, f"{key}.")
            continue
        for text in _strings(value):
            _require_storable(key, text)
        if field.name in limits and value is not None and not limits[field.name].admits(value):
            raise ConfigError(f"{key} is {shown(value)}. Set it to {expected(type(config), field.name)}.")


def _is_of_kind(value: object, kind: Any) -> bool:
    """Whether a group, a list or a text has the schema's type. OmegaConf checks other types, but not the result of an
    interpolation `${...}`."""
    kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    if value is None:
        return NoneType in kinds or Any in kinds
    if list[str] in kinds:
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    return isinstance(value, str if str in kinds else kind) if str in kinds or is_dataclass(kind) else True


def expected(cls: type, name: str) -> str:
    """The values that a field of the configuration allows, in words."""
    [kind] = (field.type for field in fields(cls) if field.name == name)
    limits = LIMITS[cls.__name__].get(name)
    kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    return ", or to ".join(_in_words(kind, limits) for kind in kinds)


def _in_words(kind: Any, limits: Limits | None) -> str:
    if kind is NoneType:
        return "null"
    if kind is bool:
        return "true or false"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return f"one of {', '.join(kind)}"
    if kind in (int, float):
        return f"a {'whole ' if kind is int else ''}number of {limits}"
    if limits is not None:
        return str(limits)
    return "a group of keys" if is_dataclass(kind) else "a string" if kind is str else "a list of strings, as in [a,b]"


def shown(value: object) -> str:
    """A value for messages, shortened."""
    return shortened(repr(value) if isinstance(value, str) else str(value), 80)


def shortened(text: str, max_characters: int) -> str:
    """The text, or if it is longer, its beginning and its length."""
    return text if len(text) <= max_characters else f"{text[:max_characters]}... ({len(text):,} characters)"


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.items():
            yield from _strings(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _strings(item)


def _require_storable(key: str, text: str) -> None:
    """Raises ConfigError for a text that is not valid UTF-8, has a NUL, which no file name has, or is a URL with
    a password or a signature."""
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise ConfigError(f"{key} is {shown(text)}. Set it to a string that is valid UTF-8 and has no NUL.")
    if has_credentials(text):
        raise ConfigError(
            f"{key} has a URL with credentials, which would be stored and logged. Provide them in the way that the "
            f"storage's own tools expect (GOOGLE_APPLICATION_CREDENTIALS, AWS_PROFILE, ...)."
        )
