"""A reader of an SAE's configuration that overlooks no attribute.

Every attribute is read by the format, or known not to matter. Any other is refused before weights load: one that is
ignored could make features subtly wrong.
"""

from collections.abc import Collection, Mapping

import numpy as np

from pipeline.core.errors import CheckpointError
from pipeline.core.json_text import shown

_REQUIRED = object()
_MAX_INT = 2**31 - 1
_MIN_FLOAT, _MAX_FLOAT = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
_MAX_SHOWN = 20  # attributes in a message


class SAEConfig:
    """A mapping of a JSON file, which records the attributes that were read. null counts as absent.

    `where` names the file in messages. Every method raises CheckpointError.
    """

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self.where = where
        self._values = {key: value for key, value in values.items() if value is not None}
        self._taken: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def _take(self, key: str, kinds: tuple[type, ...], what: str, default: object) -> object:
        self._taken.add(key)
        value = self._values.get(key, default)
        if value is _REQUIRED:
            raise CheckpointError(f"{self.where} has no {key!r}: expected {what}. Is the file complete?")
        if key in self._values and (not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)):
            raise self._wrong(key, what)
        return value

    def _wrong(self, key: str, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.where}: {key} is {shown(self._values[key])}, expected {what}. Download the file again."
        )

    def size(self, key: str, default: object = _REQUIRED) -> int:
        """A whole number above 0."""
        what = f"a whole number from 1 to {_MAX_INT:,}"
        value = self._take(key, (int,), what, default)
        if key in self._values and not 1 <= value <= _MAX_INT:
            raise self._wrong(key, what)
        return value

    def count(self, key: str, default: object = _REQUIRED) -> int:
        """A whole number, which may be 0."""
        what = f"a whole number from 0 to {_MAX_INT:,}"
        value = self._take(key, (int,), what, default)
        if key in self._values and not 0 <= value <= _MAX_INT:
            raise self._wrong(key, what)
        return value

    def positive(self, key: str, default: object = _REQUIRED) -> float:
        """A number above 0 that float32 can express."""
        value = self._take(key, (int, float), "a number above 0", default)
        if key in self._values and not _MIN_FLOAT <= value <= _MAX_FLOAT:
            raise self._wrong(key, "a number above 0 that float32 can express")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        return self._take(key, (bool,), "true or false", default)

    def is_bool(self, key: str) -> bool:
        """Whether the attribute is true or false, where it may also be something else."""
        return isinstance(self._values.get(key), bool)

    def text(self, key: str) -> str | None:
        """A string; None where it is absent."""
        return self._take(key, (str,), "a string", None)

    def choice(self, key: str, choices: Collection[str], default: object = _REQUIRED, remedy: str = "") -> str:
        """One of the implemented values of an attribute."""
        value = self._take(key, (str,), "a string", default)
        if value not in choices:
            raise CheckpointError(
                f"{self.where}: {key} is {shown(value)}, which is not implemented; implemented: {', '.join(choices)}. "
                f"{remedy or 'Use another SAE.'}"
            )
        return value

    def expect(self, key: str, value: object) -> None:
        """Reads an attribute that is implemented with one value alone, or absent."""
        self._taken.add(key)
        if key in self._values and self._values[key] != value:
            raise CheckpointError(
                f"{self.where}: {key} is {shown(self._values[key])}, which is not implemented; implemented: "
                f"{shown(value)}. Use another SAE."
            )

    def nested(self, key: str) -> "SAEConfig":
        """The mapping under `key`; empty where it is absent."""
        return SAEConfig(self._take(key, (dict,), "a mapping", {}), f"{self.where}: {key}")

    def finish(self, harmless: Collection[str] = ()) -> None:
        """Raises for attributes that were neither read nor are known to be harmless. Call it last."""
        unknown = sorted(self._values.keys() - self._taken - {*harmless})
        if unknown:
            settings = ", ".join(f"{key}={shown(self._values[key])}" for key in unknown[:_MAX_SHOWN])
            if len(unknown) > _MAX_SHOWN:
                settings += f" and {len(unknown) - _MAX_SHOWN} more"
            raise CheckpointError(
                f"{self.where} sets {settings}, which this program does not implement, so that features might be "
                f"wrong. Use another SAE, or remove the attribute if it does not change what the SAE computes."
            )
