"""Processes, devices, the mesh, and requests to stop. The only caller of `jax.process_index()`."""

import errno
import hashlib
import json
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache

import jax
import numpy as np
from jax.experimental import multihost_utils

from pipeline.cluster.startup import signals_heeded_while_waiting
from pipeline.config.schema import DistributedConfig, RunConfig
from pipeline.core.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, ConfigError, PipelineError

log = logging.getLogger("pipeline")

_SHUTDOWN_TIMEOUT_S = 8  # how long a process that is done waits for the others to say the same
_JAXS_EXTRA_S = 60  # longer than the program waits for the others, since JAX aborts the process
_NOTHING_DETECTED = "coordinator_address should be defined"  # how JAX says that this is no cluster


@cache  # the jobs of a sweep share the process: JAX joins before its first computation, or never
def initialise(options: DistributedConfig) -> None:
    """Joins the processes of a TPU pod, GKE, Slurm or MPI job, or those that `options` describe; once per process.

    Where neither is found, this is the only process. Raises ConfigError for options that do not fit together, and
    PipelineError when the others do not appear in time.
    """
    if jax.distributed.is_initialized():
        return
    place = (options.coordinator, options.num_processes, options.process_id)
    if any(value is not None for value in place) and None in place:
        raise ConfigError(
            f"distributed.coordinator, num_processes and process_id are {place}: expected all three, or none where the "
            f"cluster says them. Set the others."
        )
    if options.process_id == 0:
        _require_free_port(options.coordinator)
    came_together = threading.Event()
    threading.Thread(target=_give_up_joining, args=(options, came_together), name="join", daemon=True).start()
    try:
        with signals_heeded_while_waiting():
            jax.distributed.initialize(
                *place,
                initialization_timeout=options.join_timeout_s + _JAXS_EXTRA_S,
                heartbeat_timeout_seconds=options.heartbeat_timeout_s,
                shutdown_timeout_seconds=_SHUTDOWN_TIMEOUT_S,
            )
    except ValueError as error:
        if options.coordinator is None and _NOTHING_DETECTED in str(error):
            return
        raise ConfigError(
            f"the processes' settings are wrong: {str(error).rstrip('.')}. Correct distributed.*."
        ) from error
    except RuntimeError as error:
        raise PipelineError(
            f"the {options.num_processes or ''} processes did not come together within {options.join_timeout_s} s: "
            f"{error}. Check that all were started and reach {options.coordinator or 'the coordinator'}."
        ) from error
    finally:
        came_together.set()
    if jax.process_count() > 1:
        _name_process_in_logs()


def _require_free_port(coordinator: str) -> None:
    """Of the first process, which serves there; JAX ends with a segmentation fault otherwise."""
    try:
        socket.create_server(("", int(coordinator.rpartition(":")[2]))).close()
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise PipelineError(
                f"the port of distributed.coordinator={coordinator} cannot be used on this machine: "
                f"{os.strerror(error.errno)}. End what uses it, or give all processes another."
            ) from error


def _give_up_joining(options: DistributedConfig, came_together: threading.Event) -> None:
    """Ends the process with a message where JAX would abort it with a stack trace of C++."""
    if came_together.wait(options.join_timeout_s):
        return
    log.error(
        "PipelineError: the %s processes did not come together within %d s (distributed.join_timeout_s). Check that "
        "all were started and reach %s, and run the same command again.",
        *(options.num_processes or "job's", options.join_timeout_s, options.coordinator or "the coordinator"),
    )
    logging.shutdown()
    os._exit(EXIT_FAILED)


def _name_process_in_logs() -> None:
    """Every message says who it is from; what all would say alike, only the first process says."""
    process = jax.process_index()
    formatter = logging.Formatter(f"process {process} of {jax.process_count()} on {socket.gethostname()}: %(message)s")
    for handler in logging.getLogger().handlers:
        handler.setFormatter(formatter)
    if process > 0:
        log.setLevel(logging.WARNING)


def is_first() -> bool:
    """Whether this process speaks for all of the worker's."""
    return jax.process_index() == 0


def leave(code: int) -> None:
    """Ends this process at once after a failure, when there are others: they would wait for it in a collective.

    They notice: their connection to it closes, or its heartbeat stops. Returns when there is nobody to leave.
    """
    if code in (EXIT_OK, EXIT_INTERRUPTED) or not jax.distributed.is_initialized() or jax.process_count() == 1:
        return
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def is_loss_of_a_process(error: BaseException) -> bool:
    """Whether this is how a collective fails when one of its processes is gone; on TPUs JAX ends the process itself."""
    return (
        isinstance(error, jax.errors.JaxRuntimeError)
        and jax.process_count() > 1
        and any(sign in str(error) for sign in ("Gloo", "UNAVAILABLE", "NCCL"))
    )


def require_same_config(config: RunConfig, *derived: str) -> None:
    """Waits for all processes. Raises ConfigError, on each, unless all were started with the same configuration,
    and have `derived` the same from it."""
    if jax.process_count() == 1:
        return
    shared = asdict(replace(config, distributed=DistributedConfig()))
    digest = hashlib.sha256(json.dumps([shared, derived], sort_keys=True).encode()).digest()
    everyones = multihost_utils.process_allgather(np.frombuffer(digest, np.uint8))
    others = [process for process, digest in enumerate(everyones) if (digest != everyones[0]).any()]
    if others:
        raise ConfigError(
            f"processes {others} were started with another configuration than process 0, or on other devices. "
            f"Start all with the same."
        )


def said_by_first(make: Callable[[], str]) -> str:
    """What `make` gives on the first process (ASCII, 1 to 64 characters); waits for all of them. Where it fails there,
    each process makes its own, and most likely fails alike."""
    if jax.process_count() == 1:
        return make()
    text = ""
    try:
        if is_first():
            text = make()
    finally:
        padded = np.frombuffer(text.encode("ascii").ljust(64), np.uint8)
        said = bytes(np.asarray(multihost_utils.broadcast_one_to_all(padded))).decode("ascii").rstrip()
    return said or make()


def largest_of_all(*values: int) -> tuple[int, ...]:
    """The largest of each value over all processes; waits for all of them."""
    if jax.process_count() == 1:
        return values
    return tuple(int(value) for value in multihost_utils.process_allgather(np.array(values)).max(axis=0))


def any_process(value: bool) -> bool:
    """Whether `value` holds on any process; waits for all of them."""
    return bool(*largest_of_all(value))


def wait_for_all() -> None:
    """Returns when every process is here; one that ended before makes this fail on the others, as any collective."""
    any_process(False)
