"""Device-to-host copies: started on the dispatching thread, awaited by the writer, bounded in number.

Every step's activations have the same size, so a limit on steps in flight is the limit on bytes in flight.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from pipeline.data.documents import TokenBlock
from pipeline.planning.plan import Plan
from pipeline.step.compiled_step import StepOutputs


@dataclass(frozen=True)
class HostBlock:
    """One device's part of one output, while it is copied to the host."""

    output: int  # index among the leaves of `StepOutputs.stored`, as in BlockBuffers
    rows: slice  # relative to the first row of this process
    rest: tuple[slice, ...]  # along the other axes
    data: jax.Array

    def place(self, first_row: int) -> tuple[slice, ...]:
        """The index of this part in a host array in which the step begins at row `first_row`."""
        return (slice(first_row + self.rows.start, first_row + self.rows.stop), *self.rest)

    def wait(self) -> np.ndarray:
        """Waits for the values, without holding the GIL, and returns them. On CPU they are a view, not a copy."""
        return np.asarray(self.data)


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
        return int(np.count_nonzero(self.block.segments[self.first_row : self.first_row + self.num_rows]))


def start_transfer(outputs: StepOutputs, block: TokenBlock | None, first_row: int, plan: Plan) -> StepInFlight:
    """Starts the copies of a step's outputs to the host; for padding, copies only the counts."""
    outputs.counts.copy_to_host_async()
    copies = start_copies(jax.tree.leaves(outputs.stored), plan.mesh.first_row) if block else []
    return StepInFlight(block, first_row, plan.mesh.process_rows, copies, outputs.counts)


def empty_step(block: TokenBlock) -> StepInFlight:
    """The only step of a block without rows: nothing is computed."""
    return StepInFlight(block, first_row=0, num_rows=0, copies=[], counts=None)


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
            blocks.append(HostBlock(number, rows, shard.index[1:], shard.data))
    return blocks


class InFlight:
    """Limits the number of steps between dispatch and host. At the limit the loop waits; no data is dropped."""

    def __init__(self, limit: int) -> None:
        self._free = limit
        self._failed = False
        self._changed = threading.Condition()

    def acquire(self) -> bool:
        """Waits until a step may be dispatched. Returns False if the writer has failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._free or self._failed)
            self._free -= 1
            return not self._failed

    def release(self) -> None:
        with self._changed:
            self._free += 1
            self._changed.notify()

    def fail(self) -> None:
        with self._changed:
            self._failed = True
            self._changed.notify_all()
