"""Which keys have an effect: a key's `needs` in the schema says on which values of other keys that depends."""

import logging
import re
from collections.abc import Set
from dataclasses import fields, is_dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from pipeline.config.schema import RunConfig, default_of
from pipeline.core.errors import ConfigError
from pipeline.core.hub import is_hub_id
from pipeline.core.messages import shown

log = logging.getLogger("pipeline")

LOADERS = ("json", "csv", "text", "arrow", "parquet")  # of `datasets`; not names on the Hub
_ON_HUB = "HUB"


def effective(config: RunConfig, typed: Set[str]) -> RunConfig:
    """The configuration with the default for each key that has no effect, so that it does not change the job's
    identity. `typed`: the keys that the user gave a value for this job alone.

    Raises ConfigError for a typed key without effect. Warns of others, which files or a sweep set.
    """
    return _effective(config, "", config, typed)


def condition(needs: str, prefix: str) -> str:
    """When a key has an effect, in words. prefix: of the key's group, with the dot."""
    if "," in needs:
        return " and ".join(condition(part, prefix) for part in needs.split(","))
    key, operator, patterns = _parsed(needs, prefix)
    if patterns == [_ON_HUB]:
        return f"`{key}` on the Hub"
    values = f"`{'` or `'.join(patterns)}`"
    return f"`{key}` other than {values}" if operator == "!=" else f"`{key}{operator}{values[1:]}"


def _effective(group: Any, prefix: str, config: RunConfig, typed: Set[str]) -> Any:
    changes: dict[str, Any] = {}
    for field in fields(group):
        value, key, needs = getattr(group, field.name), prefix + field.name, field.metadata.get("needs")
        if is_dataclass(value):
            changes[field.name] = _effective(value, f"{key}.", config, typed)
            continue
        default = default_of(field)
        if not needs or value == default or _holds(needs, prefix, config):
            continue
        reason = f"{key} is {shown(value)}, but has an effect only with {condition(needs, prefix).replace('`', '')}."
        if key in typed:
            raise ConfigError(f"{reason} Set that, or remove {key}.")
        log.warning("%s It is ignored.", reason)
        changes[field.name] = default
    return replace(group, **changes)


def _parsed(needs: str, prefix: str) -> tuple[str, str, list[str]]:
    """The key, the operator ("" for any value but null, false or an empty one) and the patterns of a condition."""
    name, operator, patterns = re.fullmatch(r"([a-z_.]+)(!?=|)(.*)", needs).groups()
    is_of_group = "." not in name and name not in (field.name for field in fields(RunConfig))
    return prefix + name if is_of_group else name, operator, patterns.split("|")


def _holds(needs: str, prefix: str, config: RunConfig) -> bool:
    if "," in needs:
        return all(_holds(part, prefix, config) for part in needs.split(","))
    key, operator, patterns = _parsed(needs, prefix)
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name, None)  # only some choices of `data` have tokens
    if not operator:
        return bool(value)
    values = value if isinstance(value, list) else [getattr(value, "source", value)]  # `data` is a group
    return (operator == "=") == any(_matches(item, pattern) for item in values for pattern in patterns)


def _matches(value: Any, pattern: str) -> bool:
    if pattern == _ON_HUB:
        return value not in LOADERS and (value.startswith("hf://") or is_hub_id(value))
    text = "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    return fnmatchcase(text, pattern)
