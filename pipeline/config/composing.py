"""Composes a command line's overrides and the YAML files into the typed configuration."""

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, MissingConfigException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from pipeline.config.schema import SOURCES, DataConfig, RunConfig, default_of
from pipeline.config.typed import key_remedy, typed_config
from pipeline.core import errors
from pipeline.core.addresses import without_credentials
from pipeline.core.messages import shortened

PACKAGE = Path(__file__).parent.parent
CONFIGS = PACKAGE / "configs"  # the YAML files; in a checkout a link to those beside the package
HYDRAS_ERRORS = (HydraException, OmegaConfBaseException)
# For some command lines, Hydra also raises these. None of this program's code runs before composing.
COMPOSING_ERRORS = (
    *HYDRAS_ERRORS,
    *(ValueError, TypeError, AttributeError, AssertionError, LookupError, OSError, RecursionError),
)
_DETAILS = ("full_key:", "reference_type=", "object_type=", "See https://hydra.cc", "To append to your config")
_QUOTES = (
    " A list with spaces needs quotes for the shell: 'capture.layers=[2, 3]'. A string with special characters needs "
    """quotes within quotes: 'data.text="{{ body }}"'."""
)


def compose(overrides: list[str]) -> RunConfig:
    """The configuration that `python -m pipeline.run` composes from these overrides. Raises ConfigError."""
    prepare()
    try:
        with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
            composed = hydra.compose("config", overrides)
    except COMPOSING_ERRORS as error:
        raise errors.ConfigError(composing_message(error, overrides)) from error
    return typed_config(composed, set(map(typed_key, overrides)))


def from_values(data: type[DataConfig], values: Mapping[str, object]) -> RunConfig:
    """The configuration with these values by dotted key, and the schema's defaults. `data` is the class of the data
    source. Raises ConfigError, like `compose`."""
    prepare()
    config = OmegaConf.create(_defaults(RunConfig) | {"data": _defaults(data)})
    try:
        for key, value in values.items():
            OmegaConf.update(config, key, value)
    except COMPOSING_ERRORS as error:
        raise errors.ConfigError(composing_message(error, [])) from error
    return typed_config(config, values.keys())


@cache
def prepare() -> None:
    """Registers the keys with their defaults, and the `assets` resolver, with Hydra."""
    store = ConfigStore.instance()
    store.store(name="schema", node=_defaults(RunConfig))
    for name, cls in SOURCES.items():
        store.store(group="data", name=f"{name}_schema", node=_defaults(cls))
    OmegaConf.register_new_resolver("assets", lambda name: str(PACKAGE / "assets" / name), replace=True)


def _defaults(cls: type) -> dict[str, Any]:
    """The defaults of a group of keys, as plain values: Hydra merges them, and `typed_config` makes them typed."""
    plain: dict[str, Any] = {}
    for field in fields(cls):
        value = default_of(field)
        plain[field.name] = _defaults(field.type) if is_dataclass(field.type) else value
        if isinstance(value, Enum):
            plain[field.name] = str(value)
    return plain


def typed_key(override: str) -> str:
    """The key of an override such as `++data.path=x`."""
    return override.lstrip("+").partition("=")[0].strip()


def composing_message(error: Exception, arguments: list[str]) -> str:
    """The message of an error that Hydra or OmegaConf raised for the command line `arguments`, with the remedy."""
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    if isinstance(cause, ConfigKeyError | ConfigAttributeError):
        return f"{cause.full_key} is not a key of the configuration.{key_remedy(cause.full_key)}"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        return _unknown_choice(error.missing_cfg_file, error.options)
    reasons = [error] if cause is None or cause is error else [error, cause]
    message = ": ".join(map(_own_message, reasons))
    if not isinstance(error, HYDRAS_ERRORS):  # the message does not name the override
        given = ", ".join(shortened(argument, 80) for argument in arguments)
        message = f"Hydra cannot compose one of {without_credentials(given)}: {message}"
    quotes = "" if isinstance(cause, OmegaConfBaseException) else _QUOTES
    return f"{message}.{quotes} Correct the command line; --cfg job prints all keys."


def _unknown_choice(choice: str, options: Iterable[str]) -> str:
    """The message for a choice `group/name` for which there is no YAML file or schema."""
    group, _, name = choice.rpartition("/")
    names = [option for option in options if not option.endswith("_schema")]
    other = {
        "model": " For any checkpoint of a known family: model.path=owner/name.",
        "data": " For JSON, CSV or text: data=hf data.path=json data.data_files=FILE.",
    }
    return f"{group}={name} is not one of {', '.join(names)}.{other.get(group, '')}"


def _own_message(error: Exception) -> str:
    """The error's message without the lines of details that OmegaConf adds."""
    lines = (line.strip() for line in str(error).splitlines())
    message = " ".join(line for line in lines if line and not line.startswith(_DETAILS))
    return shortened(without_credentials(message), 1000).rstrip(".") or type(error).__name__
