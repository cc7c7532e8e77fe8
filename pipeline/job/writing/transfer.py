"""Steps in flight: their copies from devices to the host, and checks of what arrives.

Copies are started on the dispatching thread, and awaited by the writer, which copies them into its memory. Every step's
activations have the same size, so a limit on steps in flight is the limit on bytes in flight.
"""

import concurrent.futures
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding

from pipeline.config.choices import OnNotFinite
from pipeline.core.errors import NotFiniteError
from pipeline.core.host import num_cores
from pipeline.data.documents import TokenBlock
from pipeline.models.exchange.context import device_chunks
from pipeline.planning.host_memory import MAX_COPY_THREADS
from pipeline.planning.plan import Plan
from pipeline.step.compiled_step import StepOutputs

T = TypeVar("T")

_CORES_PER_THREAD = 8  # the others read, tokenise, encode and write
_PIECE_BYTES = 4 << 20  # copied per task; large enough to hide the cost of a task


@dataclass(frozen=True)
class HostBlock:
    """One device's part of one output, or one chunk of its rows, while it is copied to the host."""

    output: int  # index among the leaves of `StepOutputs.stored`, as in BlockBuffers
    rows: slice  # relative to the first row of this process
    rest: tuple[slice, ...]  # along the other axes
    data: jax.Array
    part: tuple[slice, ...] = ()  # of the data

    def place(self, first_row: int) -> tuple[slice, ...]:
        """The index of this part in a host array in which the step begins at row `first_row`."""
        return (slice(first_row + self.rows.start, first_row + self.rows.stop), *self.rest)

    def wait(self) -> np.ndarray:
        """Waits for the values, without holding the GIL, and returns them. On CPU they are a view, not a copy."""
        return np.asarray(self.data)[self.part]


@dataclass(frozen=True)
class StepInFlight:
    """One dispatched step: the rows of `block` from `first_row` on, and the copies of its outputs.

    If `block` is None, the step is padding, computed because other processes have rows.
    """

    block: TokenBlock | None
    first_row: int
    num_rows: int
    copies: list[HostBlock]  # emptied by the writer: an array's host copy lives as long as the array
    counts: jax.Array | None  # StepOutputs.counts; None for a step without rows

    @property
    def is_last(self) -> bool:
        return self.block is not None and self.first_row + self.num_rows >= self.block.num_rows

    @property
    def num_tokens(self) -> int:
        if self.block is None:
            return 0
        return int(np.count_nonzero(self.block.documents[self._rows] >= 0))

    def num_tokens_of_job(self, num_valid: int) -> int:
        """Of the `num_valid` tokens of all processes, those that are not context: in proportion to this process's."""
        own_valid = 0 if self.block is None else int(np.count_nonzero(self.block.segments[self._rows]))
        return num_valid * self.num_tokens // own_valid if own_valid else num_valid

    @property
    def _rows(self) -> slice:
        return slice(self.first_row, self.first_row + self.num_rows)


def start_transfer(outputs: StepOutputs, block: TokenBlock | None, first_row: int, plan: Plan) -> StepInFlight:
    """Starts the copies of a step's outputs to the host; for padding, copies only the counts."""
    outputs.counts.copy_to_host_async()
    copies = start_copies(jax.tree.leaves(outputs.stored), plan.mesh.first_row) if block else []
    return StepInFlight(block, first_row, plan.mesh.process_rows, copies, outputs.counts)


def start_copies(outputs: Sequence[jax.Array], first_row: int) -> list[HostBlock]:
    """Starts copying every output's addressable device shards; each element is copied once.

    `first_row` is the global row at which this process's rows begin.
    """
    blocks = []
    for number, output in enumerate(outputs):
        for shard in output.addressable_shards:
            if shard.replica_id != 0:
                continue
            shard.data.copy_to_host_async()
            start, stop, _ = shard.index[0].indices(output.shape[0])
            rows = slice(start - first_row, stop - first_row)
            for rest, part in _chunks(output, shard.index[1:]):
                blocks.append(HostBlock(number, rows, rest, shard.data, part))
    return blocks


