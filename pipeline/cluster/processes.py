"""The processes of a job: joining, agreement by collectives, and leaving after a failure. With a single process, these
functions do not wait."""

import errno
import hashlib
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache

import jax
import numpy as np
from jax.experimental import multihost_utils

from pipeline.config.schema import DistributedConfig, RunConfig
from pipeline.core.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, ConfigError, PipelineError

log = logging.getLogger("pipeline")

_POLL_S = 0.1
_SHUTDOWN_TIMEOUT_S = 8  # how long a finished process waits for the others
_EXTRA_TIMEOUT_S = 60  # JAX aborts the process at its own timeout, so ours must be shorter
_NOT_A_CLUSTER = "coordinator_address should be defined"  # in JAX's message if it detects no cluster
_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")  # of MPI jobs; JAX detects Open MPI 4 only


@cache  # a sweep runs several jobs in one process, but JAX can only join before its first computation
def join(options: DistributedConfig) -> None:
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
        _join_in_time(options, failure)
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
    if count() > 1:
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


def _join_in_time(options: DistributedConfig, failure: str) -> None:
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
    if code in (EXIT_OK, EXIT_INTERRUPTED) or count() == 1:
        return
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def count() -> int:
    """The number of processes of this job. Asks JAX, which initialises the devices, only if they have joined, so
    that a mistake in a single process's configuration is reported before."""
    return jax.process_count() if jax.distributed.is_initialized() else 1


def is_first() -> bool:
    """Whether this process acts for all processes of the job."""
    return count() == 1 or jax.process_index() == 0


def is_loss_of_a_process(error: BaseException) -> bool:
    """Whether a collective failed because another process is gone. On TPUs, JAX ends this process itself."""
    return (
        isinstance(error, jax.errors.JaxRuntimeError)
        and count() > 1
        and any(sign in str(error) for sign in ("Gloo", "UNAVAILABLE", "NCCL"))
    )


def require_same_config(config: RunConfig, *derived: str) -> None:
    """Waits for all processes. Raises ConfigError on each of them unless all have the same configuration and the same
    `derived` strings."""
    if count() == 1:
        return
    shared = asdict(replace(config, distributed=DistributedConfig()))
    digest = hashlib.sha256(json.dumps([shared, derived], sort_keys=True).encode()).digest()
    digests = multihost_utils.process_allgather(np.frombuffer(digest, np.uint8))
    others = [process for process, digest in enumerate(digests) if (digest != digests[0]).any()]
    if others:
        raise ConfigError(
            f"the configuration or devices of processes {others} differ from those of process 0. Start all processes "
            f"with the same ones."
        )


def from_first_process(make: Callable[[], str]) -> str:
    """The non-empty text that `make` returns on the first process. Waits for all processes.

    If `make` raises on the first process, every other process calls it, too, and most likely raises the same error.
    """
    if count() == 1:
        return make()
    content = b""
    try:
        if is_first():
            content = make().encode()
    finally:
        size = int(multihost_utils.broadcast_one_to_all(np.int32(len(content))))
        padded = np.frombuffer(content.ljust(size), np.uint8)
        received = bytes(np.asarray(multihost_utils.broadcast_one_to_all(padded))).decode() if size else ""
    return received or make()


def largest_of_all(*values: int) -> tuple[int, ...]:
    """The maximum of each value over all processes. Waits for all of them."""
    if count() == 1:
        return values
    return tuple(int(value) for value in multihost_utils.process_allgather(np.array(values)).max(axis=0))


def total_of_all(value: int) -> int:
    """The sum of a value over all processes. Waits for all of them."""
    if count() == 1:
        return value
    values = multihost_utils.process_allgather(np.array([value]).view(np.uint8))  # JAX has no int64 here
    return int(np.asarray(values).view(np.int64).sum())


def any_process(value: bool) -> bool:
    """Whether `value` is true on any process. Waits for all of them."""
    return bool(*largest_of_all(value))


def wait_for_all() -> None:
    """Waits until every process has called this. Like any collective, it fails if one of them has ended."""
    any_process(False)
