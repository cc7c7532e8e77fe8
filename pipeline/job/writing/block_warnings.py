"""Warnings about the blocks of a run: values that are not finite, and too few or too many slots per row."""

import logging
from collections.abc import Sequence

import numpy as np

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
    if plan.fails_on_not_finite:
        raise NotFiniteError(
            f"{problem} The block is not stored. Start a new store with capture.dtype=bfloat16 or float32; if that "
            f"does not help, or the values are features, with model.dtype=float32."
        )
    log.warning("%s They are stored unchanged and excluded from the statistics.", problem)


class SlotChecks:
    """Warns about capture.per_row if it leaves out selected tokens, or keeps rows mostly empty."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._has_warned_of_empty_rows = False

    def check(self, block: TokenBlock) -> None:
        """Warns about each block that leaves out selected tokens, and once per run about mostly empty rows."""
        if self._plan.limits_selected and (left_out := sum(block.table["n_unselected"].to_pylist())):
            log.warning(
                "block %d of stream %d: %d selected tokens are not stored, since their windows select more than "
                "capture.per_row=%d; n_unselected counts them for each document",
                *(block.index, block.stream, left_out, self._plan.step.selected),
            )
        if self._plan.limits_selected and self._plan.is_packed and not self._has_warned_of_empty_rows:
            self._check_empty_rows(block)

    def _check_empty_rows(self, block: TokenBlock) -> None:
        """Warns if a block of whole steps uses most of its slots but less than half of its positions."""
        plan, spec = self._plan, self._plan.step
        if block.num_rows < plan.mesh.process_rows:
            return
        filled = np.count_nonzero(block.segments) / (block.num_rows * spec.length)
        slots_filled = np.count_nonzero(block.stored) / (block.num_rows * spec.selected)
        if filled < 0.5 < slots_filled:
            self._has_warned_of_empty_rows = True
            log.warning(
                "the rows of block %d of stream %d are only %.0f %% full, because %.0f %% of the capture.per_row=%d "
                "slots for selected tokens are used. In a new store, set a larger capture.per_row to fill them",
                *(block.index, block.stream, 100 * filled, 100 * slots_filled, spec.selected),
            )
