"""Writes the blocks of a stream that a store lacks into the store, as the command does, during training."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from typing import Self

from pipeline.data.documents import TokenBlock
from pipeline.data.feed import Feed, InTurn, StreamWork
from pipeline.extraction.block_writer import BlockWriter
from pipeline.extraction.job_run import complete, measure_int8, open_store, work_left
from pipeline.extraction.loaded_step import LoadedStep
from pipeline.extraction.transfer import StepInFlight, empty_step, start_transfer
from pipeline.job.metrics import Metrics
from pipeline.job.opening import Job

log = logging.getLogger("pipeline")


@dataclass(frozen=True)
class _Before:
    """The blocks of each stream's work before a given block."""

    work: Sequence[tuple[StreamWork, int | None]]  # the work, and the block to stop before; None for all

    def blocks(self, should_stop: Callable[[], bool]) -> Iterator[TokenBlock]:
        for item, end in self.work:
            yield from islice(item.blocks(should_stop), None if end is None else end - item.index)


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
            measure_int8(job, self._store)

    def __enter__(self) -> Self:
        interval_s = self._job.config.run.metrics_interval_s
        self._metrics = Metrics(total_tokens=None, stored_tokens=0, progress=False, interval_s=interval_s)
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
        if not missing:
            return
        log.info(
            "%s lacks blocks before the saved state in %d streams of documents: computing these first",
            *(self._store.path, len(missing)),
        )
        with closing(Feed(_Before(missing))) as feed:
            while not should_stop() and (block := feed.get()) is not None:
                self.begin(block)
                for first_row in range(0, block.num_rows, self._job.plan.mesh.process_rows):
                    if should_stop():
                        return
                    self.dispatch(block, first_row)

    def begin(self, block: TokenBlock) -> bool:
        """Whether the store lacks the next block. If so, dispatch all of its steps, in order."""
        left = self._left.get(block.stream)
        is_lacking = left is not None and block.index >= left.index
        if is_lacking and block.num_rows == 0:  # a stream without documents: its commit record says so
            self._writer.acquire()
            self._writer.submit(empty_step(block))
        return is_lacking

    def dispatch(self, block: TokenBlock, first_row: int) -> StepInFlight:
        """Dispatches a step whose outputs go to the store. Returns the step with separate copies for the caller. Waits
        until the writer may take another step."""
        self._writer.acquire()
        step = start_transfer(self._step(block, first_row), block, first_row, self._job.plan)
        self._writer.submit(replace(step, copies=[*step.copies]))
        return step

    def finish(self) -> None:
        """Commits what was dispatched, and completes the store if it holds what was asked for."""
        self._writer.close()
        complete(self._job, self._store)
