"""The compiled step with its weights: takes rows of token blocks, returns activations on the devices."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Int32, PyTree

from pipeline.cluster import processes
from pipeline.cluster.sharding import put_rows
from pipeline.config.schema import RunConfig
from pipeline.data.documents import TokenBlock
from pipeline.job.generation.kept_rows import KeptRows
from pipeline.job.job import Job
from pipeline.models.decoder import Params
from pipeline.models.partition import Partition
from pipeline.models.registry import Model
from pipeline.planning.encoders import Encoder
from pipeline.planning.plan import Plan
from pipeline.step.compiled_step import CompiledStep, StepOutputs, compile_step, compile_storing
from pipeline.step.spec import StepSpec


@dataclass(frozen=True)
class LoadedStep:
    """A compiled step that is called with rows of a block.

    operands: the step's first argument for some rows of a block (None: padding): the weights, the same for all rows, or
    activations that were kept during generation. process_rows: rows per step of this process.
    """

    compiled: CompiledStep
    operands: Callable[[TokenBlock | None, slice], PyTree]
    process_rows: int

    def __call__(self, block: TokenBlock | None, first_row: int) -> StepOutputs:
        """Dispatches a step for the rows of `block` from `first_row` on; for rows of padding if `block` is None."""
        rows = slice(first_row, first_row + self.process_rows)
        inputs = put_rows(self.compiled.mesh, step_inputs(block, rows, self.compiled.spec))
        return self.compiled(self.operands(block, rows), *inputs.values())


def load_step(job: Job, devices: Sequence[jax.Device] | None = None) -> LoadedStep:
    """Loads the weights that the captured sites need onto the devices, and compiles the step.

    devices: the devices that the job is planned for; None for all devices of all processes.
    """
    config, plan = job.config, job.plan
    partition = plan.weights.partition(devices)
    if plan.keeps_activations:
        compiled = compile_storing(plan.step, partition.mesh, str(config.model.dtype))
        return LoadedStep(compiled, KeptRows(job, partition.mesh).for_rows, plan.mesh.process_rows)
    params = load_weights(config, job.model, plan, partition, job.encoders)
    compiled = compile_step(job.model, plan.step, params, partition)
    return LoadedStep(compiled, lambda _block, _rows: params, plan.mesh.process_rows)


def load_weights(
    config: RunConfig, model: Model, plan: Plan, partition: Partition, encoders: Sequence[Encoder]
) -> Params:
    """Loads the weights of the SAEs, and those that the captured sites need, onto the devices of the partition."""
    params = model.load(
        plan.step.forward_keys,
        dtype=str(config.model.dtype),
        sharding=partition.leaf_sharding,
        progress=config.run.progress and processes.is_first(),
        quantised=config.model.quantised,
        with_head=bool(plan.step.head_outputs),
    )
    saes = {encoder.spec.name: encoder.load(str(config.model.dtype), partition.mesh) for encoder in encoders}
    return params | {"encoders": saes} if saes else params


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
