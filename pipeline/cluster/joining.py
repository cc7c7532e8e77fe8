"""Joining the processes of a job, and leaving them after a failure."""

import errno
import logging
import os
import socket
import sys
import threading
import time
from functools import cache

import jax

from pipeline.cluster import processes
from pipeline.config.schema import DistributedConfig
from pipeline.core.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, ConfigError, PipelineError

log = logging.getLogger("pipeline")

_POLL_S = 0.1
_SHUTDOWN_TIMEOUT_S = 8  # how long a finished process waits for the others
_EXTRA_TIMEOUT_S = 60  # JAX aborts the process at its own timeout, so ours must be shorter
_NOT_A_CLUSTER = "coordinator_address should be defined"  # in JAX's message if it detects no cluster
_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")  # of MPI jobs; JAX detects Open MPI 4 only


@cache  # a sweep runs several jobs in one process, but JAX can only join before its first computation
def initialise(options: DistributedConfig) -> None:
    """Joins the processes of a TPU pod, GKE, Slurm or MPI job, or those described by `options`; once per process.

    Without either, or with num_processes=1 alone, the job has one process. Raises ConfigError for options that
    contradict each other, and PipelineError if the other processes do not join in time.
    """
    settings = (options.coordinator, options.num_processes, options.process_id)
    if jax.distributed.is_initialized() or settings == (None, 1, None):
        return
    if any(value is not None for value in settings) and None in settings:
        raise ConfigError(
            f"distributed.coordinator, num_processes and process_id are {settings}: expected all three, none on a "
            f"cluster that JAX detects, or num_processes=1 to run alone. Set all, none, or that."
        )
    if options.process_id == 0:
        _require_free_port(options.coordinator)
    if options.coordinator is None:
        logging.getLogger("jax._src.distributed").setLevel(logging.INFO)  # says whom it waits for, and where
    failure = (
        f"the {options.num_processes or 'other'} processes did not all join within {options.join_timeout_s} s "
        f"(distributed.join_timeout_s). Check that all were started and can reach "
        f"{options.coordinator or 'process 0'}, and run the same command again. To run this process of a Slurm step or "
        "MPI job without the others, set distributed.num_processes=1."
    )
    try:
        _join(options, failure)
    except ValueError as error:
        if options.coordinator is not None or _NOT_A_CLUSTER not in str(error):
            raise ConfigError(f"distributed.* is invalid: {str(error).rstrip('.')}. Correct these settings.") from error
        if any(os.environ.get(name, "1") != "1" for name in _MPI_SIZES):
            raise ConfigError(
                "JAX does not detect this job of several processes. Set distributed.coordinator, num_processes and "
                "process_id for each, or distributed.num_processes=1 if each runs alone."
            ) from error
    except RuntimeError as error:
        raise PipelineError(f"{failure} JAX reports: {error}") from error
    if processes.count() > 1:
        _name_process_in_logs()


def _require_free_port(coordinator: str) -> None:
    """Raises PipelineError if the first process's port is in use, since JAX would end with a segmentation fault."""
    try:
        socket.create_server(("", int(coordinator.rpartition(":")[2]))).close()
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise PipelineError(
                f"the port of distributed.coordinator={coordinator} cannot be used on this machine: "
                f"{os.strerror(error.errno)}. Stop the process that uses it, or give all processes another port."
            ) from error


def _join(options: DistributedConfig, failure: str) -> None:
    """Calls JAX in another thread, since Python handles signals only while the main thread runs Python code. Ends the
    process with a message before JAX aborts it with a C++ stack trace; raises the errors of JAX."""
    errors: list[Exception] = []

    def initialise() -> None:
        try:
            jax.distributed.initialize(
                *(options.coordinator, options.num_processes, options.process_id),
                initialization_timeout=options.join_timeout_s + _EXTRA_TIMEOUT_S,
                heartbeat_timeout_seconds=options.heartbeat_timeout_s,
                shutdown_timeout_seconds=_SHUTDOWN_TIMEOUT_S,
            )
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=initialise, name="join", daemon=True)
    thread.start()
    deadline = time.monotonic() + options.join_timeout_s
    while thread.is_alive() and time.monotonic() < deadline:
        thread.join(_POLL_S)
    if thread.is_alive():
        log.error("PipelineError: %s", failure)
        logging.shutdown()
        os._exit(EXIT_FAILED)
    if errors:
        raise errors[0]


def _name_process_in_logs() -> None:
    """Starts log messages with the process, and limits processes other than the first to warnings and errors."""
    process = jax.process_index()
    formatter = logging.Formatter(f"process {process} of {jax.process_count()} on {socket.gethostname()}: %(message)s")
    for handler in logging.getLogger().handlers:
        handler.setFormatter(formatter)
    if process > 0:
        log.setLevel(logging.WARNING)


def leave(code: int) -> None:
    """Ends this process immediately after a failure, so that the others do not wait for it in a collective.

    The others notice, because the connection closes or the heartbeat stops. Returns if this is the only process, or if
    `code` is not a failure.
    """
    if code in (EXIT_OK, EXIT_INTERRUPTED) or processes.count() == 1:
        return
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
