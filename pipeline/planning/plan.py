"""The Plan: every shape, count and size that a run derives from its configuration, checked for consistency.

Pure arithmetic, so mistakes are reported before weights are read and anything is computed. `python -m pipeline.plan
<overrides>` prints the plan of `python -m pipeline.run <overrides>`.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple, Self

from pipeline.cluster.topology import Topology, reserved_bytes
from pipeline.config.choices import OnNotFinite, Packing, Positions
from pipeline.config.schema import RunConfig
from pipeline.core.errors import ConfigError
from pipeline.core.messages import counted
from pipeline.data.sources import has_labels
from pipeline.models.registry import Model
from pipeline.planning.capture import plan_step
from pipeline.planning.generation_plan import GenerationPlan, plan_generation
from pipeline.planning.host_memory import HostMemoryPlan, plan_host_memory, plan_rows_per_block
from pipeline.planning.mesh import MeshPlan, WeightsPlan, plan_mesh, plan_weights
from pipeline.planning.streams import StreamPlan, plan_streams, require_rows
from pipeline.step.device_memory import DeviceMemory
from pipeline.step.spec import EncoderSpec, StepSpec
from pipeline.store.format.layout import LABELS_ARRAY, MIB, SIDE_BYTES

_GIB = 1 << 30
NOTED_EXCESS = 1.03  # a store that may hold more than 3 % above run.max_tokens says so
STEP_REMEDY = (
    "Lower batch.rows (by half, until it fits) or batch.length, divide the weights (model.weights=fsdp), or use more "
    "or larger devices."
)


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


@dataclass(frozen=True)
class Plan:
    """Everything a run derives from its configuration."""

    step: StepSpec
    mesh: MeshPlan
    weights: WeightsPlan  # the weights that the captured activations need
    rows_per_block: int
    streams: StreamPlan
    memory: HostMemoryPlan
    generation: GenerationPlan | None  # for data=generate
    reserved_bytes: int  # device memory for other uses, per device
    fails_on_not_finite: bool  # otherwise, warns
    is_packed: bool  # rows hold several documents
    limits_selected: bool  # a row may have fewer slots than selected tokens (capture.per_row)
    side_bytes: int  # of a position in the store, besides activations and outputs

    @property
    def keeps_activations(self) -> bool:
        """Whether activations are kept during generation instead of being computed from the finished documents."""
        return self.generation is not None and self.generation.kept_bytes is not None

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
        token_bytes = step.row_bytes / step.length + step.index_bytes + self.side_bytes
        num_bytes = token_bytes * (streams.max_tokens or 1_000_000)
        size = f"{shown_bytes(num_bytes)} without padding or compression"
        wanted = f"all tokens of the data; a million tokens need {size}; set run.max_tokens to store fewer"
        if streams.max_tokens is not None:
            wanted = f"{counted(streams.max_tokens, 'token')}{self._most_tokens()}, {size}"
        local = "all" if len(streams.local) == streams.count else f"{len(streams.local)} of them"
        lines = [
            f"capture   {shown}: {step.row_bytes // step.slots:,} bytes per token{dtype}{selected}",
            f"step      {counted(step.rows, 'row')} of {step.length} tokens, {memory.step_bytes / MIB:.1f} MiB to the "
            f"host, {memory.inflight_steps} in flight",
            f"block     {counted(self.rows_per_block, 'row')}, {memory.block_bytes / MIB:.1f} MiB in "
            f"{counted(len(step.stored_arrays), 'store shard')}",
            f"store     {wanted}",
            f"streams   {streams.count}, {local} for this process",
            f"memory    up to {memory.host_bytes / MIB:.0f} MiB of activations on the host",
            f"weights   {self.weights.sharding}: {self.weights.device_bytes / MIB:.0f} MiB on each device",
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
            f"a step needs {program.resident_bytes(1) / _GIB:.2f} GiB of each device ({program.describe()}), which has "
        )
        need += f"{device_bytes / _GIB:.2f} GiB"
        if self.reserved_bytes:
            need += f" besides the {self.reserved_bytes / _GIB:.2f} of run.reserved_mib"
        if steps == 0:
            raise ConfigError(f"{need}. {STEP_REMEDY}")
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
    mesh = plan_mesh(config.mesh, step.rows, topology, model.tensor_dims)
    with_int8 = config.model.has_int8_weights
    model_bytes = model.weight_bytes(step.forward_keys, str(config.model.dtype), with_int8, bool(step.head_outputs))
    sae_bytes = sum(encoder.device_bytes(str(config.model.dtype), mesh.tensor) for encoder in encoders)
    model_bytes = replace(model_bytes, others=sae_bytes)
    weights = plan_weights(config.model.weights, model_bytes, mesh.data, mesh.tensor, topology.device_bytes)
    widths = {key: array.width for key, array in step.activations.items()}
    generation = plan_generation(config, model, widths, mesh.tensor, topology)
    streams = plan_streams(config, num_source_shards, topology, geometry.num_streams)
    rows_per_block = plan_rows_per_block(
        config.store, step, mesh.process_rows, streams.budget(0), geometry.rows_per_block
    )
    require_rows(streams, rows_per_block, step.length)
    return Plan(
        step=step,
        mesh=mesh,
        weights=weights,
        rows_per_block=rows_per_block,
        streams=streams,
        memory=plan_host_memory(config, step, mesh.process_rows, rows_per_block, topology),
        generation=generation,
        reserved_bytes=reserved_bytes(config.run),
        fails_on_not_finite=config.capture.on_not_finite is OnNotFinite.fail,
        is_packed=config.batch.packing is Packing.pack,
        limits_selected=config.capture.positions
        in (Positions.last, Positions.token, Positions.regex, Positions.labels),
        side_bytes=SIDE_BYTES + (LABELS_ARRAY.position_bytes if has_labels(config.data) else 0),
    )
