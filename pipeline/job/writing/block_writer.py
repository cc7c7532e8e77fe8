"""The writer thread: copies steps into host buffers, and starts writing full blocks into the store.

A block's activations are gathered in one preallocated buffer per array. A buffer has the shape of a store shard, so
each store shard is encoded from its buffer and written once. There are `plan.memory.host_buffers` sets of buffers: one
is filled while others are written. A device array is released as soon as its values are in the buffer.
"""

import logging
import queue
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from typing import NamedTuple

import jax
import ml_dtypes  # noqa: F401  registers "bfloat16" with numpy
import numpy as np
from jaxtyping import Shaped

from pipeline.core.errors import StoreError
from pipeline.data.documents import TokenBlock
from pipeline.job.leasing import LeasedStreams
from pipeline.job.loaded_step import LoadedStep
from pipeline.job.metrics import Metrics, Stage
from pipeline.job.writing.block_summaries import BlockSummary
from pipeline.job.writing.transfer import CopyThreads, StepInFlight, check_finite, start_transfer, warn_of_unselected
from pipeline.planning.host_memory import MAX_SORTING_THREADS
from pipeline.planning.plan import Plan
from pipeline.step.stored_values import RowStatistics
from pipeline.store.format.commits import CommitRecord
from pipeline.store.format.layout import StoreLayout
from pipeline.store.write.store_writer import StoreWriter, metrics_key

log = logging.getLogger("pipeline")


class BlockBuffers(NamedTuple):
    """Host memory for the R rows of a block. The leaves are those of `StepOutputs.stored`."""

    arrays: tuple[Shaped[np.ndarray, "R S *k"], ...]  # the specification's `stored_arrays`
    statistics: RowStatistics | None

    @classmethod
    def allocate(cls, plan: Plan) -> "BlockBuffers":
        """Allocates uninitialised arrays. The memory is touched only when it is filled."""
        spec, rows = plan.step, plan.rows_per_block
        arrays = tuple(np.empty((rows, spec.slots, *array.token_shape), array.dtype) for array in spec.stored_arrays)
        statistics = {name: np.empty((rows, *shape), np.float32) for name, shape in spec.statistics_shapes.items()}
        return cls(arrays, RowStatistics(**statistics) if statistics else None)

    def leaves(self) -> list[np.ndarray]:
        """The arrays, in the order of `HostBlock.output`."""
        return jax.tree.leaves(tuple(self))

    def padded(self, num_rows: int, plan: Plan) -> dict[str, np.ndarray]:
        """The store's arrays by name, with fill values in the rows from `num_rows` on."""
        arrays = {}
        for spec, array in zip(plan.step.stored_arrays, self.arrays, strict=True):
            array[num_rows:] = spec.fill
            arrays[spec.name] = array
        return arrays


