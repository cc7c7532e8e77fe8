"""The loop: token blocks in, steps dispatched, activations handed to the writer."""

import numpy as np

from pipeline.data.documents import TokenBlock
from pipeline.data.feed import Feed
from pipeline.distributed import StopRequest, put_rows, row_sharding
from pipeline.errors import Interrupted
from pipeline.forward import CompiledStep
from pipeline.metrics import Metrics
from pipeline.plan import Plan
from pipeline.transfer import start_copies
from pipeline.writer import BlockWriter, Step

STOP_POLL_S = 0.2  # how often a loop that waits for input looks whether it is asked to stop


def extract(
    plan: Plan,
    step: CompiledStep,
    params: object,
    feed: Feed,
    writer: BlockWriter,
    metrics: Metrics,
    stop: StopRequest,
) -> None:
    """Runs every block of the feed through the model. Returns when all of them are committed.

    While step n computes, step n-1 is copied to the host and step n-2 is in the writer. Raises Interrupted after a
    stop request, once the complete blocks are committed, and whatever failed in the feed or the writer.
    """
    sharding = row_sharding(step.mesh)

    def dispatch(block: TokenBlock, first_row: int) -> Step:
        rows = slice(first_row, first_row + plan.process_rows)
        batch = put_rows(sharding, step_rows(block, rows, plan.process_rows))
        activations, counts = step(params, batch["tokens"], batch["segments"], batch["positions"])
        counts.copy_to_host_async()
        return Step(block, first_row, plan.process_rows, start_copies(activations, plan.first_row), counts)

    def run_block(block: TokenBlock) -> None:
        if block.num_rows == 0:  # a stream without documents: only its record says so
            writer.acquire()
            writer.submit(Step(block, first_row=0, num_rows=0, copies=[], counts=None))
        for first_row in range(0, block.num_rows, plan.process_rows):
            if stop.requested():
                return
            with metrics.stage("loop", "budget"):
                writer.acquire()
            with metrics.stage("loop", "dispatch"):
                writer.submit(dispatch(block, first_row))

    try:
        while not stop.requested():
            try:
                with metrics.stage("loop", "data"):
                    block = feed.get(timeout_s=STOP_POLL_S)
            except TimeoutError:
                continue
            metrics.seconds["feed"]["full"] = feed.producer_wait_s
            if block is None:
                break
            run_block(block)
    finally:  # also when the feed fails: what was computed is stored
        with metrics.stage("loop", "finish"):
            writer.close()
    if stop.requested():
        raise Interrupted(
            f"stopped by {stop.signal_name} after {metrics.blocks} complete blocks, which are committed. "
            f"Run the same command again to resume."
        )


def step_rows(block: TokenBlock, rows: slice, num_rows: int) -> dict[str, np.ndarray]:
    """The model's inputs for some rows of a block, int32 [num_rows, T]; rows past the block's end are padding."""
    inputs = {name: getattr(block, name)[rows] for name in ("tokens", "segments", "positions")}
    short = num_rows - inputs["tokens"].shape[0]
    if short:
        inputs = {name: np.pad(values, ((0, short), (0, 0))) for name, values in inputs.items()}
    return inputs
