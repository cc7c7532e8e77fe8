"""The host memory of one block: what its steps put out, gathered in the shapes of store shards."""

from typing import NamedTuple

import jax
import ml_dtypes  # noqa: F401  numpy then knows "bfloat16"
import numpy as np
from jaxtyping import Shaped

from pipeline.planning.plan import Plan
from pipeline.step.row_statistics import RowStatistics


class BlockBuffers(NamedTuple):
    """Arrays of R rows: a block's. The leaves are those of `StepOutputs.stored`."""

    arrays: tuple[Shaped[np.ndarray, "R S *k"], ...]  # the specification's `stored_arrays`
    statistics: RowStatistics | None

    @classmethod
    def allocate(cls, plan: Plan) -> "BlockBuffers":
        """Without values. The memory is touched only when it is filled."""
        spec, rows = plan.step, plan.rows_per_block
        arrays = tuple(np.empty((rows, spec.slots, *array.token_shape), array.dtype) for array in spec.stored_arrays)
        statistics = {name: np.empty((rows, *shape), np.float32) for name, shape in spec.statistics_shapes.items()}
        return cls(arrays, RowStatistics(**statistics) if statistics else None)

    def leaves(self) -> list[np.ndarray]:
        """In the order of `HostBlock.output`."""
        return jax.tree.leaves(tuple(self))

    def padded(self, num_rows: int, plan: Plan) -> dict[str, np.ndarray]:
        """The store's arrays by name, with their fill values in the rows that the block does not have."""
        arrays = {}
        for spec, array in zip(plan.step.stored_arrays, self.arrays, strict=True):
            array[num_rows:] = spec.fill
            arrays[spec.name] = array
        return arrays
