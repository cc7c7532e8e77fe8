"""The Plan: every shape, count and size that a run derives from its configuration, checked for consistency.

Pure arithmetic, so mistakes are reported before weights are read and anything is computed. `python -m pipeline.plan
<overrides>` prints the plan of `python -m pipeline.run <overrides>`.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, Self

from pipeline.cluster.devices import Topology, reserved_bytes
from pipeline.config.choices import Weights
from pipeline.config.schema import RunConfig
from pipeline.core.errors import ConfigError
from pipeline.core.messages import counted
from pipeline.data.sources import has_labels
from pipeline.models.leaves import num_params
from pipeline.models.registry import Model
from pipeline.models.runs import single_layers
from pipeline.planning.capture import plan_step
from pipeline.planning.expert_groups import pair_bytes
from pipeline.planning.generation_plan import GenerationPlan, plan_generation
from pipeline.planning.host_memory import HostMemoryPlan, plan_host_memory, plan_rows_per_block, plan_shard_bytes
from pipeline.planning.mesh import (
    MeshPlan,
    WeightsPlan,
    plan_mesh,
    plan_weights,
    require_divisible_rows,
    wider_context,
)
from pipeline.planning.streams import StreamPlan, plan_streams
from pipeline.step.compiler import DeviceMemory
from pipeline.step.spec import EncoderSpec, StepSpec
from pipeline.store.format.layout import ITEM_BYTES, MIB, StoreLayout

_GIB = 1 << 30
NOTED_EXCESS = 1.03  # a store that may hold more than 3 % above run.max_tokens says so


def shown_bytes(num_bytes: float) -> str:
    """A number of bytes in the largest decimal unit in which it is at least 1, e.g. 5.30 MB; below 1 kB in bytes."""
    size, shown = num_bytes, f"{num_bytes:.0f} bytes"
    for unit in ("kB", "MB", "GB", "TB"):
        size /= 1000
        if size < 1:
            break
        shown = f"{size:,.2f} {unit}"
    return shown


class StoredGeometry(NamedTuple):
    """Sizes that an existing store fixes; None for a new store."""

    num_streams: int | None = None
    rows_per_block: int | None = None
    shard_bytes: int | None = None


@dataclass(frozen=True)
class Plan:
    """Everything a run derives from its configuration."""

    config: RunConfig
    model: str = field(repr=False)  # in words
    flops: int  # of a token slot
    step: StepSpec
    mesh: MeshPlan
    wider_context: int | None  # the next larger mesh.context that is possible
    weights: WeightsPlan  # the weights that the captured activations need
    rows_per_block: int
    shard_bytes: int | None  # of the store shards into which the blocks of large arrays are divided; None: of none
    streams: StreamPlan
    memory: HostMemoryPlan
    generation: GenerationPlan | None  # for data=generate

    @cached_property
    def layout(self) -> StoreLayout:
        """The geometry and the arrays of the store."""
        stored = self.step.stored_arrays
        return StoreLayout(
            num_streams=self.streams.count,
            rows_per_block=self.rows_per_block,
            length=self.step.length,
            arrays=stored.activations,
            compression=str(self.config.store.compression),
            selected=self.step.selected,
            shard_bytes=self.shard_bytes,
            scales=stored.scales,
            outputs=stored.outputs,
            has_labels=has_labels(self.config.data),
        )

    @property
    def reserved_bytes(self) -> int:
        """Device memory for other uses, per device."""
        return reserved_bytes(self.config.run)

    @property
    def keeps_activations(self) -> bool:
        """Whether activations are kept during generation instead of being computed from the finished documents."""
        return self.generation is not None and bool(self.generation.spec.keys)

    def remedy(self) -> str:
        """What makes a step need less memory of a device, as a sentence that this run can follow."""
        mesh, wider, ways = self.mesh, self.wider_context, []
        if self.step.rows > mesh.data:
            ways.append("lower batch.rows (by half, until it fits)")
        elif wider is not None:
            rows = mesh.data * mesh.context // wider
            ways.append(f"set mesh.context={wider} and batch.rows={rows}, so that {wider} devices divide each row")
        ways.append("lower batch.length")
        if self.weights.sharding is not Weights.fsdp and mesh.data * mesh.context > 1:
            ways.append("divide the weights (model.weights=fsdp)")
        ways.append("use larger devices" if self.step.rows == mesh.data else "use more or larger devices")
        text = f"{', '.join(ways[:-1])}, or {ways[-1]}."
        return text[0].upper() + text[1:]

    def row_bytes(self, program: DeviceMemory) -> int:
        """What one row takes of each device that has a part of it, with its activations and without the weights."""
        return (program.resident_bytes(1) - program.argument_bytes) * self.mesh.data // self.step.rows

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on settings that a user may want to change, one sentence each."""
        generation = self.generation.notes if self.generation else ()
        return (*self.weights.notes, *generation, *self.streams.notes, *self.memory.notes)

    def describe(self) -> str:
        """The plan as human-readable text, without its notes."""
        step, streams, memory = self.step, self.streams, self.memory
        names = [key.name for key in step.keys] + [array.name for array in step.stored_arrays.outputs]
        dtype = f" as {step.dtype}" if step.keys else ""
        shown = ", ".join(names if len(names) <= 6 else [*names[:3], f"... {len(names) - 4} more ...", names[-1]])
        selected = "" if step.selected is None else f", for up to {step.selected} selected tokens per row"
        row_bytes = sum(map(self.layout.row_bytes, self.layout.all_arrays))
        token_bytes = row_bytes / step.length + step.index_bytes
        num_bytes = token_bytes * (streams.max_tokens or 1_000_000)
        size = f"{shown_bytes(num_bytes)} without padding or compression"
        wanted = f"all tokens of the data; a million tokens need {size}; set run.max_tokens to store fewer"
        if streams.max_tokens is not None:
            wanted = f"{counted(streams.max_tokens, 'token')}{self._most_tokens()}, {size}"
        group = self.weights.expert_group
        experts = f"; {group} neighbouring devices exchange tokens for experts" if group > 1 else ""
        lines = [
            f"model     {self.model}, {self.flops:,} FLOPs per token",
            f"capture   {shown}: {step.row_bytes // step.slots:,} bytes per token{dtype}{selected}",
            f"step      {counted(step.rows, 'row')} of {step.length} tokens, {memory.step_bytes / MIB:.1f} MiB to the "
            f"host, {memory.inflight_steps} in flight",
            f"block     {counted(self.rows_per_block, 'row')}, {memory.block_bytes / MIB:.1f} MiB in "
            f"{counted(sum(map(self.layout.num_parts, step.stored_arrays)), 'store shard')}",
            f"store     {wanted}",
            f"memory    up to {memory.host_bytes / MIB:.0f} MiB of activations on the host",
            f"weights   {self.weights.sharding}: {self.weights.device_bytes / MIB:.0f} MiB on each device{experts}",
        ]
        if self.reserved_bytes:
            lines.append(f"reserved  {self.reserved_bytes / MIB:.0f} MiB on each device, for other uses")
        if self.generation is not None:
            lines.append(self.generation.describe())
        return "\n".join(lines)

    def _most_tokens(self) -> str:
        """The number of tokens that the store may hold, as text, if it is clearly larger than run.max_tokens."""
        block_slots = self.rows_per_block * self.step.length
        most = self.streams.most_tokens(block_slots)
        if most <= self.streams.max_tokens * NOTED_EXCESS:
            return ""
        return f" (up to {most:,}: streams end with whole blocks of {block_slots:,} slots)"

    def describe_notes(self) -> str:
        """The notes as lines of text."""
        return "\n".join(f"note      {note}" for note in self.notes)

    def fitted(self, program: DeviceMemory, device_bytes: int | None) -> Self:
        """The plan with as many steps in flight as a device has memory for (None: unknown). Raises ConfigError if not
        even one step fits."""
        steps = planned = self.memory.inflight_steps
        while device_bytes is not None and steps > 0 and program.resident_bytes(steps) > device_bytes:
            steps -= 1
        if steps == 0 and 0 < program.peak_bytes <= device_bytes:  # temporaries may count gaps between buffers
            steps = 1
        if steps == planned:
            return self
        need = (
            f"a step needs {program.resident_bytes(1) / _GIB:.2f} GiB of each device ({program.describe()}; "
            f"{self.row_bytes(program) / _GIB:.2f} for each row), which has {device_bytes / _GIB:.2f} GiB"
        )
        if self.reserved_bytes:
            need += f" besides the {self.reserved_bytes / _GIB:.2f} of run.reserved_mib"
        if steps == 0:
            raise ConfigError(f"{need}. {self.remedy()}")
        note = f"{need}: {steps} instead of {planned} steps are in flight"
        return replace(self, memory=replace(self.memory, inflight_steps=steps, notes=(*self.memory.notes, note)))


