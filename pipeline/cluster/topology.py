"""How many processes and devices a run has, as plain numbers, so that a plan needs no devices."""

from dataclasses import dataclass

from pipeline.config.schema import RunOptions
from pipeline.core.errors import ConfigError


@dataclass(frozen=True)
class Topology:
    """The processes and devices of a run. `index` and `count` are over all processes of all workers."""

    devices: int  # of this worker, over all its processes
    device_bytes: int | None = None  # memory of each device but what is reserved; None: not known
    host_memory: int | None = None  # bytes of this process's host; None: not known
    few_cores: bool = False  # the devices are the host's own few cores, which must also do everything else
    processes: int = 1  # of this worker
    process: int = 0
    workers: int = 1
    worker: int = 0

    @property
    def index(self) -> int:
        return self.worker * self.processes + self.process

    @property
    def count(self) -> int:
        return self.workers * self.processes


def reserved_bytes(run: RunOptions) -> int:
    """Of each device's memory, what is left to others."""
    return int(run.reserved_mib * (1 << 20))


def unreserved(device_bytes: int, run: RunOptions) -> int:
    """What a run may use of a device's memory. Raises ConfigError if that is nothing."""
    left = device_bytes - reserved_bytes(run)
    if left <= 0:
        raise ConfigError(
            f"run.reserved_mib is {run.reserved_mib:g}, and each device has {device_bytes / (1 << 20):.0f} MiB. Lower "
            "it to what others need of a device: weights, optimiser state and gradients of a training."
        )
    return left
