"""The writer thread: copies steps into host buffers, and starts writing full blocks into the store.

A block's activations are gathered in one preallocated buffer per array. A buffer has the shape of a store shard, so
each store shard is encoded from its buffer and written once. There are `plan.memory.host_buffers` sets of buffers: one
is filled while the other is written. A device array is released as soon as its values are in the buffer.
"""

import logging
import queue
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import NamedTuple

import jax
import numpy as np

from pipeline.core.errors import StoreError
from pipeline.data.documents import TokenBlock
from pipeline.extraction.block_contents import commit_record, side_arrays
from pipeline.extraction.block_summaries import SummaryThreads
from pipeline.extraction.block_warnings import SlotChecks, check_finite
from pipeline.extraction.buffers import BlockBuffers
from pipeline.extraction.draining import CopyThreads, num_copy_threads
from pipeline.extraction.leasing import LeasedStreams
from pipeline.extraction.metrics_writes import MetricsWrites
from pipeline.extraction.transfer import HostBlock, InFlight, StepInFlight
from pipeline.job.metrics import Metrics, Stage
from pipeline.planning.plan import Plan
from pipeline.store.format.commits import CommitRecord
from pipeline.store.write.store_writer import StoreWriter

log = logging.getLogger("pipeline")

POLL_S = 0.02  # how often an idle writer checks whether a block's writes have finished


class _Pending(NamedTuple):
    """A block that is being written."""

    block: TokenBlock
    buffers: BlockBuffers
    written: Future[CommitRecord]


