"""The compiled step with its operands: takes rows of token blocks, returns activations on the devices."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from jaxtyping import Int32, PyTree

from pipeline.cluster.sharding import put_rows, row_sharding
from pipeline.data.documents import TokenBlock
from pipeline.models.decoder import Params
from pipeline.step.compiled_step import CompiledStep, StepOutputs
from pipeline.step.spec import StepSpec


class Operands(Protocol):
    """The inputs of a step other than its token rows."""

    def for_rows(self, block: TokenBlock | None, rows: slice) -> PyTree:
        """The step's first argument for these rows of a block; for rows of padding if `block` is None."""


@dataclass(frozen=True)
class ModelWeights:
    """The operands of a forward pass: the parameters, which are the same for all rows."""

    params: Params

    def for_rows(self, block: TokenBlock | None, rows: slice) -> Params:
        return self.params


@dataclass(frozen=True)
class LoadedStep:
    """A compiled step that is called with rows of a block."""

    compiled: CompiledStep
    operands: Operands
    process_rows: int  # rows per step of this process

    def __call__(self, block: TokenBlock | None, first_row: int) -> StepOutputs:
        """Dispatches a step for the rows of `block` from `first_row` on; for rows of padding if `block` is None."""
        rows = slice(first_row, first_row + self.process_rows)
        inputs = put_rows(row_sharding(self.compiled.mesh), step_inputs(block, rows, self.compiled.spec))
        return self.compiled(self.operands.for_rows(block, rows), *inputs.values())


def step_inputs(block: TokenBlock | None, rows: slice, spec: StepSpec) -> dict[str, Int32[np.ndarray, "rows _"]]:
    """A step's token rows: tokens, segments and positions [rows, T], and `selected` [rows, K] if the step selects.

    Rows beyond the end of the block are padding.
    """
    inputs = {
        name: np.zeros((rows.stop - rows.start, spec.length), np.int32) for name in ("tokens", "segments", "positions")
    }
    if spec.selected is not None:
        inputs["selected"] = np.full((rows.stop - rows.start, spec.selected), -1, np.int32)
    if block is not None:
        for name, values in inputs.items():
            given = getattr(block, name)[rows]
            values[: len(given)] = given
    return inputs
