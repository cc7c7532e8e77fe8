"""The writer thread: drains steps into host buffers, a full block into the store, and commits blocks in order.

A block's activations are gathered in one preallocated buffer per captured key, the exact shape of a store shard, so
that each store shard is written once and whole, encoded from there. There are `plan.host_buffers` such
sets: while one is filled the other is written. A device array is dropped as soon as its values are in the buffer.
"""

import logging
import queue
import threading
from collections import deque
from dataclasses import asdict, dataclass

import jax
import ml_dtypes  # noqa: F401  numpy then knows "bfloat16"
import numpy as np

from pipeline.core.errors import NotFiniteError, StoreError
from pipeline.data.documents import TokenBlock
from pipeline.extraction.claiming import ClaimedStreams
from pipeline.extraction.transfer import HostBlock, InFlight
from pipeline.job.metrics import Metrics
from pipeline.planning.plan import Plan
from pipeline.store.format.commits import CommitRecord
from pipeline.store.format.int8 import scale_name
from pipeline.store.format.statistics import Statistics, block_statistics
from pipeline.store.write.store_writer import PendingBlock, StoreWriter

log = logging.getLogger("pipeline")

POLL_S = 0.02  # how often an idle writer looks whether a block's writes have finished


@dataclass(frozen=True)
class Step:
    """One dispatched step: rows `first_row` .. of `block`, and the copies of its activations.

    Without a block it is padding, computed because other processes have rows.
    """

    block: TokenBlock | None
    first_row: int
    num_rows: int
    copies: list[HostBlock]  # emptied by the writer: an array's host copy lives as long as the array
    counts: jax.Array | None  # what CompiledStep counts; None for a step without rows

    @property
    def is_last(self) -> bool:
        return self.block is not None and self.first_row + self.num_rows >= self.block.num_rows

    @property
    def num_tokens(self) -> int:
        if self.block is None:
            return 0
        return int(np.count_nonzero(self.block.segments[self.first_row : self.first_row + self.num_rows]))


