"""The host memory of one block: what its steps put out, gathered in the shapes of store shards."""

from typing import NamedTuple

import jax
import ml_dtypes  # noqa: F401  numpy then knows "bfloat16"
import numpy as np
from jaxtyping import Float32, Shaped

from pipeline.planning.plan import Plan
from pipeline.step.row_statistics import RowStatistics
from pipeline.store.format.int8 import scale_name


class BlockBuffers(NamedTuple):
    """Arrays of R rows: a block's. The leaves are those of `StepOutputs.stored`."""

    activations: tuple[Shaped[np.ndarray, "R S D"], ...]  # in the order of the plan's keys
    scales: tuple[Float32[np.ndarray, "R S G"], ...]  # of int8; else none
    statistics: RowStatistics | None
    outputs: tuple[Shaped[np.ndarray, "R S *k"], ...] = ()  # in the order of the plan's

    @classmethod
    def allocate(cls, plan: Plan) -> "BlockBuffers":
        """Without values. The memory is touched only when it is filled."""
        spec, rows = plan.step, plan.rows_per_block
        arrays = zip(spec.widths, spec.dtypes, strict=True)
        activations = tuple(np.empty((rows, spec.slots, width), dtype) for width, dtype in arrays)
        scales = tuple(np.empty((rows, spec.slots, count), np.float32) for count in spec.scale_counts)
        outputs = tuple(
            np.empty((rows, spec.slots, *([] if array.width is None else [array.width])), array.dtype)
            for array in spec.outputs
        )
        if not spec.statistics_widths:
            return cls(activations, scales, None, outputs)
        statistics = RowStatistics(
            moments=np.empty((rows, 2, sum(spec.statistics_widths.values())), np.float32),
            norms=np.empty((rows, len(spec.statistics_widths), spec.slots), np.float32),
            squared_errors=np.empty((rows, len(spec.keys)), np.float32) if spec.measures_error else None,
        )
        return cls(activations, scales, statistics, outputs)

    def leaves(self) -> list[np.ndarray]:
        """In the order of `HostBlock.output`."""
        return jax.tree.leaves(tuple(self))

    def pad(self, num_rows: int, plan: Plan) -> None:
        """Sets the rows that the block does not have to the arrays' fill values."""
        for buffer in self.leaves():
            buffer[num_rows:] = 0
        for array, buffer in zip(plan.step.outputs, self.outputs, strict=True):
            buffer[num_rows:] = array.fill

    def arrays(self, plan: Plan) -> dict[str, np.ndarray]:
        """The store's arrays of activations, scales and outputs, by name."""
        names = [key.name for key in plan.step.keys]
        scales = zip(map(scale_name, names), self.scales, strict=False)  # none but for int8
        outputs = zip((array.name for array in plan.step.outputs), self.outputs, strict=True)
        return dict(zip(names, self.activations, strict=True)) | dict(scales) | dict(outputs)
