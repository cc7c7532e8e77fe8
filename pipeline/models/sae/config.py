"""A reader of an SAE's configuration that overlooks no attribute.

Every attribute is read by the format, or known not to matter. Any other is refused before weights load.
"""

from collections.abc import Collection

from pipeline.core.json_text import shown
from pipeline.models.checkpoints.json_config import JsonConfig


class SAEConfig(JsonConfig):
    """A mapping of a JSON file, which records the attributes that were read."""

    user = "SAE"

    def is_bool(self, key: str) -> bool:
        """Whether the attribute is true or false, where it may also be something else."""
        return isinstance(self.values.get(key), bool)

    def text(self, key: str) -> str | None:
        """A string; None where it is absent."""
        return self._take(key, (str,), "a string", None)

    def expect(self, key: str, value: object) -> None:
        """Reads an attribute that is implemented with one value alone, or absent."""
        self._taken.add(key)
        if key in self.values and self.values[key] != value:
            raise self._not_implemented(key, self.values[key], shown(value))

    def finish(self, harmless: Collection[str] = ()) -> None:
        """Raises for attributes that were neither read nor are known to be harmless. Call it last."""
        unread = sorted(self.values.keys() - self._taken - {*harmless})
        self._refuse(
            unread,
            "which this program does not implement, so that features might be wrong. Use another SAE, or remove the "
            "attribute if it does not change what the SAE computes.",
        )
