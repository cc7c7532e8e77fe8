"""Reads a JSON file's attributes one by one, so that attributes that nobody read can be refused.

An attribute that is ignored could make the activations, or the features of an SAE, subtly wrong.
"""

from collections.abc import Collection, Mapping
from typing import Any, Self

import numpy as np

from pipeline.core.errors import CheckpointError
from pipeline.core.messages import shown

REQUIRED = object()  # in place of a default
MAX_INT = 2**31 - 1  # token ids, positions and the axes of arrays are 32-bit
_MIN_FLOAT = float(np.finfo(np.float32).tiny)  # values are computed in float32
_MAX_FLOAT = float(np.finfo(np.float32).max)
_MAX_SHOWN = 20  # attributes in a message


class JsonConfig:
    """A JSON object, or one inside it. Records which attributes were read; null counts as absent.

    In messages, `where` names the file, and `user` what it configures and can be replaced. Every method that reads
    raises CheckpointError for an invalid value.
    """

    def __init__(self, values: Mapping[str, object], where: str, user: str = "model") -> None:
        self.where, self.user = where, user
        self.values = {key: value for key, value in values.items() if value is not None}
        self._taken: set[str] = set()

    def __contains__(self, key: str) -> bool:
        """Whether the file has the key with a value other than null."""
        return key in self.values

    def _take(self, key: str, kinds: tuple[type, ...], what: str, default: object) -> object:
        self._taken.add(key)
        value = self.values.get(key, default)
        if value is REQUIRED:
            raise CheckpointError(f"{self.where} has no {key!r}: expected {what}. Is the file complete?")
        if key in self.values and (not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)):
            raise self._wrong(key, value, what)
        return value

    def _wrong(self, key: str, value: object, what: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {key} is {shown(value)}, expected {what}. Is the file damaged?")

    def positive_int(self, key: str, default: object = REQUIRED, most: int = MAX_INT) -> int:
        return self._int(key, f"a whole number above 0, at most {most:,}", default, 1, most)

    def count(self, key: str, default: object = REQUIRED) -> int:
        """A whole number, which may be 0."""
        return self._int(key, f"a whole number from 0 to {MAX_INT:,}", default, 0, MAX_INT)

    def _int(self, key: str, what: str, default: object, least: int, most: int) -> int:
        value = self._take(key, (int,), what, default)
        if not least <= value <= most:
            raise self._wrong(key, value, what)
        return value

    def positive_float(self, key: str, default: object = REQUIRED) -> float:
        what = "a number above 0 that float32 can represent"
        value = self._take(key, (int, float), what, default)
        if not _MIN_FLOAT <= value < _MAX_FLOAT:
            raise self._wrong(key, value, what)
        return float(value)

    def float_from_0(self, key: str, default: object = REQUIRED) -> float:
        """A number that is 0 or above 0."""
        value = self._take(key, (int, float), "a number that is 0 or above 0", default)
        return 0.0 if value == 0 else self.positive_float(key, default)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        return self._take(key, (bool,), "true or false", default)

    def text(self, key: str) -> str | None:
        """A string; None if it is absent."""
        return self._take(key, (str,), "a string", None)

    def whole_numbers(self, key: str) -> list[int]:
        """A list of whole numbers; empty if the key is absent."""
        return self._list(key, int, "a list of whole numbers")

    def _list(self, key: str, kind: type, what: str) -> list[Any]:
        values = self._take(key, (list,), what, [])
        if not all(type(value) is kind for value in values):
            raise self._wrong(key, values, what)
        return values

    def choice(self, key: str, choices: Collection[str], default: object = REQUIRED, remedy: str = "") -> str:
        """One of an attribute's implemented values."""
        value = self._take(key, (str,), "a string", default)
        if value not in choices:
            raise self.not_implemented(key, value, ", ".join(choices), remedy)
        return value

    def not_implemented(self, key: str, value: object, implemented: str, remedy: str = "") -> CheckpointError:
        """The error for a value that is not among the implemented ones."""
        return CheckpointError(
            f"{self.where}: {key} is {shown(value)}, which is not implemented (implemented: {implemented}). "
            f"{remedy or f'Use another {self.user}.'}"
        )

    def require(self, implemented: Mapping[str, object]) -> None:
        """Raises CheckpointError for attributes with other values than these, the only implemented ones."""
        for key, value in implemented.items():
            if (got := self.values.get(key, value)) != value:
                raise self.not_implemented(key, got, str(value))
        self._taken.update(implemented)

    def ignore(self, *keys: str) -> None:
        """Allows attributes that have no effect."""
        self._taken.update(keys)

    def nested(self, key: str) -> Self:
        """The mapping under `key`; empty if the key is absent."""
        return type(self)(self._take(key, (dict,), "a mapping", {}), f"{self.where}: {key}", self.user)

    def finish(self, harmless: Collection[str] = ()) -> None:
        """Raises CheckpointError for attributes that were not read and are not `harmless`. Call it last."""
        unread = [key for key in self.values if not (key in self._taken or key in harmless or self._is_harmless(key))]
        if not unread:
            return
        settings = ", ".join(f"{key}={shown(self.values[key])}" for key in unread[:_MAX_SHOWN])
        if len(unread) > _MAX_SHOWN:
            settings += f" and {len(unread) - _MAX_SHOWN} more"
        raise CheckpointError(
            f"{self.where} sets {settings}, which this program does not implement, so the results might be wrong. "
            f"Use another {self.user}, or remove the attribute if it does not change them."
        )

    def _is_harmless(self, key: str) -> bool:
        return False
