"""The loop: token blocks in, steps dispatched, activations handed to the writer."""

from collections.abc import Callable

import jax
import numpy as np

from pipeline.cluster.preemption import StopRequest
from pipeline.cluster.processes import any_process
from pipeline.cluster.sharding import put_rows, row_sharding
from pipeline.core.errors import Interrupted
from pipeline.data.documents import TokenBlock
from pipeline.data.feed import Feed
from pipeline.extraction.block_writer import BlockWriter, Step
from pipeline.extraction.profiling import ProfileWindow
from pipeline.extraction.transfer import start_copies
from pipeline.job.metrics import Metrics
from pipeline.planning.plan import Plan
from pipeline.step.compiled_step import CompiledStep

POLL_S = 0.2  # how often a loop that waits for input looks whether it is asked to stop, or others have rows


def extract(
    plan: Plan,
    step: CompiledStep,
    params_of: Callable[[TokenBlock | None, slice], object],
    feed: Feed,
    writer: BlockWriter,
    metrics: Metrics,
    stop: StopRequest,
    profile: ProfileWindow | None = None,
) -> None:
    """Runs every block of the feed through the model. Returns when all of them are committed.

    `params_of` gives what the step takes for some rows of a block: the parameters, whatever the rows are, or what was
    captured of them.

    While step n computes, step n-1 is copied to the host and step n-2 is in the writer, as far as the plan lets steps
    be in flight. All processes of the worker dispatch the same number of steps: one that has no rows, for now or for
    good, feeds padding until every feed has ended. Raises Interrupted after a stop request, once the complete blocks
    are committed, and whatever failed in the feed or the writer.
    """
    sharding = row_sharding(step.mesh)
    no_rows = {name: np.zeros((plan.process_rows, plan.step.length), np.int32) for name in _INPUTS}
    if plan.step.selected is not None:
        no_rows["selected"] = np.full((plan.process_rows, plan.step.selected), -1, np.int32)

    def dispatch(block: TokenBlock | None, first_row: int) -> Step:
        if profile:
            with metrics.stage("loop", "profile"):
                profile.before_step()
        with metrics.stage("loop", "budget"):
            writer.acquire()
        with metrics.stage("loop", "dispatch"):
            rows = slice(first_row, first_row + plan.process_rows)
            batch = put_rows(sharding, step_rows(block, rows, plan.process_rows) if block else no_rows)
            outputs = step(params_of(block, rows), *batch.values())
            outputs.counts.copy_to_host_async()
            wanted = jax.tree.leaves((outputs.activations, outputs.scales, outputs.statistics))
            copies = start_copies(wanted, plan.first_row) if block else []
            dispatched = Step(block, first_row, plan.process_rows, copies, outputs.counts)
            writer.submit(dispatched)
        return dispatched

    def dispatch_block(block: TokenBlock) -> None:
        if block.num_rows == 0:  # a stream without documents: only its record says so
            writer.acquire()
            writer.submit(Step(block, first_row=0, num_rows=0, copies=[], counts=None))
        for first_row in range(0, block.num_rows, plan.process_rows):
            if stop.before_step():
                break
            dispatch(block, first_row)

    try:
        others_have_rows = False
        while not stop.noticed:
            block, ended = _next_block(feed, metrics, timeout_s=0 if others_have_rows else POLL_S)
            if block is not None:
                dispatch_block(block)
                others_have_rows = False
            elif plan.processes == 1:
                if ended:
                    break
            elif not stop.before_step():
                counts = dispatch(None, first_row=0).counts
                with metrics.stage("loop", "others"):
                    others_have_rows = np.asarray(counts)[0] > 0
                    if not others_have_rows and not any_process(not ended):
                        break
    finally:  # also when the feed fails: what was computed is stored
        with metrics.stage("loop", "finish"):
            writer.close()
    if stop.noticed:
        raise Interrupted(
            f"stopped by {stop.signal_name} after {metrics.blocks} complete blocks, which are committed. "
            f"Run the same command again to resume."
        )


_INPUTS = ("tokens", "segments", "positions")


def _next_block(feed: Feed, metrics: Metrics, timeout_s: float) -> tuple[TokenBlock | None, bool]:
    """The next block, if it is ready in time, and whether the feed has ended."""
    try:
        with metrics.stage("loop", "data"):
            block = feed.get(timeout_s)
    except TimeoutError:
        return None, False
    of_feed = metrics.seconds["feed"]
    of_feed["work"], of_feed["full"] = feed.producer_work_s - of_feed["claim"], feed.producer_wait_s
    return block, block is None


def step_rows(block: TokenBlock, rows: slice, num_rows: int) -> dict[str, np.ndarray]:
    """The step's inputs for some rows of a block, in their order: int32 [num_rows, T], and [num_rows, K] `selected`.

    Rows past the block's end are padding.
    """
    inputs = {name: getattr(block, name)[rows] for name in _INPUTS}
    if block.selected is not None:
        inputs["selected"] = block.selected[rows]
    short = num_rows - inputs["tokens"].shape[0]
    if short:
        fills = {"selected": -1}
        inputs = {
            name: np.pad(values, ((0, short), (0, 0)), constant_values=fills.get(name, 0))
            for name, values in inputs.items()
        }
    return inputs
