"""A reader of an SAE's configuration that accounts for every attribute.

An attribute is either read by the format or known to have no effect. Any other is refused before weights are loaded.
"""

from collections.abc import Collection

from pipeline.core.json_text import shown
from pipeline.models.checkpoints.json_config import JsonConfig


class SAEConfig(JsonConfig):
    """A mapping from a JSON file. Records which attributes were read."""

    user = "SAE"

    def is_bool(self, key: str) -> bool:
        """Whether the attribute is a boolean, for attributes of several types."""
        return isinstance(self.values.get(key), bool)

    def text(self, key: str) -> str | None:
        """A string; None if it is absent."""
        return self._take(key, (str,), "a string", None)

    def expect(self, key: str, value: object) -> None:
        """Reads an attribute for which only one value, or its absence, is implemented."""
        self._taken.add(key)
        if key in self.values and self.values[key] != value:
            raise self._not_implemented(key, self.values[key], shown(value))

    def finish(self, harmless: Collection[str] = ()) -> None:
        """Raises CheckpointError for attributes that were not read and are not `harmless`. Call it last."""
        unread = sorted(self.values.keys() - self._taken - {*harmless})
        self._refuse(
            unread,
            "which this program does not implement, so features might be wrong. Use another SAE, or remove the "
            "attribute if it does not change what the SAE computes.",
        )
