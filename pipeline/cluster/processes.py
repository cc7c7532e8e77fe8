"""Agreement among the processes of a job, by collectives. With a single process, these functions do not wait."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, replace

import jax
import numpy as np
from jax.experimental import multihost_utils

from pipeline.config.schema import DistributedConfig, RunConfig
from pipeline.core.errors import ConfigError


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
