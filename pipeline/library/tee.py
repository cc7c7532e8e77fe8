"""Writes the blocks of a stream that a store lacks into the store, as the command does, during training."""

import logging
from collections.abc import Callable
from itertools import islice
from typing import Self

from pipeline.data.documents import TokenBlock
from pipeline.data.feed import InTurn
from pipeline.job.job import Job
from pipeline.job.loaded_step import LoadedStep
from pipeline.job.metrics import Metrics
from pipeline.job.rounding import measure_rounding
from pipeline.job.running import complete, open_store, work_left
from pipeline.job.writing.block_writer import BlockWriter
from pipeline.job.writing.transfer import StepInFlight

log = logging.getLogger("pipeline")


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
