"""Composes a command line's overrides and the YAML files into the typed configuration."""

from collections.abc import Mapping
from pathlib import Path

import hydra
from omegaconf import OmegaConf

from pipeline.config import checks, hydra_schemas
from pipeline.config.messages import COMPOSING_ERRORS, composing_message
from pipeline.config.schema import DataConfig, RunConfig
from pipeline.config.typed_text import as_typed, typed_key
from pipeline.core import errors

PACKAGE = Path(__file__).parent.parent
CONFIGS = PACKAGE / "configs"  # the YAML files; in a checkout a link to those beside the package


def compose(overrides: list[str]) -> RunConfig:
    """The configuration that `python -m pipeline.run` composes from these overrides. Raises ConfigError."""
    prepare()
    try:
        with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
            composed = hydra.compose("config", as_typed(overrides))
    except COMPOSING_ERRORS as error:
        raise errors.ConfigError(composing_message(error, overrides)) from error
    return checks.run_config(composed, set(map(typed_key, overrides)))


def from_values(data: type[DataConfig], values: Mapping[str, object]) -> RunConfig:
    """The configuration with these values by dotted key, and the schema's defaults. `data` is the class of the data
    source.

    Raises ConfigError, like `compose`.
    """
    prepare()
    config = hydra_schemas.empty(data)
    try:
        for key, value in values.items():
            OmegaConf.update(config, key, value)
    except COMPOSING_ERRORS as error:
        raise errors.ConfigError(composing_message(error, [])) from error
    return checks.run_config(config, values.keys() - {"data.repo", "data.subset"})  # required even if unused


def prepare() -> None:
    """Registers the schemas and the `assets` resolver with Hydra."""
    hydra_schemas.register()
    OmegaConf.register_new_resolver("assets", lambda name: str(PACKAGE / "assets" / name), replace=True)
