"""JAX's devices, the memory of devices and host, and both as plain numbers for a plan."""

import importlib.metadata
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.sharding import Mesh

from pipeline.cluster.processes import count
from pipeline.config.schema import RunOptions
from pipeline.core.errors import ConfigError
from pipeline.core.host import device_memory, host_memory, num_cores


@dataclass(frozen=True)
class Topology:
    """The processes and devices of a run. `count` processes divide the streams, of which this is number `index`."""

    devices: int  # over all processes that compute a step together
    device_bytes: int | None = None  # memory of each device, without what is reserved; None: unknown
    host_memory: int | None = None  # bytes of this process's host; None: unknown
    platform: str = "cpu"  # of the devices
    few_cores: bool = False  # the devices are the host's few cores, which also do all other work
    processes: int = 1  # that compute a step together
    process: int = 0
    world: int = 1  # readers of a `Stream`, each of which computes with its own devices
    rank: int = 0

    @property
    def index(self) -> int:
        return self.rank * self.processes + self.process

    @property
    def count(self) -> int:
        return self.world * self.processes


def reserved_bytes(run: RunOptions) -> int:
    """The bytes of each device that are reserved for other uses."""
    return int(run.reserved_mib * (1 << 20))


def unreserved(device_bytes: int, run: RunOptions) -> int:
    """The bytes of a device that a run may use. Raises ConfigError if there are none."""
    available = device_bytes - reserved_bytes(run)
    if available <= 0:
        raise ConfigError(
            f"run.reserved_mib is {run.reserved_mib:g}, but each device has {device_bytes / (1 << 20):.0f} MiB. Lower "
            "it to what the other use needs, e.g. for training: parameters, optimiser state and gradients."
        )
    return available


_DEVICES = Path("/dev")
_ACCELERATORS = {  # device files by the extra that uses them; /dev/vfio/vfio is there without a device
    "tpu": ("accel[0-9]*", "vfio/[0-9]*"),
    "cuda": ("nvidia[0-9]*",),
}
_FEW_CORES = 2  # up to this number, a second step in flight did not help when measured
_COORDINATOR_PORT = 8476  # JAX's, until 0.8.1; firewalls that come with a TPU slice open it, but not JAX's 8482
_MAX_TRANSFER_BUFFER = 16 << 30  # of a TPU host, pinned; 4 GiB by default, which several large steps would fill


def require_accelerator(folder: Path = _DEVICES) -> None:
    """Raises ConfigError if JAX lacks the platform of JAX_PLATFORMS, or if it uses the CPU, unasked, although `folder`
    has the files of an accelerator."""
    try:
        if jax.config.jax_platforms == "cpu" or jax.default_backend() != "cpu":
            return
    except AssertionError:  # what JAX raises if the plugin of a platform such as cuda is not installed
        raise ConfigError(
            f"JAX_PLATFORMS is '{jax.config.jax_platforms}', which JAX cannot use. Install the extra `cuda` or `tpu` "
            "of this package, or set JAX_PLATFORMS=cpu."
        ) from None
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
