"""Turns the configuration that Hydra composed, a tree of plain values, into the frozen dataclasses of schema.py.

Every value is checked here, before anything uses it, and whether it has an effect: a key's `needs` in the schema says
on which values of other keys that depends."""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import Field, fields, is_dataclass, replace
from enum import Enum
from fnmatch import fnmatchcase
from types import NoneType, UnionType
from typing import Any, get_args

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipeline.config.limits import COUNT, SIZE, Limit
from pipeline.config.schema import SOURCES, DataConfig, RunConfig, all_fields, default_of
from pipeline.core.addresses import has_credentials, unusable_store_path
from pipeline.core.errors import ConfigError
from pipeline.core.hub import is_hub_id
from pipeline.core.messages import did_you_mean, shown

_DATA = ("data", "data.prompts")  # keys whose groups depend on the source
_BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def typed_config(composed: DictConfig, typed: Set[str] = frozenset()) -> RunConfig:
    """The typed configuration. Raises ConfigError for an unknown key, a required key without a value, a value that is
    not allowed, a URL with credentials, and a value without effect of a key in `typed` (see `effective`)."""
    if missing := sorted(_missing_keys(composed)):
        raise ConfigError(f"no value for {', '.join(missing)}. Set it on the command line, e.g. {missing[0]}=...")
    try:
        values = OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise ConfigError(f"{error.full_key or 'the configuration'} has no value: {reason}.") from error
    config = _group(RunConfig, values, "")
    if reason := unusable_store_path(config.store.path):
        raise ConfigError(reason)
    return effective(config, typed)


def key_remedy(key: str) -> str:
    """The remedy for an unknown key, starting with a space: the most similar key, and how to list all keys."""
    keys = [name for name, _ in all_fields()]
    another = " It belongs to another choice of data." if key in keys else did_you_mean(key, keys, cutoff=0.8)
    return f"{another} --cfg job prints all keys."


def in_words(key: Field) -> str:
    """The values that a key allows, as after "Set it to"."""
    limit, kinds = _limit(key), _kinds(key)
    return ", or to ".join(_kind_in_words(kind, limit and limit.words) for kind in kinds)


def _missing_keys(node: DictConfig, prefix: str = "") -> Iterator[str]:
    """Required keys without a value, and not the keys whose values refer to them, as `OmegaConf.missing_keys` would."""
    for name in node:
        child = node._get_node(name)
        if child._is_missing():
            yield f"{prefix}{name}"
        elif isinstance(child, DictConfig) and not (child._is_none() or child._is_interpolation()):
            yield from _missing_keys(child, f"{prefix}{name}.")


def _group(cls: type, values: object, prefix: str) -> Any:
    """The dataclass with these values."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{prefix[:-1]} is {shown(values)}. Set it to a group of keys.")
    known = {field.name: field for field in fields(cls)}
    if unknown := next((f"{prefix}{name}" for name in values if name not in known), None):  # `+run.foo=1` adds one
        raise ConfigError(f"{unknown} is not a key of the configuration.{key_remedy(unknown)}")
    if deleted := next((name for name in known if name not in values), None):
        raise ConfigError(f"no value for {prefix}{deleted}, which was deleted. Set it to its default instead.")
    return cls(**{name: _value(field, values[name], prefix + name) for name, field in known.items()})


def _value(field: Field, value: object, key: str) -> Any:
    if is_dataclass(field.type):
        return _group(field.type, value, f"{key}.")
    if key in _DATA:
        if (cls := _source(value)) is None:
            choice = "data=fineweb" if key == "data" else "data@data.prompts=arc"
            raise ConfigError(f"{key} is {shown(value)}, expected a source of documents. Choose one, e.g. {choice}.")
        return _group(cls, value, f"{key}.")
    try:
        converted = _converted(_kinds(field), value)
    except (ValueError, TypeError, KeyError, ArithmeticError):
        quotes = " Text that looks like a number needs quotes." if {str, list[str]} & {*_kinds(field)} else ""
        raise ConfigError(f"{key} is {shown(value)}. Set it to {in_words(field)}.{quotes}") from None
    for text in _strings(converted):
        _require_storable(key, text)
    limit = _limit(field)
    if limit is not None and converted is not None and not limit.admits(converted):
        raise ConfigError(f"{key} is {shown(converted)}. Set it to {in_words(field)}.")
    return converted


def _source(data: object) -> type[DataConfig] | None:
    """The class of data with this `source`, which the choice of `data` sets."""
    source = data.get("source") if isinstance(data, Mapping) else None
    return SOURCES.get(source) if isinstance(source, str) else None


def _kinds(key: Field) -> tuple[Any, ...]:
    """The types of a key's values."""
    return get_args(key.type) if isinstance(key.type, UnionType) else (key.type,)


def _converted(kinds: tuple[Any, ...], value: Any) -> Any:
    """The value in the key's type. Raises an error for any other value. YAML and Hydra know numbers, booleans, strings
    and null; a string may also be a number, from the environment. A whole number may be written as 1e9."""
    if value is None and (NoneType in kinds or Any in kinds):
        return None
    kind = kinds[0]
    if kind is Any:
        return value
    if kind is bool:
        return _BOOLEANS[str(value).lower()]
    if kind is int and not isinstance(value, bool):
        if isinstance(value, float) and value.is_integer():
            return int(value)
        if isinstance(value, int | str):
            return int(value)
    if kind is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        return float(value)
    if kind is str and isinstance(value, str):
        return value
    if kind == list[str] and isinstance(value, list) and all(isinstance(item, str) for item in value):
        return value
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value)
    raise TypeError


def _limit(key: Field) -> Limit | None:
    """The limit of a key's values, besides their type. Every number has one."""
    kind = _kinds(key)[0]
    return key.metadata.get("allowed") or (COUNT if kind is int else SIZE if kind is float else None)


def _kind_in_words(kind: Any, limit: str | None) -> str:
    if kind is NoneType:
        return "null"
    if kind is bool:
        return "true or false"
    if kind in (int, float):
        return f"a {'whole ' if kind is int else ''}{limit}"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return f"one of {', '.join(kind)}"
    return limit or ("a string" if kind is str else "a list of strings, as in [a,b]")


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
