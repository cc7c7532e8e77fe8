"""Warnings about the blocks of a run: values that are not finite, and selected tokens without a slot."""

import logging
from collections.abc import Sequence

from pipeline.config.choices import OnNotFinite
from pipeline.core.errors import NotFiniteError
from pipeline.data.documents import TokenBlock
from pipeline.planning.plan import Plan

log = logging.getLogger("pipeline")


def check_finite(plan: Plan, block: TokenBlock | None, counts: Sequence[int]) -> None:
    """Raises NotFiniteError on every process, or warns, according to capture.on_not_finite.

    counts: for each counted array, the number of a step's tokens with a value that is not finite, over all processes.
    """
    arrays = [f"{name} ({count} tokens)" for name, count in zip(plan.step.counted_names, counts, strict=True) if count]
    if not arrays:
        return
    blocks = [f"block {block.index} of stream {block.stream}"] if block else []
    if plan.mesh.processes > 1:
        blocks.append("another process's block")
    dtype = f" as {plan.step.dtype}" if plan.step.keys else ""
    problem = f"{' or '.join(blocks)} has values that are not finite{dtype}: {', '.join(arrays)}."
    if plan.config.capture.on_not_finite is OnNotFinite.fail:
        raise NotFiniteError(
            f"{problem} The block is not stored. Start a new store with capture.dtype=bfloat16 or float32; if that "
            f"does not help, or the values are features, with model.dtype=float32."
        )
    log.warning("%s They are stored unchanged and excluded from the statistics.", problem)


def warn_of_unselected(plan: Plan, block: TokenBlock) -> None:
    """Warns if a block leaves out selected tokens."""
    if plan.step.selected is not None and (left_out := sum(block.table["n_unselected"].to_pylist())):
        log.warning(
            "block %d of stream %d: %d selected tokens are not stored, since their windows select more than "
            "capture.per_row=%d; n_unselected counts them for each document",
            *(block.index, block.stream, left_out, plan.step.selected),
        )
