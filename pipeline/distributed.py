"""Processes, devices, the mesh, and requests to stop. The only caller of `jax.process_index()`."""

import logging
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pipeline.config import RunOptions
from pipeline.errors import Interrupted
from pipeline.plan import Topology

log = logging.getLogger("pipeline")


def topology(run: RunOptions) -> Topology:
    """The processes and devices that JAX sees, and this worker's place among the workers."""
    return Topology(
        devices=jax.device_count(),
        processes=jax.process_count(),
        process=jax.process_index(),
        workers=run.worker_count,
        worker=run.worker_index,
    )


def make_mesh() -> Mesh:
    """All devices along `data`, one along `tensor`; a process's devices are neighbours along `data`."""
    return jax.make_mesh((jax.device_count(), 1), ("data", "tensor"), axis_types=(AxisType.Auto, AxisType.Auto))


def row_sharding(mesh: Mesh) -> NamedSharding:
    """Rows divided along `data`; a row is never divided."""
    return NamedSharding(mesh, PartitionSpec("data"))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def put_rows(sharding: NamedSharding, local: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """This process's rows [process_rows, T] as its part of global arrays [step_rows, T]."""
    return {name: jax.make_array_from_process_local_data(sharding, values) for name, values in local.items()}


class StopRequest:
    """Set by SIGTERM or SIGINT. A second SIGINT raises KeyboardInterrupt as usual."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.signal_name = ""

    def requested(self) -> bool:
        """Whether to stop before the next step; the same answer on every process of the worker."""
        return self._event.is_set()

    def check(self) -> None:
        """Raises Interrupted if a stop is requested; for the time before anything is computed."""
        if self.requested():
            raise Interrupted(f"stopped by {self.signal_name} before the first step. Run the same command again.")

    def _set(self, number: int, _frame: object) -> None:
        self.signal_name = signal.Signals(number).name
        log.warning("%s: stopping; Ctrl-C aborts at once", self.signal_name)
        self._event.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Turns SIGTERM and SIGINT into a StopRequest while inside."""
    stop = StopRequest()
    previous = {number: signal.signal(number, stop._set) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
