"""Fills one half of a buffer with computed activations while a training loop reads the other half. If asked to, writes
the blocks that a store lacks into the store, as the command does.

feed thread                 fill thread                                            training thread
documents -> token blocks   rows of a block -> step on the devices -> free half    batches of the filled half
"""

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from itertools import count, islice
from typing import NamedTuple, Self

import numpy as np

from pipeline.core.errors import ArgumentError
from pipeline.data.documents import TokenBlock
from pipeline.data.feed import Feed, InTurn
from pipeline.job.job import Job
from pipeline.job.loaded_step import LoadedStep
from pipeline.job.metrics import Metrics
from pipeline.job.rounding import measure_rounding
from pipeline.job.running import complete, open_store, work_left
from pipeline.job.writing.block_writer import BlockWriter
from pipeline.job.writing.transfer import (
    CopyThreads,
    StepInFlight,
    check_finite,
    in_flight,
    start_transfer,
    warn_of_unselected,
)
from pipeline.planning.plan import Plan
from pipeline.store.format.layout import LABELS_ARRAY, SELECTED, SIDE_ARRAYS
from pipeline.store.read.gathering import TokenMemory
from pipeline.store.read.iterating import Position
from pipeline.store.read.options import BatchOptions
from pipeline.store.read.order import permutation
from pipeline.store.read.rows import slot_side_arrays

log = logging.getLogger("pipeline")

_JOIN_TIMEOUT_S = 60.0  # for the step in progress
_FEED_TIMEOUT_S = 10.0  # for the document in progress: a thread in a library's C++ code may abort a process that exits


class FeedPosition(NamedTuple):
    """Where the next step begins: at row `row` of the next block of `work`."""

    work: InTurn
    row: int = 0


class StoreTee:
    """Writes a stream's blocks into the store of its job, unless the store has them.

    A context manager for one thread. On exit it commits the blocks whose steps were all dispatched.
    """

    def __init__(self, job: Job, step: LoadedStep) -> None:
        """Creates or opens the store. Raises StoreMismatch for a store of a different configuration, and StoreError."""
        self._job = job
        self._step = step
        self._store = open_store(job)
        job.manifest.keep()
        self._left = {item.stream.stream: item for item in work_left(job, self._store)}
        if self._left:
            measure_rounding(job, self._store)

    def __enter__(self) -> Self:
        self._metrics = Metrics()
        self._writer = BlockWriter(self._store, self._job.plan, self._metrics)
        return self

    def __exit__(self, *_: object) -> None:
        """Raises the writer's error, unless it was raised before."""
        self._writer.close()
        self._metrics.close()

    def catch_up(self, begin: InTurn, should_stop: Callable[[], bool]) -> None:
        """Computes the blocks before `begin` that the store lacks, for the store alone. A process that ended before it
        committed these blocks has trained on them, so the stream does not yield them again."""
        ends = {item.stream.stream: item.index for item in begin.work}
        left = ((item, ends.get(stream)) for stream, item in self._left.items())
        missing = [(item, end) for item, end in left if end is None or item.index < end]
        if missing:
            log.info(
                "%s lacks blocks before the saved state in %d streams of documents: computing these first",
                *(self._store.path, len(missing)),
            )
        for item, end in missing:
            for block in islice(item.blocks(should_stop), None if end is None else end - item.index):
                self.begin(block)
                for first_row in range(0, block.num_rows, self._job.plan.mesh.process_rows):
                    if should_stop():
                        return
                    self.dispatch(block, first_row)

    def begin(self, block: TokenBlock) -> bool:
        """Whether the store lacks the next block. If so, dispatch all of its steps, in order."""
        left = self._left.get(block.stream)
        is_lacking = left is not None and block.index >= left.index
        if is_lacking and block.num_rows == 0:
            self.dispatch(block, first_row=0)  # computes nothing
        return is_lacking

    def dispatch(self, block: TokenBlock, first_row: int) -> StepInFlight:
        """See `BlockWriter.dispatch`."""
        return self._writer.dispatch(self._step, block, first_row)

    def finish(self) -> None:
        """Commits what was dispatched, and completes the store if it holds what was asked for."""
        self._writer.close()
        complete(self._job, self._store)