def _chunks(output: jax.Array, rest: tuple[slice, ...]) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """The places of a device's part in the output, along the axes after the rows, and the pieces of the part that
    belong there. `rest` is the place of the part; chunks of rows may be in another order (`exchange/context.py`)."""
    spec = output.sharding.spec if isinstance(output.sharding, NamedSharding) else ()
    if "context" not in spec:
        yield rest, ()
        return
    axis = spec.index("context")
    length, context = output.shape[axis], output.sharding.mesh.shape["context"]
    size, start = length // (2 * context), rest[axis - 1].start or 0
    for half, chunk in enumerate(device_chunks(context, length)[start // size :][:2]):
        place, part = list(rest), [slice(None)] * output.ndim
        place[axis - 1], part[axis] = chunk, slice(half * size, (half + 1) * size)
        yield tuple(place), tuple(part)


def in_flight(steps: Iterable[T], limit: int) -> Iterator[T]:
    """The steps that an iterator dispatches, in order, each when up to `limit` are in flight."""
    dispatched: deque[T] = deque()
    for step in steps:
        dispatched.append(step)
        if len(dispatched) == limit:
            yield dispatched.popleft()
    yield from dispatched


class CopyThreads:
    """Copies arrays that have reached the host into our memory, with a thread per 8 cores of this process, at most 8.

    NumPy copies without holding the GIL, so threads copy in parallel; one does not saturate the memory bandwidth. Only
    one thread at a time may call the methods.
    """

    def __init__(self) -> None:
        count = max(1, min(MAX_COPY_THREADS, num_cores() // _CORES_PER_THREAD))
        self._pool = ThreadPoolExecutor(count, "copy")
        self._copies: list[Future[None]] = []

    def start(self, target: np.ndarray, values: np.ndarray) -> None:
        """Starts copying `values` into `target`, then releases them. Raises ValueError if the shapes differ."""
        if target.shape != values.shape:  # pieces with different numbers of rows could be broadcast
            raise ValueError(f"values of shape {values.shape} do not fit in memory of shape {target.shape}")
        rows = max(1, len(values) * _PIECE_BYTES // max(1, values.nbytes))
        for first in range(0, len(values), rows):
            piece = slice(first, first + rows)
            self._copies.append(self._pool.submit(np.copyto, target[piece], values[piece]))

    def finish(self) -> None:
        """Waits for all copies. Raises the error of the first copy that failed."""
        copies, self._copies = self._copies, []
        concurrent.futures.wait(copies)
        for copy in copies:
            copy.result()


log = logging.getLogger("pipeline")


def check_finite(plan: Plan, block: TokenBlock | None, counts: Sequence[int]) -> None:
    """Raises NotFiniteError on every process, or warns, according to capture.on_not_finite.

    counts: for each counted array, the number of a step's tokens with a value that is not finite, over all processes.
    """
    arrays = [f"{name} ({count} tokens)" for name, count in zip(plan.step.counted_names, counts, strict=True) if count]
    if not arrays:
        return
    blocks = [f"block {block.index} of stream {block.stream}"] if block else []
    if plan.mesh.processes > 1:
        blocks.append("another process's block")
    dtype = f" as {plan.step.dtype}" if plan.step.keys else ""
    problem = f"{' or '.join(blocks)} has values that are not finite{dtype}: {', '.join(arrays)}."
    if plan.config.capture.on_not_finite is OnNotFinite.fail:
        raise NotFiniteError(
            f"{problem} The block is not stored. Start a new store with capture.dtype=bfloat16 or float32; if that "
            f"does not help, or the values are features, with model.dtype=float32."
        )
    log.warning("%s They are stored unchanged and excluded from the statistics.", problem)


def warn_of_unselected(plan: Plan, block: TokenBlock) -> None:
    """Warns if a block leaves out selected tokens."""
    if plan.step.selected is not None and (left_out := sum(block.table["n_unselected"].to_pylist())):
        log.warning(
            "block %d of stream %d: %d selected tokens are not stored, since their windows select more than "
            "capture.per_row=%d; n_unselected counts them for each document",
            *(block.index, block.stream, left_out, plan.step.selected),
        )
