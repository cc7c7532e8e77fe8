"""Turns the configuration that Hydra composed into the typed one, or raises an error that says what is wrong."""

from collections.abc import Iterator, Set
from dataclasses import fields, is_dataclass

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipeline.config.effects import effective
from pipeline.config.keys import key_remedy
from pipeline.config.limits import require_within_limits, shown
from pipeline.config.schema import DataConfig, GenerateData, RunConfig
from pipeline.core.addresses import unusable_store_path
from pipeline.core.errors import ConfigError


def run_config(composed: DictConfig, typed: Set[str] = frozenset()) -> RunConfig:
    """The typed, frozen configuration. Raises ConfigError for an unknown key, a required key without a value, a value
    that is not allowed, a URL with credentials, and a value without effect of a key in `typed` (see `effective`)."""
    if unknown := next(_unknown_keys(composed), None):
        raise ConfigError(f"{unknown} is not a key of the configuration.{key_remedy(unknown)}")
    if missing := sorted(_missing_keys(composed)):
        raise ConfigError(f"no value for {', '.join(missing)}. Set it on the command line, e.g. {missing[0]}=...")
    try:
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key or 'the configuration'} has no value: {_first_line(error)}.") from error
    _require_data(config.data, "data", "data=fineweb")
    if isinstance(config.data, GenerateData):
        _require_data(config.data.prompts, "data.prompts", "data@data.prompts=arc")
    require_within_limits(config)
    if reason := unusable_store_path(config.store.path):
        raise ConfigError(reason)
    return effective(config, typed)


def _unknown_keys(node: DictConfig, prefix: str = "") -> Iterator[str]:
    """Keys that the dataclasses do not have. `+run.foo=1` would add one."""
    cls = OmegaConf.get_type(node)
    known = {key.name for key in fields(cls)} if is_dataclass(cls) else None
    for key in node:
        child = node._get_node(key)
        if known is not None and key not in known:
            yield f"{prefix}{key}"
        elif isinstance(child, DictConfig) and not (child._is_missing() or child._is_none()):
            yield from _unknown_keys(child, f"{prefix}{key}.")


def _missing_keys(node: DictConfig, prefix: str = "") -> Iterator[str]:
    """Required keys without a value, and not the keys whose values refer to them, as `OmegaConf.missing_keys` would."""
    for key in node:
        child = node._get_node(key)
        if child._is_missing():
            yield f"{prefix}{key}"
        elif isinstance(child, DictConfig) and not (child._is_none() or child._is_interpolation()):
            yield from _missing_keys(child, f"{prefix}{key}.")


def _require_data(data: object, key: str, choice: str) -> None:
    if not isinstance(data, DataConfig):
        raise ConfigError(f"{key} is {shown(data)}, expected a source of documents. Choose one, e.g. {choice}.")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")
