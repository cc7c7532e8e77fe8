"""JAX's devices, and the memory of devices and host."""

import importlib.metadata
import importlib.util
import os
from pathlib import Path

import jax

from pipeline.cluster import processes
from pipeline.cluster.topology import Topology, unreserved
from pipeline.config.schema import RunOptions
from pipeline.core.cores import num_cores
from pipeline.core.errors import ConfigError

_FEW_CORES = 2  # up to this number, a second step in flight did not help when measured


def skip_absent_tpu() -> bool:
    """Makes JAX use the CPU on a machine with libtpu, which plans need, but without a TPU. Otherwise libtpu would log
    errors. Returns whether it changed JAX's configuration.

    Does nothing if JAX has another plugin, such as CUDA's. `jax_platforms` is set if JAX has detected a TPU or
    JAX_PLATFORMS is set.
    """
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    if jax.config.jax_platforms is None and importlib.util.find_spec("libtpu") and not plugins:
        jax.config.update("jax_platforms", "cpu")
        return True
    return False


def open_devices() -> None:
    """Opens JAX's CPU devices now where it would look for an absent TPU (`skip_absent_tpu`); otherwise does nothing.
    JAX's configuration does not change."""
    if skip_absent_tpu():
        jax.devices()
        jax.config.update("jax_platforms", None)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a program or an array did not fit in a device's memory, at compilation or later."""
    return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)


def topology(run: RunOptions) -> Topology:
    """The topology of this run: JAX's processes and devices, and this worker's index among the workers.

    Raises ConfigError if the devices belong to several processes that have not joined.
    """
    if jax.process_count() != processes.count():
        raise ConfigError(
            f"the devices belong to {jax.process_count()} processes, which have not joined. Set "
            f"distributed.coordinator, num_processes and process_id."
        )
    return Topology(
        devices=jax.device_count(),
        device_bytes=_device_bytes(run),
        host_memory=_host_memory(),
        few_cores=jax.default_backend() == "cpu" and num_cores() <= _FEW_CORES,
        processes=jax.process_count(),
        process=jax.process_index(),
        workers=run.worker_count,
        worker=run.worker_index,
    )


def _device_bytes(run: RunOptions) -> int | None:
    """The bytes of each device that the run may use; None if JAX does not report them, as on the CPU."""
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    return None if limit is None else unreserved(limit, run)


def _host_memory() -> int:
    """The memory of this host in bytes, or the limit of its container if that is lower."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:  # no container, or one without cgroup v2
        return memory
    return min(memory, int(limit)) if limit.isdecimal() else memory
