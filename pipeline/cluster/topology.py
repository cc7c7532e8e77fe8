"""The processes and devices of a run as plain numbers, so that a plan needs no devices."""

from dataclasses import dataclass

from pipeline.config.schema import RunOptions
from pipeline.core.errors import ConfigError


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