class BlockWriter:
    """Owns the writer thread. `dispatch`, `submit`, `raise_error` and `close` re-raise its error, with the traceback.

    Before that, the thread finishes its blocks. If a block could not be stored, it commits every block that was
    submitted whole, except later blocks of the failed stream. After an error of its own, such as activations that are
    not finite, it commits every block whose writes had started.
    """

    def __init__(self, store: StoreWriter, plan: Plan, metrics: Metrics, leased: LeasedStreams | None = None) -> None:
        """leased: if given, blocks of streams that this process no longer holds are dropped."""
        self._store = store
        self._leased = leased
        self._plan = plan
        self._metrics = metrics
        self._may_dispatch = threading.Semaphore(plan.memory.inflight_steps)
        self._steps: queue.SimpleQueue[StepInFlight | None] = queue.SimpleQueue()
        # The set that was freed last is used first, so that others are touched only if the store is the bottleneck.
        self._free: queue.LifoQueue[BlockBuffers] = queue.LifoQueue()
        for _ in range(plan.memory.host_buffers):
            self._free.put(BlockBuffers.allocate(plan))
        self._filled: BlockBuffers | None = None  # the buffers of the block that is being copied
        self._writing: dict[tuple[int, int], BlockBuffers] = {}  # by stream and index of the block
        self._copy_threads = CopyThreads()
        self._summary_threads = ThreadPoolExecutor(MAX_SORTING_THREADS, "features")
        self._finishing = threading.Lock()
        self._failed_streams: set[int] = set()  # a block could not be stored, so later ones are not
        self._error: BaseException | None = None
        self._has_raised = False
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self._thread.start()

    def dispatch(self, compute: LoadedStep, block: TokenBlock | None, first_row: int) -> StepInFlight:
        """Waits until another step may be in flight, and dispatches the step of a block's rows from `first_row` on (of
        padding if it is None). Its outputs go to the store. Returns the step with separate copies for the caller."""
        with self._metrics.stage(Stage.LOOP_BUDGET):
            if self._error is None:
                self._may_dispatch.acquire()
            if self._error is not None:
                self._raise()
        with self._metrics.stage(Stage.LOOP_DISPATCH):
            if block is not None and block.num_rows == 0:  # a stream without documents: its commit record says so
                step = StepInFlight(block, first_row=0, num_rows=0, copies=[], counts=None)
            else:
                step = start_transfer(compute(block, first_row), block, first_row, self._plan)
            self.submit(replace(step, copies=[*step.copies]))
        return step

    def submit(self, step: StepInFlight) -> None:
        """Queues a dispatched step. Submit the steps of a block in order, and blocks one after the other."""
        self.raise_error()
        self._steps.put(step)

    def raise_error(self) -> None:
        """Raises the thread's error, if it has one."""
        if self._error is not None:
            self._raise()

    def close(self) -> None:
        """Waits until all submitted steps are copied and every complete block is committed.

        Does not raise an error again that `dispatch` or `submit` has raised.
        """
        self._join()
        if self._error is not None and not self._has_raised:
            self._raise()

    def _raise(self) -> None:
        self._join()
        self._has_raised = True
        raise self._error

    def _join(self) -> None:
        self._steps.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while (step := self._next_step()) is not None:
                self._drain(step)
                if step.is_last:
                    self._begin(step.block)
                if self._metrics.is_due():
                    self._write_log()
        except BaseException as error:
            self._fail(error)
        with self._metrics.stage(Stage.WRITER_STORE):
            for _ in range(self._plan.memory.host_buffers - (self._filled is not None)):
                self._free.get()  # all of them: every block is committed, or has failed
        if self._error is None:
            self._write_log()

    def _fail(self, error: BaseException) -> None:
        """Records the first error, which the loop's next call raises; logs later ones."""
        if self._error is None:
            self._error = error
            self._may_dispatch.release()  # the loop may wait
        elif error is not self._error:  # else a later block of the stream, which fails with the earlier one
            log.error("then the writer failed again: %s", error)

    def _next_step(self) -> StepInFlight | None:
        with self._metrics.stage(Stage.WRITER_IDLE):
            return self._steps.get()

    def _drain(self, step: StepInFlight) -> None:
        """Waits for a step's outputs and copies them into the block's buffers."""
        if step.counts is not None:
            with self._metrics.stage(Stage.WRITER_RESULTS):
                jax.block_until_ready(step.counts)
        if step.first_row == 0 and step.block is not None:
            with self._metrics.stage(Stage.WRITER_STORE):
                self._filled = self._free.get()
        try:
            while step.copies:
                copy = step.copies.pop()
                with self._metrics.stage(Stage.WRITER_RESULTS):
                    values = copy.wait()
                with self._metrics.stage(Stage.WRITER_COPY):
                    self._copy_threads.start(self._filled.leaves()[copy.output][copy.place(step.first_row)], values)
        finally:
            with self._metrics.stage(Stage.WRITER_COPY):
                self._copy_threads.finish()
        if step.counts is not None:
            with self._metrics.stage(Stage.WRITER_RESULTS):
                valid, *not_finite = np.asarray(step.counts).tolist()  # over all processes
            check_finite(self._plan, step.block, not_finite)
            self._metrics.drained(step.num_tokens, step.num_tokens_of_job(valid))
        self._may_dispatch.release()

    def _begin(self, block: TokenBlock) -> None:
        """Starts writing a block whose activations are all in the buffers."""
        buffers, self._filled = self._filled, None
        if block.stream in self._failed_streams or (self._leased and not self._leased.holds(block.stream)):
            self._release(block.stream, buffers)
            return
        try:
            with self._metrics.stage(Stage.WRITER_COPY):
                warn_of_unselected(self._plan, block)
                arrays = buffers.padded(block.num_rows, self._plan)
                arrays |= side_arrays(block, self._store.layout)
            with self._metrics.stage(Stage.WRITER_STORE):
                summary = BlockSummary(self._plan.step, block, arrays, buffers.statistics, self._summary_threads)
                written = self._store.start_block(commit_record(block), arrays, block.table, summary.result)
        except Exception as error:
            written = Future()
            written.set_exception(error)
        # Without the block and its buffers, since the store keeps the last future of each stream.
        self._writing[block.stream, block.index] = buffers
        written.add_done_callback(partial(self._finish, block.stream, block.index, block.num_rows))

    def _finish(self, stream: int, index: int, num_rows: int, written: Future[CommitRecord]) -> None:
        """Counts a block that is committed. After a failure no later block of its stream is. Any thread calls this."""
        with self._finishing:
            try:
                written.result()
                self._metrics.committed(self._plan.memory.block_bytes * num_rows // self._plan.rows_per_block)
            except BaseException as error:
                self._failed_streams.add(stream)
                self._fail(error)
        self._release(stream, self._writing.pop((stream, index)))

    def _release(self, stream: int, buffers: BlockBuffers) -> None:
        """Frees the buffers of a block that is committed or dropped."""
        try:
            if self._leased:
                self._leased.finished(stream)
        except BaseException as error:
            self._fail(error)
        finally:
            self._free.put(buffers)

    def _write_log(self) -> None:
        """Writes the run's log. If that fails, logs a warning: the run continues without it."""
        with self._metrics.stage(Stage.WRITER_METRICS):
            try:
                self._store.storage.write(metrics_key(self._metrics.name), self._metrics.emit())
            except StoreError as error:
                log.warning("cannot write the run's metrics: %s", error)


def side_arrays(block: TokenBlock, layout: StoreLayout) -> dict[str, Shaped[np.ndarray, "R ..."]]:
    """The layout's side arrays, padded to the R rows of a block."""
    arrays = {spec.name: np.full(layout.block_shape(spec), spec.fill, spec.dtype) for spec in layout.side_arrays}
    for name, array in arrays.items():
        if block.num_rows:  # else there may be no labels
            array[: block.num_rows] = getattr(block, name)
    return arrays


def commit_record(block: TokenBlock) -> CommitRecord:
    """The record that commits a block."""
    return CommitRecord(
        stream=block.stream,
        block=block.index,
        rows=block.num_rows,
        tokens=block.num_tokens,
        activations=int(np.count_nonzero(block.stored)),
        documents=block.table.num_rows,
        tokens_cut=sum(block.table["n_cut"].to_pylist()),
        skipped=tuple(asdict(skip) for skip in block.skipped),
        start=block.start.to_json(),
        next=block.next.to_json(),
        exhausted=block.exhausted,
    )