class BlockWriter:
    """Owns the writer thread. `acquire`, `submit` and `close` re-raise its error, with the traceback.

    Before that, the thread finishes its blocks. After a failed write it commits every block that was submitted whole,
    except later blocks of the failed stream. After any other error it commits every block whose writes had started.
    """

    def __init__(self, store: StoreWriter, plan: Plan, metrics: Metrics, leased: LeasedStreams | None = None) -> None:
        """leased: if given, blocks of streams that this process no longer holds are dropped."""
        self.in_flight = InFlight(plan.memory.inflight_steps)
        self._store = store
        self._leased = leased
        self._plan = plan
        self._metrics = metrics
        self._metrics_writes = MetricsWrites(store, metrics)
        self._checks = SlotChecks(plan)
        self._queue: queue.Queue[StepInFlight | None] = queue.Queue()  # bounded by `in_flight`
        self._free = [BlockBuffers.allocate(plan) for _ in range(plan.memory.host_buffers)]
        self._filled: BlockBuffers | None = None  # the buffers of the block that is being copied
        self._pending: deque[_Pending] = deque()
        self._summaries = SummaryThreads(plan.step)
        self._copy_threads = CopyThreads(num_copy_threads())
        self._failed_streams: set[int] = set()  # a block could not be stored, so later ones are not
        self._error: BaseException | None = None
        self._has_raised = False
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self._thread.start()

    def acquire(self) -> None:
        """Waits until another step may be dispatched."""
        if not self.in_flight.acquire():
            self._raise()

    def submit(self, step: StepInFlight) -> None:
        """Queues a dispatched step. Submit the steps of a block in order, and blocks one after the other."""
        if self._error is not None:
            self._raise()
        self._queue.put(step)

    def close(self) -> None:
        """Waits until all submitted steps are copied and every complete block is committed.

        Does not raise an error again that `acquire` or `submit` has raised.
        """
        self._join()
        if self._error is not None and not self._has_raised:
            self._raise()

    def _raise(self) -> None:
        self._join()
        self._has_raised = True
        raise self._error

    def _join(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while (step := self._next()) is not None:
                self._drain(step)
                if step.is_last:
                    self._begin(step.block)
                if self._error is None:
                    self._metrics_writes.start_if_due()
            self._finish_pending()
            if self._error is None:
                self._metrics_writes.close()
        except BaseException as error:
            self._fail(error)
            self._finish_pending()

    def _fail(self, error: BaseException) -> None:
        """Records the first error, which the loop's next call raises; logs later ones."""
        if self._error is None:
            self._error = error
            self.in_flight.fail()
        else:
            log.error("then the writer failed again: %s", error)

    def _next(self) -> StepInFlight | None:
        """Waits for the next step. Meanwhile releases the blocks that are committed."""
        while True:
            self._finish_done()
            try:
                with self._metrics.stage(Stage.WRITER_IDLE):
                    return self._queue.get(timeout=POLL_S if self._pending else None)
            except queue.Empty:
                continue

    def _drain(self, step: StepInFlight) -> None:
        """Waits for a step's outputs and copies them into the block's buffers."""
        if step.counts is not None:
            with self._metrics.stage(Stage.WRITER_RESULTS):
                jax.block_until_ready(step.counts)
        if step.first_row == 0 and step.block is not None:
            self._filled = self._take_buffers()
        try:
            while step.copies:
                self._copy(step.copies.pop(), step.first_row)
        finally:
            with self._metrics.stage(Stage.WRITER_COPY):
                self._copy_threads.finish()
        if step.counts is not None:
            with self._metrics.stage(Stage.WRITER_RESULTS):
                valid, *not_finite = np.asarray(step.counts).tolist()  # over all processes
            check_finite(self._plan, step.block, not_finite)
            self._metrics.drained(step.num_tokens, valid)
        self.in_flight.release()

    def _take_buffers(self) -> BlockBuffers:
        """Takes the set that was freed last, so that the other is touched only if the store is the bottleneck."""
        self._finish_done()
        if not self._free:
            self._finish()
        return self._free.pop()

    def _copy(self, copy: HostBlock, first_row: int) -> None:
        with self._metrics.stage(Stage.WRITER_RESULTS):
            values = copy.wait()
        with self._metrics.stage(Stage.WRITER_COPY):
            self._copy_threads.start(self._filled.leaves()[copy.output][copy.place(first_row)], values)

    def _begin(self, block: TokenBlock) -> None:
        """Starts writing a block whose activations are all in the buffers."""
        buffers, self._filled = self._filled, None
        if not self._may_commit(block.stream):
            self._release(block.stream, buffers)
            return
        with self._metrics.stage(Stage.WRITER_COPY):
            self._checks.check(block)
            arrays = buffers.padded(block.num_rows, self._plan) | side_arrays(block, self._plan.rows_per_block)
        written = None
        with self._stream_errors(block.stream), self._metrics.stage(Stage.WRITER_STORE):
            summaries = self._summaries.start(block, arrays, buffers.statistics)
            written = self._store.start_block(commit_record(block), arrays, block.table, summaries.result)
        if written is None:
            self._release(block.stream, buffers)
        else:
            self._pending.append(_Pending(block, buffers, written))

    def _finish_done(self) -> None:
        """Releases the oldest pending blocks, up to the first that is not committed yet."""
        while self._pending and self._pending[0].written.done():
            self._finish()

    def _finish_pending(self) -> None:
        while self._pending:
            self._finish()

    def _finish(self) -> None:
        """Waits until the oldest pending block is committed, and frees its buffers."""
        block, buffers, written = self._pending.popleft()
        with self._stream_errors(block.stream), self._metrics.stage(Stage.WRITER_STORE):
            written.result()
            self._metrics.committed(self._plan.memory.block_bytes * block.num_rows // self._plan.rows_per_block)
        self._release(block.stream, buffers)

    @contextmanager
    def _stream_errors(self, stream: int) -> Iterator[None]:
        """After an error in this context no further block of the stream is committed.

        A StoreError is recorded, and other streams continue. Any other error is raised and ends the thread.
        """
        has_failed = stream in self._failed_streams
        try:
            yield
        except BaseException as error:
            self._failed_streams.add(stream)
            if not isinstance(error, StoreError):
                raise
            if not has_failed:  # else a later block, which fails with the earlier one
                self._fail(error)

    def _may_commit(self, stream: int) -> bool:
        return stream not in self._failed_streams and (self._leased is None or self._leased.holds(stream))

    def _release(self, stream: int, buffers: BlockBuffers) -> None:
        """Frees the buffers of a block that is committed or dropped."""
        if self._leased:
            self._leased.finished(stream)
        self._free.append(buffers)