def make_plan(
    config: RunConfig,
    model: Model,
    num_source_shards: int,
    topology: Topology,
    stored: StoredGeometry | None = None,
    encoders: tuple[EncoderSpec, ...] = (),
) -> Plan:
    """Derives the plan. `stored` is the geometry of the resumed store, if any; `encoders` are the SAEs.

    Raises ConfigError for a configuration that cannot work.
    """
    geometry = stored or StoredGeometry()
    step = plan_step(config, model, encoders)
    require_divisible_rows(config, model.arch)
    mesh = plan_mesh(config.mesh, step.rows, topology, model.tensor_dims)
    quantised = config.model.quantised
    model_bytes = model.weight_bytes(step.forward_keys, str(config.model.dtype), quantised, bool(step.head_outputs))
    sae_bytes = sum(encoder.device_bytes(str(config.model.dtype), mesh.tensor) for encoder in encoders)
    model_bytes = replace(model_bytes, others=sae_bytes)
    tokens = 0 if mesh.context > 1 else step.rows * step.length // mesh.data  # then no exchange
    num_pair_bytes = pair_bytes(model.arch, tokens, ITEM_BYTES[config.model.dtype])
    weights = plan_weights(
        config.model.weights,
        model_bytes,
        mesh.data * mesh.context,
        mesh.tensor,
        topology,
        num_pair_bytes,
        mesh.context,
    )
    if topology.platform == "gpu" and (weights.sharding is not Weights.fsdp or model.arch.experts):
        step = replace(step, single_layers=single_layers(step.forward_keys, model.arch))
    widths = {key: array.width for key, array in step.activations.items()}
    generation = plan_generation(config, model, widths, mesh.tensor, topology)
    streams = plan_streams(config, num_source_shards, topology, geometry.num_streams)
    rows_per_block = plan_rows_per_block(
        config.store, step, mesh.process_rows, streams.budget(0), geometry.rows_per_block
    )
    shard_bytes = geometry.shard_bytes
    if geometry.rows_per_block is None:
        shard_bytes = plan_shard_bytes(config.store, step, rows_per_block)
    parameters = num_params(model.leaves(step.forward_keys, with_head=bool(step.head_outputs)))
    return Plan(
        config=config,
        model=f"{model.family}, {model.num_layers} layers; the capture needs {parameters:,} parameters",
        flops=model.flops_per_token(step.forward_keys, step.length, step.head_share) + step.encoder_flops,
        step=step,
        mesh=mesh,
        wider_context=wider_context(config, mesh, model.arch),
        weights=weights,
        rows_per_block=rows_per_block,
        shard_bytes=shard_bytes,
        streams=streams,
        memory=plan_host_memory(config, step, mesh, rows_per_block, topology),
        generation=generation,
    )