class Filler:
    """A thread that fills two memories alternately, each with the same number of steps, until the data ends.

    The content and the order of the n-th filling depend only on the plan, the work, the seed and the epoch. With `tee`,
    the blocks that a store lacks are written to it, and it is completed before the last filling is yielded.
    """

    def __init__(
        self,
        plan: Plan,
        step: LoadedStep,
        memories: Sequence[TokenMemory],
        options: BatchOptions,
        epoch: int,
        tee: StoreTee | None,
    ) -> None:
        self._plan = plan
        self._step = step
        self._options = options
        self._epoch = epoch
        self._tee = tee
        self._names = {number: array.name for number, array in enumerate(plan.step.stored_arrays)}
        self._copy_threads = CopyThreads()
        self._free: queue.SimpleQueue[TokenMemory | None] = queue.SimpleQueue()  # reentrant: a finaliser may call put
        self._filled: queue.SimpleQueue[TokenMemory | BaseException] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._error: BaseException | None = None  # not raised yet
        self._feed: Feed | None = None
        self._thread: threading.Thread | None = None
        for memory in memories:
            self._free.put(memory)

    def filled(self, begin: FeedPosition, index: int) -> Iterator[TokenMemory]:
        """Yields the memory of the fillings from number `index` on, which begins at `begin`.

        A memory is refilled once the next filling is requested. Re-raises errors of the threads.
        """
        self._feed = Feed(begin.work)
        self._thread = threading.Thread(target=self._run, args=(begin, index), name="fill", daemon=True)
        self._thread.start()
        while True:
            memory = self._filled.get()
            if isinstance(memory, BaseException):
                self._error = None
                raise memory
            yield memory
            if memory.is_last:
                return
            self._free.put(memory)

    def stop(self) -> None:
        """Tells the threads to end after the step in progress. Does not wait: any thread may call this, even the fill
        thread, which may garbage-collect the reader."""
        self._closed.set()
        self._free.put(None)
        if self._feed is not None:
            self._feed.close()

    def close(self) -> None:
        """As `stop`, but waits for the threads; with `tee`, until its blocks are committed, or raises its error."""
        self.stop()
        if self._thread is not None:
            with suppress(RuntimeError):  # not started: Ctrl-C came first
                self._thread.join(_JOIN_TIMEOUT_S if self._tee is None else None)
        if self._feed is not None:
            self._feed.close(_FEED_TIMEOUT_S)
        if self._tee is not None and self._error is not None:
            error, self._error = self._error, None
            raise error

    def _run(self, begin: FeedPosition, first_index: int) -> None:
        try:
            with self._tee or nullcontext():
                self._fill_memories(begin, first_index)
            if self._closed.is_set():  # another thread may be waiting
                self._filled.put(ArgumentError("the stream was closed by another thread than the one that reads it."))
        except BaseException as error:  # re-raised on the training thread
            if self._closed.is_set():  # nobody may be waiting any more
                log.error("a closed stream failed: %s", error)
            self._error = error
            self._filled.put(error)

    def _fill_memories(self, begin: FeedPosition, first_index: int) -> None:
        if self._tee is not None:
            self._tee.catch_up(begin.work, self._closed.is_set)
        steps = in_flight(self._dispatched(begin), self._plan.memory.inflight_steps)
        for index in count(first_index):
            if (memory := self._free.get()) is None:
                return
            memory.wait_for_users()
            self._fill(index, memory, steps)
            if self._closed.is_set():
                return
            if memory.is_last and self._tee is not None:
                self._tee.finish()
            self._filled.put(memory)
            if memory.is_last:
                return

    def _dispatched(self, begin: FeedPosition) -> Iterator[tuple[StepInFlight, FeedPosition]]:
        """Dispatches the steps from `begin` on, each with its position."""
        work, skip = begin
        while True:
            if (block := self._feed.get()) is None:
                return
            is_stored = self._tee is not None and self._tee.begin(block)
            if not is_stored:  # the store's writer checks stored blocks
                warn_of_unselected(self._plan, block)
            for first_row in range(0 if is_stored else skip, block.num_rows, self._plan.mesh.process_rows):
                step = self._tee.dispatch(block, first_row) if is_stored else self._dispatch(block, first_row)
                if first_row >= skip:
                    yield step, FeedPosition(work, first_row)
            work, skip = work.after(block), 0

    def _dispatch(self, block: TokenBlock, first_row: int) -> StepInFlight:
        return start_transfer(self._step(block, first_row), block, first_row, self._plan)

    def _fill(self, index: int, memory: TokenMemory, steps: Iterator[tuple[StepInFlight, FeedPosition]]) -> None:
        begin, row = None, 0
        while row < memory.rows and not self._closed.is_set() and (item := next(steps, None)) is not None:
            step, position = item
            begin = begin or position
            self._drain(step, memory, row)
            row += step.num_rows
        token_filter, rank, seed = self._options.token_filter, self._options.rank, self._options.order_seed
        slots = memory.within_norms(token_filter, memory.chosen(token_filter, row))
        memory.order = slots if seed is None else slots[permutation(len(slots), seed, rank, index, self._epoch)]
        memory.start, memory.is_last = Position(self._epoch, 0, index, 0, begin), row < memory.rows

    def _drain(self, step: StepInFlight, memory: TokenMemory, row: int) -> None:
        """Waits for a step's outputs and copies them into the memory, from row `row` on."""
        check_finite(self._plan, step.block, np.asarray(step.counts)[1:].tolist())
        [arrays] = memory.arrays
        try:
            while step.copies:
                copy = step.copies.pop()
                name = self._names.get(copy.output)  # None for statistics
                if name in arrays:
                    self._copy_threads.start(arrays[name][copy.place(row)], copy.wait())
        finally:
            self._copy_threads.finish()
        rows = slice(step.first_row, step.first_row + step.num_rows)
        names = [spec.name for spec in SIDE_ARRAYS] + ([SELECTED.name] if step.block.selected is not None else [])
        names += [LABELS_ARRAY.name] if LABELS_ARRAY.name in arrays else []
        side_arrays = slot_side_arrays({name: getattr(step.block, name)[rows] for name in names})
        for name, values in side_arrays.items():
            part = arrays[name][row : row + step.num_rows]
            part[: len(values)], part[len(values) :] = values, 0  # segment 0: no token
