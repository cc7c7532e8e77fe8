"""The compiled step with its weights: takes rows of token blocks, returns activations on the devices.

Shapes: R rows of a block, T positions, D features.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import jax
import ml_dtypes  # noqa: F401  registers "bfloat16" with NumPy
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, Int32, PyTree

from pipeline.cluster import processes
from pipeline.cluster.sharding import put_rows
from pipeline.config.schema import RunConfig
from pipeline.core.sites import ActivationKey
from pipeline.data.documents import TokenBlock
from pipeline.job.job import Job
from pipeline.models.decoder import Params
from pipeline.models.partition import Partition
from pipeline.models.registry import Model
from pipeline.planning.encoders import Encoder
from pipeline.planning.plan import Plan
from pipeline.step.compiled_step import CompiledStep, StepOutputs, compile_step, compile_storing
from pipeline.step.spec import StepSpec
from pipeline.store.generated.completions import document_tokens


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


DocumentActivations = dict[int, dict[str, Float[np.ndarray, "n D"]]]  # by the document's number in its stream


@dataclass
class KeptRows:
    """The activations of rows of a block, [B, T, D] by key, read from the groups of its documents."""

    job: Job
    mesh: Mesh
    _block: TokenBlock | None = None
    _groups: dict[tuple[int, int], DocumentActivations] = field(default_factory=dict)  # by stream and index
    _values: dict[ActivationKey, Float[np.ndarray, "R T D"]] = field(default_factory=dict)

    def for_rows(self, block: TokenBlock | None, rows: slice) -> dict[ActivationKey, jax.Array]:
        """The activations of this process's `rows` of a block, on the devices. Rows that are missing are 0, as are all
        rows without a block."""
        plan = self.job.plan
        if block is not None and block is not self._block:
            self._block, self._values = block, self._read(block)
        local = {}
        dtype, shape = str(self.job.config.model.dtype), (plan.mesh.process_rows, plan.step.length)
        for key, array in plan.step.activations.items():
            local[key] = np.zeros((*shape, *array.token_shape), dtype)
            if block is not None:
                values = self._values[key][rows]
                local[key][: len(values)] = values
        return put_rows(self.mesh, local)

    def _read(self, block: TokenBlock) -> dict[ActivationKey, Float[np.ndarray, "R T D"]]:
        plan, size = self.job.plan, self.job.config.data.group_size
        slots, table_rows, tokens = document_tokens(block.documents, block.table)
        ordinals = (block.table["document"].to_numpy() - block.stream) // plan.streams.count
        needed = {(block.stream, index) for index in np.unique(ordinals // size).tolist()}
        self._groups = {group: self._groups.get(group) or self._load(*group) for group in sorted(needed)}
        dtype, shape = str(self.job.config.model.dtype), block.documents.shape
        values = {key: np.zeros((*shape, *array.token_shape), dtype) for key, array in plan.step.activations.items()}
        firsts = np.flatnonzero(np.diff(table_rows, prepend=-1))  # of each document's tokens
        parts = zip(table_rows[firsts], np.split(slots, firsts)[1:], np.split(tokens, firsts)[1:], strict=True)
        for table_row, slots_of_document, tokens_of_document in parts:
            ordinal = int(ordinals[table_row])
            activations = self._groups[block.stream, ordinal // size][ordinal]
            for key, array in values.items():
                array.reshape(-1, array.shape[2])[slots_of_document] = activations[key.name][tokens_of_document]
        return values

    def _load(self, stream: int, index: int) -> DocumentActivations:
        widths = {array.name: array.width for array in self.job.plan.step.activations.values()}
        return self.job.generated(stream).read_activations(index, widths, str(self.job.config.model.dtype))
