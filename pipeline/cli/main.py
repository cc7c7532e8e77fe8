"""Shared by the commands that take a whole configuration: composes it with Hydra, runs, maps errors to exit codes."""

import inspect
import logging
import os
import sys
from collections.abc import Callable

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from pipeline.cluster import devices, processes
from pipeline.config.composing import (
    COMPOSING_ERRORS,
    CONFIGS,
    HYDRAS_ERRORS,
    composing_message,
    prepare,
    typed_key,
)
from pipeline.config.schema import RunConfig
from pipeline.config.typed import typed_config
from pipeline.core import errors
from pipeline.core.messages import shortened

log = logging.getLogger("pipeline")

_MAX_CHARACTERS = 4000  # per message
_FULL_ERRORS = "HYDRA_FULL_ERROR"  # an environment variable


def main(task: Callable[[RunConfig], None], doc: str) -> None:
    """Composes the command line's configuration, calls `task` with it, and exits with the right code.

    `--help` prints `doc`, the command's docstring, before Hydra's help on the configuration.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger("pipeline").setLevel(logging.INFO)
    logging.getLogger().setLevel(logging.WARNING)
    devices.skip_absent_tpu()
    prepare()
    if {"--help", "-h"} & set(sys.argv[1:]):
        print(f"{inspect.cleandoc(doc)}\n", flush=True)
    composed_once = False
    shows_tracebacks = os.environ.get(_FULL_ERRORS) == "1"
    os.environ[_FULL_ERRORS] = "1"  # makes Hydra raise errors instead of printing them

    @hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="config")
    def composed(cfg: DictConfig) -> None:
        nonlocal composed_once
        composed_once = True
        code = run_task(task, cfg)
        processes.leave(code)
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
    """The error's class and message; long messages, which may quote a whole document, are shortened."""
    return f"{type(error).__name__}: {shortened(str(error), _MAX_CHARACTERS)}"


def _is_sweep() -> bool:
    return HydraConfig.initialized() and HydraConfig.get().mode is RunMode.MULTIRUN


def _typed_keys() -> set[str]:
    """The keys on the command line of a single job."""
    is_single = HydraConfig.initialized() and not _is_sweep()
    return {typed_key(override) for override in HydraConfig.get().overrides.task} if is_single else set()


def run_task(task: Callable[[RunConfig], None], cfg: DictConfig) -> int:
    """Runs the task and returns the exit code. Logs one message for a PipelineError, and the traceback of any other."""
    try:
        task(typed_config(cfg, _typed_keys()))
    except errors.PipelineError as error:
        log.error("%s", described(error))
        if isinstance(error, errors.StoreMismatch) and _is_sweep():
            log.error("In a sweep, each job needs its own store: use the swept key in store.path.")
        earlier = error.__context__
        if isinstance(earlier, errors.PipelineError) and not error.__suppress_context__:
            log.error("Before that, %s", described(earlier))
        return error.exit_code
    except Exception as error:
        if processes.is_loss_of_a_process(error):
            log.error("another process of this job has ended; its messages say why. Run the same command again.")
        elif devices.is_out_of_memory(error):
            log.exception(
                "the job does not fit in the memory of a device, or another process uses some of it. Run the same "
                "command again; if it fails again, lower batch.rows (data.rows while generating) or "
                "run.max_inflight_mib, or divide the weights (model.weights=fsdp) or each row (mesh.context)."
            )
        else:
            log.exception("unexpected error")
        return errors.EXIT_FAILED
    return errors.EXIT_OK
