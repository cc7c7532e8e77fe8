"""How many processes and devices a run has, as plain numbers, so that a plan needs no devices."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Topology:
    """The processes and devices of a run. `index` and `count` are over all processes of all workers."""

    devices: int  # of this worker, over all its processes
    device_bytes: int | None = None  # memory of each device; None: not known
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