class BlockWriter:
    """Owns the writer thread. `acquire`, `submit` and `close` re-raise what failed there, with its traceback. Before
    that the thread ends what it has: after a write that failed, every block that was submitted whole is committed, but
    those behind a failed one of their stream; after another error, every block whose writes were under way."""

    def __init__(self, store: StoreWriter, plan: Plan, metrics: Metrics, claimed: ClaimedStreams | None = None) -> None:
        """With `claimed`, blocks of streams that this process no longer holds are dropped."""
        self.in_flight = InFlight(plan.inflight_steps)
        self._store = store
        self._claimed = claimed
        self._plan = plan
        self._metrics = metrics
        self._queue: queue.Queue[Step | None] = queue.Queue()  # as many steps as are in flight, see acquire
        self._free = [_new_buffers(plan) for _ in range(plan.host_buffers)]
        self._filled: list[np.ndarray] = []  # of the block that is being drained
        self._pending: deque[tuple[PendingBlock, CommitRecord, list[np.ndarray]]] = deque()
        self._failed_streams: set[int] = set()  # of which a block could not be stored, and so none after it is
        self._error: BaseException | None = None
        self._raised = False
        self._warned_of_empty_rows = False
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self._thread.start()

    def acquire(self) -> None:
        """Waits until another step may be dispatched."""
        if not self.in_flight.acquire():
            self._raise()

    def submit(self, step: Step) -> None:
        """Hands over a dispatched step. Steps of a block come in order, and blocks one after the other."""
        if self._error is not None:
            self._raise()
        self._queue.put(step)

    def close(self) -> None:
        """Waits until everything submitted is drained and every complete block is committed.

        A failure of the writer that `acquire` or `submit` has already raised is not raised again.
        """
        self._join()
        if self._error is not None and not self._raised:
            self._raise()

    def _raise(self) -> None:
        self._join()
        self._raised = True
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
                if self._error is None and self._metrics.is_due():
                    self._write_metrics()
            self._commit_pending()
            if self._error is None:
                self._write_metrics()
        except BaseException as error:
            self._fail(error)
            self._commit_pending()

    def _fail(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error
            self.in_flight.fail()
        else:
            log.error("After that the writer failed again: %s", error)

    def _next(self) -> Step | None:
        """The next step; commits blocks that have become durable while there is none."""
        while True:
            self._commit_durable()
            try:
                with self._metrics.stage("writer", "idle"):
                    return self._queue.get(timeout=POLL_S if self._pending else None)
            except queue.Empty:
                continue

    def _drain(self, step: Step) -> None:
        """Waits for a step's activations and copies them into the block's buffers."""
        if step.counts is not None:
            with self._metrics.stage("writer", "results"):
                jax.block_until_ready(step.counts)
        if step.first_row == 0 and step.block is not None:
            self._filled = self._take_buffers()
        while step.copies:
            self._copy(step.copies.pop(), step.first_row)
        if step.counts is not None:
            with self._metrics.stage("writer", "results"):
                of_all, *not_finite = np.asarray(step.counts).tolist()
            self._check_finite(step, not_finite)
            self._metrics.drained(step.num_tokens, of_all)
        self.in_flight.release()

    def _take_buffers(self) -> list[np.ndarray]:
        """Those that were freed last, so that others' memory is touched only if the store is the slowest."""
        self._commit_durable()
        if not self._free:
            self._commit()
        return self._free.pop()

    def _copy(self, copy: HostBlock, first_row: int) -> None:
        with self._metrics.stage("writer", "results"):
            values = copy.wait()
        rows = slice(first_row + copy.rows.start, first_row + copy.rows.stop)
        with self._metrics.stage("writer", "copy"):
            np.copyto(self._filled[copy.output][rows, *copy.rest], values)

    def _check_finite(self, step: Step, not_finite: list[int]) -> None:
        """The counts are over all processes, so all of them end, each with this message."""
        found = [f"{key.name} ({n} tokens)" for key, n in zip(self._plan.step.keys, not_finite, strict=True) if n]
        if found:
            blocks = [f"block {step.block.index} of stream {step.block.stream}"] if step.block else []
            dtype = self._plan.step.dtype
            if self._plan.processes > 1:
                blocks.append("another process's block")
            what = f"{' or '.join(blocks)} has activations that are not finite as {dtype}: {', '.join(found)}."
            if self._plan.fail_on_not_finite:
                raise NotFiniteError(
                    f"{what} It is not stored. Start a new store with capture.dtype=bfloat16 or float32; if that does "
                    f"not help, with model.dtype=float32."
                )
            log.warning("%s They are stored as they are, and left out of the statistics.", what)

    def _begin(self, block: TokenBlock) -> None:
        """Starts writing a block whose activations are all in the buffers."""
        buffers, self._filled = self._filled, []
        if not self._may_commit(block.stream):
            self._finished(block.stream, buffers)
            return
        with self._metrics.stage("writer", "copy"):
            for buffer in buffers:
                buffer[block.num_rows :] = 0
            arrays = _side_arrays(block, self._plan.rows_per_block)
            self._warn_of_unselected(block)
            self._warn_of_empty_rows(block)
            names = [key.name for key in self._plan.step.keys]
            names += [scale_name(name) for name in names if self._plan.step.scale_counts]
            of_rows = buffers[len(names) :]
            arrays |= dict(zip(names, buffers, strict=False))
        with self._metrics.stage("writer", "statistics"):
            statistics = self._statistics(block, of_rows) if of_rows else None
        try:
            with self._metrics.stage("writer", "store"):
                pending = self._store.begin_block(block.stream, block.index, arrays, block.table, statistics)
        except StoreError as error:
            self._failed_streams.add(block.stream)
            self._fail(error)
            self._finished(block.stream, buffers)
            return
        self._pending.append((pending, commit_record(block), buffers))

    def _statistics(self, block: TokenBlock, of_rows: list[np.ndarray]) -> dict[str, Statistics]:
        """The block's, by array; `of_rows` are the buffers of forward.RowStatistics."""
        moments, norms, *errors = (part[: block.num_rows] for part in of_rows)
        found, first = {}, 0
        for number, (key, width) in enumerate(zip(self._plan.step.keys, self._plan.step.widths, strict=True)):
            mean, m2 = moments[:, 0, first : first + width], moments[:, 1, first : first + width]
            squared_error = float(errors[0][:, number].sum(dtype=np.float64)) if errors else None
            found[key.name] = block_statistics(block.stored, mean, m2, norms[:, number], squared_error)
            first += width
        return found

    def _warn_of_unselected(self, block: TokenBlock) -> None:
        """Of what capture.per_row leaves out; a sample is one also without those that a row had no slot for."""
        if self._plan.warn_of_unselected and (left_out := sum(block.table["n_unselected"].to_pylist())):
            log.warning(
                "block %d of stream %d: the activations of %d selected tokens are left out, of windows of documents "
                "with more than capture.per_row=%d; n_unselected says of which documents",
                *(block.index, block.stream, left_out, self._plan.step.selected),
            )

    def _warn_of_empty_rows(self, block: TokenBlock) -> None:
        """Once a run, of a block of whole steps: rows most of whose slots for selected tokens are taken, and less than
        half of whose positions."""
        plan = self._plan
        if not plan.packs_by_slots or self._warned_of_empty_rows or block.num_rows < plan.process_rows:
            return
        filled = block.num_tokens / (block.num_rows * plan.step.length)
        slots_filled = np.count_nonzero(block.stored) / (block.num_rows * plan.step.selected)
        if filled < 0.5 < slots_filled:
            self._warned_of_empty_rows = True
            log.warning(
                "block %d of stream %d: only %.0f %% of its rows' positions have tokens, since %.0f %% of the "
                "capture.per_row=%d slots for selected ones are taken. In a new store, a larger capture.per_row fills "
                "more of them",
                *(block.index, block.stream, 100 * filled, 100 * slots_filled, plan.step.selected),
            )

    def _commit_durable(self) -> None:
        """Commits the oldest pending blocks as far as they need no waiting."""
        while self._pending and self._pending[0][0].done:
            self._commit()

    def _commit(self) -> None:
        """Waits until the oldest pending block is durable, writes its commit record, and frees its buffers.

        Where that fails, no later block of its stream is committed, and those of the others are.
        """
        pending, record, buffers = self._pending.popleft()
        try:
            with self._metrics.stage("writer", "store"):
                self._store.wait(pending)
                if self._may_commit(record.stream):
                    self._store.commit(pending, record)
                    self._metrics.committed(self._plan.block_bytes * record.rows // self._plan.rows_per_block)
        except StoreError as error:
            self._failed_streams.add(record.stream)
            self._fail(error)
        self._finished(record.stream, buffers)

    def _commit_pending(self) -> None:
        while self._pending:
            self._commit()

    def _may_commit(self, stream: int) -> bool:
        return stream not in self._failed_streams and (self._claimed is None or self._claimed.holds(stream))

    def _finished(self, stream: int, buffers: list[np.ndarray]) -> None:
        """Of a block that is committed or dropped: nothing reads its buffers any more."""
        if self._claimed:
            self._claimed.finished(stream)
        self._free.append(buffers)

    def _write_metrics(self) -> None:
        """What was measured is worth a line in the log, but no run."""
        try:
            with self._metrics.stage("writer", "metrics"):
                self._store.write_metrics(self._metrics.name, self._metrics.emit())
        except StoreError as error:
            log.warning("the run's metrics could not be written: %s", error)


def commit_record(block: TokenBlock) -> CommitRecord:
    """The record that says that a block is in the store."""
    return CommitRecord(
        stream=block.stream,
        block=block.index,
        rows=block.num_rows,
        tokens=block.num_tokens,
        documents=block.table.num_rows,
        tokens_cut=sum(block.table["n_cut"].to_pylist()),
        skipped=tuple(asdict(skip) for skip in block.skipped),
        start=block.start.to_json(),
        next=block.next.to_json(),
        exhausted=block.exhausted,
        truncated=block.truncated,
        selected=None if block.selected is None else int(np.count_nonzero(block.stored)),
    )


def _new_buffers(plan: Plan) -> list[np.ndarray]:
    """What a block's steps put out: a store shard for each captured key, their scales and forward.RowStatistics, if
    there are any. The memory is touched only when it is filled."""
    rows, slots = plan.rows_per_block, plan.step.slots
    shapes = [(rows, slots, groups) for groups in plan.step.scale_counts]
    if plan.step.statistics:
        shapes += [(rows, 2, sum(plan.step.widths)), (rows, len(plan.step.keys), slots)]
        shapes += [(rows, len(plan.step.keys))] if plan.step.measures_error else []
    activations = [np.empty((rows, slots, width), plan.step.dtype) for width in plan.step.widths]
    return activations + [np.empty(shape, np.float32) for shape in shapes]


def _side_arrays(block: TokenBlock, rows_per_block: int) -> dict[str, np.ndarray]:
    """The arrays beside the activations, padded to a full store shard."""
    missing = ((0, rows_per_block - block.num_rows), (0, 0))
    arrays = {name: np.pad(getattr(block, name), missing) for name in ("tokens", "segments", "positions")}
    arrays["documents"] = np.pad(block.documents, missing, constant_values=-1)
    if block.selected is not None:
        arrays["selected"] = np.pad(block.selected, missing, constant_values=-1)
    return arrays
