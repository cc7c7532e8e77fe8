"""The command line that the entry points share: compose with Hydra, run, turn errors into exit codes."""

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

import hydra
from omegaconf import DictConfig, OmegaConf

from pipeline import config, distributed, errors
from pipeline.composing import COMPOSING_ERRORS, HYDRAS_ERRORS, composing_message
from pipeline.config import RunConfig
from pipeline.limits import shortened
from pipeline.startup import prepare_process

log = logging.getLogger("pipeline")

PACKAGE = Path(__file__).parent
_MOST_CHARACTERS = 4000  # of a message
_FULL_ERRORS = "HYDRA_FULL_ERROR"  # of the environment


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
    except COMPOSING_ERRORS as error:
        if composed_once and not isinstance(error, HYDRAS_ERRORS):
            raise
        log.error("ConfigError: %s", composing_message(error, sys.argv[1:]), exc_info=shows_tracebacks)
        sys.exit(errors.EXIT_INVALID)


def described(error: errors.PipelineError) -> str:
    """Its kind and message, where that quotes a whole document not all of it."""
    return f"{type(error).__name__}: {shortened(str(error), _MOST_CHARACTERS)}"


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
