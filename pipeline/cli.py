"""The command line that the entry points share: compose with Hydra, run, turn errors into exit codes."""

import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from pipeline import config, distributed, errors
from pipeline.addresses import without_credentials
from pipeline.config import RunConfig
from pipeline.limits import LIMITS, expected, shortened
from pipeline.startup import prepare_process

log = logging.getLogger("pipeline")

PACKAGE = Path(__file__).parent
_MOST_CHARACTERS = 4000  # of a message
_FULL_ERRORS = "HYDRA_FULL_ERROR"  # of the environment
_HYDRAS_ERRORS = (HydraException, OmegaConfBaseException)
# What comes out of Hydra for a command line that makes no sense. Nothing of this program runs before it has composed.
_COMPOSING_ERRORS = (*_HYDRAS_ERRORS, ValueError, TypeError, AttributeError, AssertionError, LookupError)
_COMPOSING_ERRORS += (OSError, RecursionError)
_FOR_PROGRAMMERS = ("full_key:", "reference_type=", "object_type=", "See https://hydra.cc", "To append to your config")


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
    except _COMPOSING_ERRORS as error:
        raise errors.ConfigError(composing_message(error, overrides)) from error
    return config.run_config(composed)


def prepare() -> None:
    """Makes the schemas and the `assets` resolver known to Hydra."""
    config.register()
    OmegaConf.register_new_resolver("assets", lambda name: str(PACKAGE / "assets" / name), replace=True)


def main(task: Callable[[RunConfig], None]) -> None:
    """Composes the command line's configuration, calls `task` with it, and exits with the right code."""
    prepare_process()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger("pipeline").setLevel(logging.INFO)
    logging.getLogger().setLevel(logging.WARNING)
    distributed.skip_absent_tpu()
    prepare()
    composed_once = False
    shows_tracebacks = os.environ.get(_FULL_ERRORS) == "1"
    os.environ[_FULL_ERRORS] = "1"  # Hydra then raises what it would print otherwise, some of it with a traceback

    @hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="config")
    def composed(cfg: DictConfig) -> None:
        nonlocal composed_once
        composed_once = True
        code = run_task(task, cfg)
        distributed.leave(code)
        if code != errors.EXIT_OK:
            sys.exit(code)

    try:
        composed()
    except _COMPOSING_ERRORS as error:
        if composed_once and not isinstance(error, _HYDRAS_ERRORS):
            raise
        log.error("ConfigError: %s", composing_message(error, sys.argv[1:]), exc_info=shows_tracebacks)
        sys.exit(errors.EXIT_INVALID)


def composing_message(error: Exception, arguments: list[str]) -> str:
    """What Hydra and OmegaConf say of a command line that does not compose, in one line, with what can be done."""
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    if isinstance(cause, ConfigKeyError | ConfigAttributeError):
        return f"{cause.full_key} is no key of the configuration. {config.key_remedy(cause.full_key)}"
    reasons = [error] if cause is None or cause is error else [error, cause]
    said = ": ".join(_said(reason) for reason in reasons)
    if isinstance(error, ValueError | TypeError) and (given := _group_without_name(arguments)):
        return f"{given} names no choice: {said}. Give a name, e.g. data=fineweb."
    owner = OmegaConf.get_type(cause.parent_node) if isinstance(cause, OmegaConfBaseException) else None
    if owner is not None and owner.__name__ in LIMITS and cause.key in {field.name for field in fields(owner)}:
        return f"{said}. Set {cause.full_key} to {expected(owner, cause.key)}."
    if not isinstance(error, _HYDRAS_ERRORS):  # it names nothing
        given = ", ".join(shortened(argument, 80) for argument in arguments)
        said = f"Hydra cannot compose one of {without_credentials(given)}: {said}"
    return f"{said}. Correct the command line; --cfg job prints what it may set."


def _group_without_name(arguments: list[str]) -> str | None:
    """The override that gives a group something else than names, which Hydra does not say."""
    overrides = [argument for argument in arguments if not argument.startswith("-")]
    with suppress(HydraException, ValueError):  # one of them is no override
        for override in OverridesParser.create().parse_overrides(overrides):
            values = override.value() if isinstance(override.value(), list) else [override.value()]
            if "." not in override.key_or_group and not all(isinstance(value, str | dict) for value in values):
                return shortened(override.input_line, 80)
    return None


def described(error: errors.PipelineError) -> str:
    """Its kind and message, where that quotes a whole document not all of it."""
    return f"{type(error).__name__}: {shortened(str(error), _MOST_CHARACTERS)}"


def _said(error: Exception) -> str:
    """The message without the lines that OmegaConf adds for programmers."""
    lines = (line.strip() for line in str(error).splitlines())
    said = " ".join(line for line in lines if line and not line.startswith(_FOR_PROGRAMMERS))
    return shortened(without_credentials(said), 1000).rstrip(".") or type(error).__name__


def run_task(task: Callable[[RunConfig], None], cfg: DictConfig) -> int:
    """Runs the task and returns the exit code. An error raised on purpose is one message, a bug has its traceback."""
    try:
        task(config.run_config(cfg))
    except errors.PipelineError as error:
        log.error("%s", described(error))
        earlier = error.__context__
        if isinstance(earlier, errors.PipelineError) and earlier is not error.__cause__:
            log.error("Before that, %s", described(earlier))
        return error.exit_code
    except Exception as error:
        if distributed.is_loss_of_a_process(error):
            log.error("another process of this job has ended; its own messages say why. Run the same command again.")
        elif distributed.is_out_of_memory(error):
            log.exception(
                "the job does not fit into the memory of a device, or another process has some of it. Run the same "
                "command again; if it ends so again, lower batch.rows (data.rows while generating) or "
                "run.max_inflight_mib, or divide the weights (model.weights=fsdp)."
            )
        else:
            log.exception("unexpected error")
        return errors.EXIT_FAILED
    return errors.EXIT_OK
