"""Processes, devices, the mesh, and requests to stop. The only caller of `jax.process_index()`."""

import errno
import hashlib
import importlib.metadata
import importlib.util
import itertools
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pipeline.allocator import num_cores
from pipeline.config import DistributedConfig, RunConfig, RunOptions
from pipeline.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, ConfigError, Interrupted, PipelineError
from pipeline.mesh import Topology
from pipeline.startup import signals_heeded_while_waiting

log = logging.getLogger("pipeline")

_FEW_CORES = 2  # on so many, a second step in flight was measured to help nothing
_SHUTDOWN_TIMEOUT_S = 8  # how long a process that is done waits for the others to say the same
_JAXS_EXTRA_S = 60  # longer than the program waits for the others, since JAX aborts the process
_NOTHING_DETECTED = "coordinator_address should be defined"  # how JAX says that this is no cluster

_steps = itertools.count()  # of this process, over all jobs of a sweep: what a sync point is named by


def skip_absent_tpu() -> None:
    """Has JAX use the CPU where libtpu is installed, for plans, and no TPU: asked for one, libtpu complains at length.

    JAX itself names its platforms where it sees a TPU, and so does a user by JAX_PLATFORMS; both hold.
    """
    others = importlib.metadata.entry_points(group="jax_plugins")  # CUDA's, for example
    if jax.config.jax_platforms is None and importlib.util.find_spec("libtpu") and not others:
        jax.config.update("jax_platforms", "cpu")


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


def make_mesh(tensor: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """All devices, `tensor` neighbours along `tensor`. A process's devices are neighbours: its rows lie together."""
    ordered = sorted(devices or jax.devices(), key=lambda device: (device.process_index, device.id))
    grid = np.array(ordered).reshape(-1, tensor)
    return Mesh(grid, ("data", "tensor"), axis_types=(AxisType.Auto, AxisType.Auto))


def row_sharding(mesh: Mesh) -> NamedSharding:
    """Rows divided along `data`; a row is never divided."""
    return NamedSharding(mesh, PartitionSpec("data"))


def activation_sharding(mesh: Mesh, width: int) -> NamedSharding:
    """Of [B, T, D]: rows along `data`, and D along `tensor` where it divides, so that each device copies its part."""
    if mesh.shape["tensor"] == 1 or width % mesh.shape["tensor"]:
        return row_sharding(mesh)
    return NamedSharding(mesh, PartitionSpec("data", None, "tensor"))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def put_rows(sharding: NamedSharding, local: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """This process's rows [process_rows, T] as its part of global arrays [step_rows, T]."""
    return {name: jax.make_array_from_process_local_data(sharding, values) for name, values in local.items()}


class StopRequest:
    """A wish to stop, by SIGTERM or SIGINT to any process of the worker; all of them stop before the same step.

    A second SIGINT raises KeyboardInterrupt as usual.
    """

    def __init__(self) -> None:
        self._event = threading.Event()
        self._shared = jax.process_count() > 1
        self.signal_name = "SIGTERM"

    @property
    def noticed(self) -> bool:
        """Whether this process knows that it is to stop. Among several, that is only once they have agreed on when."""
        return self._event.is_set()

    def before_step(self) -> bool:
        """Whether to stop before the next step. Every process asks exactly once per step."""
        if self._shared and not self.noticed and multihost_utils.reached_preemption_sync_point(next(_steps)):
            self._event.set()
        return self.noticed

    def check(self) -> None:
        """Raises Interrupted if a stop is requested; for the time before anything is computed."""
        if self.noticed:
            raise Interrupted(f"stopped by {self.signal_name} before the first step. Run the same command again.")

    def on_signal(self, number: int, _frame: object) -> None:
        name = signal.Signals(number).name
        log.warning("%s: stopping; Ctrl-C aborts at once", name)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._shared:
            os.kill(os.getpid(), signal.SIGTERM)  # JAX's own handler tells the others
        else:
            self.signal_name = name
            self._event.set()


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Turns SIGTERM and SIGINT into a StopRequest while inside. In a job of several processes JAX handles SIGTERM."""
    stop = StopRequest()
    numbers = (signal.SIGINT,) if jax.process_count() > 1 else (signal.SIGTERM, signal.SIGINT)
    previous = {number: signal.signal(number, stop.on_signal) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
