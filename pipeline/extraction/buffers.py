"""The host memory of one block: its steps' outputs in the shapes of store shards."""

from typing import NamedTuple

import jax
import ml_dtypes  # noqa: F401  registers "bfloat16" with numpy
import numpy as np
from jaxtyping import Shaped

from pipeline.planning.plan import Plan
from pipeline.step.row_statistics import RowStatistics


class BlockBuffers(NamedTuple):
    """Arrays of the R rows of a block. The leaves are those of `StepOutputs.stored`."""

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
