"""A command line's overrides, composed with the YAML files into the typed configuration."""

from pathlib import Path

import hydra
from omegaconf import OmegaConf

from pipeline.config import checks, hydra_schemas
from pipeline.config.messages import COMPOSING_ERRORS, composing_message
from pipeline.config.schema import RunConfig
from pipeline.core import errors

PACKAGE = Path(__file__).parent.parent


def config_dir() -> Path:
    """The YAML files: beside the package in a checkout, inside it in an installed wheel."""
    installed = PACKAGE / "configs"  # asked for first: site-packages may have a folder of that name from anybody
    return installed if installed.is_dir() else PACKAGE.parent / "configs"


def compose(overrides: list[str]) -> RunConfig:
    """The configuration that a command line with these overrides gives, for scripts. Raises ConfigError."""
    prepare()
    try:
        with hydra.initialize_config_dir(str(config_dir()), version_base="1.3"):
            composed = hydra.compose("config", overrides)
    except COMPOSING_ERRORS as error:
        raise errors.ConfigError(composing_message(error, overrides)) from error
    return checks.run_config(composed)


def prepare() -> None:
    """Makes the schemas and the `assets` resolver known to Hydra."""
    hydra_schemas.register()
    OmegaConf.register_new_resolver("assets", lambda name: str(PACKAGE / "assets" / name), replace=True)
