"""Fills a store. The loop takes token blocks, dispatches steps, and passes their outputs to the writer.

feed thread                 this thread                               writer thread
documents -> token blocks   rows of a block -> step on the devices    copies to the host -> blocks -> store
"""

import logging
from contextlib import ExitStack, closing
from dataclasses import dataclass

import numpy as np

from pipeline.cluster import devices, processes
from pipeline.cluster.preemption import StopRequest
from pipeline.core.errors import Interrupted
from pipeline.data.documents import TokenBlock
from pipeline.data.feed import Feed
from pipeline.job.job import Job
from pipeline.job.leasing import LeasedStreams
from pipeline.job.loaded_step import LoadedStep
from pipeline.job.metrics import Metrics, Stage
from pipeline.job.profiling import ProfileWindow
from pipeline.job.watchdog import Watchdog
from pipeline.job.writing.block_writer import BlockWriter
from pipeline.job.writing.transfer import StepInFlight
from pipeline.planning.plan import Plan
from pipeline.store.write.leases import Leases
from pipeline.store.write.store_writer import StoreWriter

log = logging.getLogger("pipeline")

POLL_S = 0.2  # how often a loop that waits for input checks for a request to stop, or for other processes' rows


def fill(job: Job, store: StoreWriter, stop: StopRequest, step: LoadedStep) -> Metrics:
    """Extracts the streams that this process can lease into the store, which must not be complete, until no stream has
    work left. Raises Interrupted after a stop request, and ConfigError if a device lacks the memory for a step."""
    options = job.config.run
    plan = job.plan.fitted(step.compiled.memory, devices.topology(options).device_bytes)
    if plan.memory.inflight_steps < job.plan.memory.inflight_steps:
        log.warning("%s", plan.memory.notes[-1])
    own = job.plan.streams.local if options.progress else ()  # not read for anything else before their turn
    stored_tokens = sum(blocks.tokens for blocks in store.streams.some(own).values())
    metrics = Metrics(
        total_tokens=job.plan.streams.max_tokens,
        stored_tokens=processes.total_of_all(stored_tokens),
        progress=options.progress and processes.is_first(),
    )
    with ExitStack() as stack:
        stack.enter_context(closing(metrics))
        leases = stack.enter_context(closing(Leases(store.storage, options.lease_s, options.exclusive)))
        leased = LeasedStreams(job, store, leases, metrics)
        writer = BlockWriter(store, plan, metrics, leased)
        feed = stack.enter_context(closing(Feed(leased)))
        stack.enter_context(Watchdog(metrics, options.stall_timeout_s, leases.close))
        profile = stack.enter_context(closing(ProfileWindow(options))) if options.profile else None
        ExtractionLoop(plan, step, feed, writer, metrics, stop, profile).run()
    log.info("%s", metrics.summary())
    return metrics


@dataclass
class ExtractionLoop:
    """Runs every block of the feed through the step.

    While step n computes, step n-1 is copied to the host and step n-2 is in the writer, up to the plan's limit of steps
    in flight. All processes of a job dispatch the same number of steps: a process without rows, for the moment or
    for good, dispatches padding until every feed has ended.
    """

    plan: Plan
    step: LoadedStep
    feed: Feed
    writer: BlockWriter
    metrics: Metrics
    stop: StopRequest
    profile: ProfileWindow | None = None

    def run(self) -> None:
        """Returns when all blocks are committed.

        After a stop request, commits the complete blocks and raises Interrupted. Re-raises errors of the feed and of
        the writer.
        """
        try:
            timeout_s = POLL_S
            while not self.stop.noticed:
                block, has_ended = self._next_block(timeout_s)
                if block is not None:
                    self._extract(block)
                    timeout_s = POLL_S
                elif self.plan.mesh.processes > 1:
                    others_have_rows = self._pad()
                    if not others_have_rows and not self.stop.noticed and self._all_have_ended(has_ended):
                        break
                    timeout_s = 0 if others_have_rows else POLL_S  # others wait for this process's next step
                elif has_ended:
                    break
        finally:  # also if the feed fails, to store what was computed
            with self.metrics.stage(Stage.LOOP_FINISH):
                self.writer.close()
        if self.stop.noticed:
            raise Interrupted(
                f"stopped by {self.stop.signal_name}; {self.metrics.blocks} complete blocks are committed. "
                f"Run the same command again to resume."
            )

    def _next_block(self, timeout_s: float) -> tuple[TokenBlock | None, bool]:
        """The next block, or None after `timeout_s`, and whether the feed has ended."""
        try:
            with self.metrics.stage(Stage.LOOP_DATA):
                block = self.feed.get(timeout_s)
        except TimeoutError:
            self.writer.raise_error()  # the feed may wait for a block that the writer has failed to commit
            return None, False
        self.metrics.record_feed(self.feed.producer_work_s, self.feed.producer_wait_s)
        return block, block is None

    def _extract(self, block: TokenBlock) -> None:
        """Dispatches the steps of a block."""
        if block.num_rows == 0:
            self.writer.dispatch(self.step, block, first_row=0)  # computes nothing
        for first_row in range(0, block.num_rows, self.plan.mesh.process_rows):
            if self.stop.before_step():
                break
            self._dispatch(block, first_row)

    def _pad(self) -> bool:
        """Dispatches a step of padding, unless all processes stop. Returns whether other processes had rows in it."""
        if self.stop.before_step():
            return False
        counts = self._dispatch(None, first_row=0).counts
        with self.metrics.stage(Stage.LOOP_OTHERS):
            return bool(np.asarray(counts)[0] > 0)

    def _all_have_ended(self, has_ended: bool) -> bool:
        """Whether the feed of every process has ended."""
        with self.metrics.stage(Stage.LOOP_OTHERS):
            return not processes.any_process(not has_ended)

    def _dispatch(self, block: TokenBlock | None, first_row: int) -> StepInFlight:
        if self.profile:
            with self.metrics.stage(Stage.LOOP_PROFILE):
                self.profile.before_step()
        return self.writer.dispatch(self.step, block, first_row)
