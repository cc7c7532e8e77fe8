"""JAX's devices, and the memory of devices and host."""

import importlib.metadata
import importlib.util
import os
from pathlib import Path

import jax
from jax.sharding import Mesh

from pipeline.cluster.processes import count
from pipeline.cluster.topology import Topology, unreserved
from pipeline.config.schema import RunOptions
from pipeline.core.errors import ConfigError
from pipeline.core.host import device_memory, host_memory, num_cores

_DEVICES = Path("/dev")
_ACCELERATORS = {  # device files by the extra that uses them; /dev/vfio/vfio is there without a device
    "tpu": ("accel[0-9]*", "vfio/[0-9]*"),
    "cuda": ("nvidia[0-9]*",),
}
_FEW_CORES = 2  # up to this number, a second step in flight did not help when measured
_COORDINATOR_PORT = 8476  # JAX's, until 0.8.1; firewalls that come with a TPU slice open it, but not JAX's 8482
_MAX_TRANSFER_BUFFER = 16 << 30  # of a TPU host, pinned; 4 GiB by default, which several large steps would fill


def require_accelerator(folder: Path = _DEVICES) -> None:
    """Raises ConfigError if JAX uses the CPU, unasked, although `folder` has the files of an accelerator."""
    if jax.config.jax_platforms == "cpu" or jax.default_backend() != "cpu":
        return
    for extra, patterns in _ACCELERATORS.items():
        files = sorted(file for pattern in patterns for file in folder.glob(pattern))
        is_hidden = extra == "cuda" and os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
        if files and not is_hidden:
            raise ConfigError(
                f"this machine has an accelerator ({files[0]}), but JAX found none and would use the CPU. Install the "
                f"extra `{extra}` of this package and check the driver, or set JAX_PLATFORMS=cpu if the CPU is meant."
            )


def skip_absent_tpu(folder: Path = _DEVICES) -> bool:
    """Makes JAX use the CPU on a machine with libtpu, which plans need, but without a TPU. Otherwise libtpu would log
    errors. Returns whether it changed JAX's configuration. With a TPU, sets its variables that the user has not set.

    Does nothing if JAX has another plugin, such as CUDA's, or `folder` has the files of an accelerator. `jax_platforms`
    is set if JAX has detected a TPU or JAX_PLATFORMS is set.
    """
    if "tpu" in (jax.config.jax_platforms or ""):
        os.environ.setdefault("JAX_COORDINATOR_PORT", str(_COORDINATOR_PORT))
        pages = min(_MAX_TRANSFER_BUFFER, host_memory() // 8) >> 12
        os.environ.setdefault("TPU_PREMAPPED_BUFFER_SIZE", str(pages << 12))
    files = (file for patterns in _ACCELERATORS.values() for pattern in patterns for file in folder.glob(pattern))
    other = importlib.metadata.entry_points(group="jax_plugins") or next(files, None)
    if jax.config.jax_platforms is None and importlib.util.find_spec("libtpu") and not other:
        jax.config.update("jax_platforms", "cpu")
        return True
    return False


def open_devices() -> None:
    """Opens JAX's CPU devices now where it would look for an absent TPU (`skip_absent_tpu`), without a change of JAX's
    configuration."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # of 75% of a GPU, which torch may need here
    if skip_absent_tpu():
        jax.devices()
        jax.config.update("jax_platforms", None)


def describe(mesh: Mesh) -> str:
    """The devices of a mesh, the number of their processes, and the mesh's axes."""
    device, axes = mesh.devices.flat[0], ", ".join(f"{name} {size}" for name, size in mesh.shape.items())
    processes = len({device.process_index for device in mesh.devices.flat})
    return f"{mesh.size} x {device.device_kind} ({device.platform}); processes {processes}; mesh {axes}"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a program or an array did not fit in a device's memory, at compilation or later."""
    return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)


def topology(run: RunOptions) -> Topology:
    """The topology of this run: JAX's processes and devices.

    Raises ConfigError if the devices belong to several processes that have not joined, and as `require_accelerator`.
    """
    require_accelerator()
    if jax.process_count() != count():
        raise ConfigError(
            f"the devices belong to {jax.process_count()} processes, which have not joined. Set "
            f"distributed.coordinator, num_processes and process_id."
        )
    return Topology(
        devices=jax.device_count(),
        device_bytes=_device_bytes(run),
        host_memory=host_memory(),
        platform=jax.default_backend(),
        few_cores=jax.default_backend() == "cpu" and num_cores() <= _FEW_CORES,
        processes=jax.process_count(),
        process=jax.process_index(),
    )


def _device_bytes(run: RunOptions) -> int | None:
    """The bytes of each device that the run may use; None if JAX does not report them, as on the CPU."""
    limit = device_memory(jax.local_devices()[0])
    return None if limit is None else unreserved(limit, run)
