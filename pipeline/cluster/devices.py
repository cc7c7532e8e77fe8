"""What JAX sees of this host's and this worker's devices."""

import importlib.metadata
import importlib.util
import os
from pathlib import Path

import jax

from pipeline.cluster.topology import Topology
from pipeline.config.schema import RunOptions
from pipeline.core.cores import num_cores

_FEW_CORES = 2  # on so many, a second step in flight was measured to help nothing


def skip_absent_tpu() -> None:
    """Has JAX use the CPU where libtpu is installed, for plans, and no TPU: asked for one, libtpu complains at length.

    JAX itself names its platforms where it sees a TPU, and so does a user by JAX_PLATFORMS; both hold.
    """
    others = importlib.metadata.entry_points(group="jax_plugins")  # CUDA's, for example
    if jax.config.jax_platforms is None and importlib.util.find_spec("libtpu") and not others:
        jax.config.update("jax_platforms", "cpu")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a program or an array did not fit into a device's memory, found at compilation or later."""
    return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)


def topology(run: RunOptions) -> Topology:
    """The processes and devices that JAX sees, and this worker's place among the workers."""
    return Topology(
        devices=jax.device_count(),
        device_bytes=_device_bytes(),
        host_memory=_host_memory(),
        few_cores=jax.default_backend() == "cpu" and num_cores() <= _FEW_CORES,
        processes=jax.process_count(),
        process=jax.process_index(),
        workers=run.worker_count,
        worker=run.worker_index,
    )


def _device_bytes() -> int | None:
    """The memory that JAX may use of each device; None where it does not say, as on the CPU."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")


def _host_memory() -> int:
    """Bytes that this host has, or its container may use of them."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:  # no container, or of another kind
        return memory
    return min(memory, int(limit)) if limit.isdecimal() else memory
