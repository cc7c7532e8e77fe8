"""The Plan: every derived shape, count and byte of a run, and every cross-check of the configuration.

Pure arithmetic on ints: nothing here touches a device, the network or a file, so a mistake is found before any of
them. `python -m pipeline.plan <overrides>` prints what `python -m pipeline.run <overrides>` would do.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from pipeline.cluster.topology import Topology
from pipeline.config.choices import OnNotFinite, Packing, Positions, StorageDtype, Weights, WeightsDtype
from pipeline.config.limits import shown
from pipeline.config.schema import CaptureConfig, RunConfig, RunOptions
from pipeline.core.errors import ConfigError
from pipeline.core.sites import ActivationKey, Site, activation_keys
from pipeline.data.selection import slots_per_row
from pipeline.planning.generation_plan import GenerationPlan, GeneratorFacts, plan_generation
from pipeline.planning.mesh import divide_weights, mesh_shape
from pipeline.step.spec import StepSpec
from pipeline.store.format.layout import ITEM_BYTES, MIB, is_plain_files, rows_per_block_for
from pipeline.store.format.target import ALL, Target, stream_share

MAX_STEPS_IN_FLIGHT = 4  # one computing, one copying to the host, one being drained, one in reserve
_HOST_BUFFERS = 2  # one is filled while the other is written
MAX_STEPS_PER_BLOCK = 64  # bounds what a kill loses and how far ahead of the devices rows are packed
MAX_AUTO_STREAMS = 64
STEPS_PER_AUTO_STREAM = 100  # a stream wastes at most one partly padded step: 1 % of it


class ModelFacts(GeneratorFacts, Protocol):
    """What Plan needs to know of a model; `pipeline.models.Model` is one."""

    num_layers: int
    vocab_size: int
    max_positions: int
    sites: tuple[Site, ...]

    tensor_dims: Mapping[str, int]  # what the mesh's tensor axis divides

    def width(self, site: Site) -> int: ...

    def weight_bytes(self, keys: Sequence[ActivationKey], dtype: str, with_int8: bool) -> tuple[int, int]:
        """Of the layers' matrices, and of all other weights."""

    def hook_name(self, key: ActivationKey) -> str: ...


class StoredGeometry(NamedTuple):
    """What an existing store has fixed."""

    num_streams: int
    rows_per_block: int


@dataclass(frozen=True)
class Plan:
    """Everything a run derives from its configuration. Bytes are of one process."""

    step: StepSpec
    hook_names: tuple[str, ...]  # TransformerLens' names of the keys
    fail_on_not_finite: bool
    warn_of_unselected: bool  # whether a token without a slot is worth a warning
    packs_by_slots: bool  # whether a row may be full of selected tokens before it is full of tokens
    process_rows: int  # rows per step of one process
    first_row: int  # of this process's rows among the step's
    processes: int  # of this worker, which step together
    tensor: int  # devices along the mesh's tensor axis
    weights: Weights  # replicated, tensor or fsdp
    weights_bytes: int  # on each device
    rows_per_block: int
    num_streams: int
    streams: tuple[int, ...]  # of this process
    max_tokens: int | None
    inflight_steps: int
    step_bytes: int  # activations of one step
    block_bytes: int  # activations of one block: one host buffer
    host_buffers: int
    encoded_blocks: int  # that TensorStore holds while it writes them: none where files are written from the buffers
    generation: GenerationPlan | None  # of data=generate
    notes: tuple[str, ...]

    @property
    def keeps(self) -> bool:
        """Whether activations are kept while the model writes, rather than computed afterwards."""
        return self.generation is not None and self.generation.kept_bytes is not None

    @property
    def target(self) -> Target:
        """How many tokens this run wants the store to hold."""
        return ALL if self.max_tokens is None else self.max_tokens

    def stream_budget(self, stream: int) -> int | None:
        """Valid tokens wanted of a stream: `run.max_tokens` divided evenly."""
        return stream_share(self.target, self.num_streams, stream)

    @property
    def host_bytes(self) -> int:
        """The most that activations and their rows' statistics have allocated in the host's memory: in flight, in
        buffers, and encoded for the store. What the C library's allocator
        keeps besides comes on top.

        All buffers can be under way to the store at once, when it is the slowest.
        """
        buffers = self.host_buffers * (self.block_bytes + self.rows_per_block * self.step.row_statistics_bytes)
        return self.inflight_steps * self.step_host_bytes + buffers + self.encoded_blocks * self.block_bytes

    @property
    def step_host_bytes(self) -> int:
        """Of a step's activations and their rows' statistics, in the host's memory."""
        return self.step_bytes + self.process_rows * self.step.row_statistics_bytes

    def describe(self) -> str:
        """The plan in a few lines, for people."""
        names = [key.name for key in self.step.keys]
        shown = ", ".join(names if len(names) <= 6 else [*names[:3], f"... {len(names) - 4} more ...", names[-1]])
        per_token = self.step.row_bytes // self.step.slots
        selected = "" if self.step.selected is None else f", of up to {self.step.selected} selected tokens of each row"
        wanted = "all tokens of the data" if self.max_tokens is None else f"{self.max_tokens:,} tokens"
        lines = [
            f"capture   {shown}: {per_token:,} bytes per token as {self.step.dtype}{selected}",
            f"step      {self.step.rows} rows of {self.step.length} tokens, {self.step_bytes / MIB:.1f} MiB "
            f"to the host, {self.inflight_steps} in flight",
            f"block     {self.rows_per_block} rows, {self.block_bytes / MIB:.1f} MiB in "
            f"{len(self.step.keys) + len(self.step.scale_counts)} store shards",
            f"streams   {self.num_streams}, {len(self.streams)} of them here; {wanted}",
            f"memory    up to {self.host_bytes / MIB:.0f} MiB of activations on the host",
            f"weights   {self.weights}: {self.weights_bytes / MIB:.0f} MiB on each device",
        ]
        if self.generation is not None:
            lines.append(self.generation.describe())
        return "\n".join([*lines, *(f"note      {note}" for note in self.notes)])


def make_plan(
    config: RunConfig,
    model: ModelFacts,
    num_source_shards: int,
    topology: Topology,
    stored: StoredGeometry | None = None,
) -> Plan:
    """Derives the plan. `stored` is the geometry of the store that is being resumed, if any.

    Raises ConfigError for whatever cannot work.
    """
    step = plan_step(config, model)
    data, tensor = mesh_shape(config.mesh, topology, model.tensor_dims)
    process_rows = _process_rows(config, topology, data)
    with_int8 = config.model.weights_dtype is WeightsDtype.int8
    model_bytes = model.weight_bytes(step.keys, str(config.model.dtype), with_int8)
    weights, weights_bytes, note = divide_weights(config.model.weights, *model_bytes, data, tensor, topology)
    generation = plan_generation(config, model, sum(step.widths), data, tensor, topology)
    by_slots = config.capture.positions in (Positions.last, Positions.token, Positions.regex)
    step_bytes = process_rows * step.row_bytes
    array_row_bytes = step.slots * max(step.widths) * ITEM_BYTES[step.dtype]
    rows_per_block = _rows_per_block(config, process_rows, array_row_bytes, stored)
    num_streams = _num_streams(config, num_source_shards, topology, stored)
    inflight_steps = _inflight_steps(config.run.max_inflight_mib, step_bytes, topology)
    plan = Plan(
        step=step,
        hook_names=tuple(model.hook_name(key) for key in step.keys),
        fail_on_not_finite=config.capture.on_not_finite is OnNotFinite.fail,
        warn_of_unselected=by_slots,
        packs_by_slots=by_slots and config.batch.packing is Packing.pack,
        process_rows=process_rows,
        first_row=topology.process * process_rows,
        processes=topology.processes,
        tensor=tensor,
        weights=weights,
        weights_bytes=weights_bytes,
        rows_per_block=rows_per_block,
        num_streams=num_streams,
        streams=_streams(config.run, num_streams, topology),
        max_tokens=config.run.max_tokens,
        inflight_steps=inflight_steps,
        step_bytes=step_bytes,
        block_bytes=rows_per_block * step.row_bytes,
        host_buffers=_HOST_BUFFERS,
        encoded_blocks=0 if is_plain_files(config.store.path, config.store.compression) else _HOST_BUFFERS,
        generation=generation,
        notes=(
            *note,
            *(generation.notes if generation else ()),
            *_notes(config, inflight_steps, num_streams, num_source_shards, topology),
        ),
    )
    if topology.host_memory is not None and plan.host_bytes > topology.host_memory:
        raise ConfigError(
            f"activations would take {plan.host_bytes / MIB:.0f} MiB on this host, which has "
            f"{topology.host_memory / MIB:.0f} MiB: {inflight_steps} steps of {plan.step_host_bytes / MIB:.0f} MiB, "
            f"and blocks of {plan.block_bytes / MIB:.0f} MiB. Lower store.shard_mib, batch.rows or "
            f"run.max_inflight_mib."
        )
    return plan


def plan_step(config: RunConfig, model: ModelFacts) -> StepSpec:
    """What the step of a run computes. Raises ConfigError for what the model does not have."""
    capture, batch = config.capture, config.batch
    keys = captured_keys(capture, model)
    if not 1 <= batch.length <= model.max_positions:
        raise ConfigError(
            f"batch.length is {batch.length}, but the model has {model.max_positions} positions. "
            f"Set batch.length to 1..{model.max_positions}."
        )
    widths = tuple(model.width(key.site) for key in keys)
    return StepSpec(
        keys=keys,
        widths=widths,
        rows=batch.rows,
        length=batch.length,
        dtype=str(capture.dtype),
        attention=str(config.model.attention),
        statistics=capture.statistics,
        selected=slots_per_row(capture, batch.length),
        int8_group=_int8_group(capture, keys, widths),
    )


def _int8_group(capture: CaptureConfig, keys: Sequence[ActivationKey], widths: Sequence[int]) -> int | None:
    group = capture.int8_group
    if group is None:
        return None
    if capture.dtype is not StorageDtype.int8:
        raise ConfigError(
            f"capture.int8_group is {group} with capture.dtype={capture.dtype}: only int8 has scales. "
            f"Set capture.int8_group=null, or capture.dtype=int8."
        )
    odd = [f"{width} of {key.name}" for key, width in zip(keys, widths, strict=True) if group < 1 or width % group]
    if odd:
        raise ConfigError(
            f"capture.int8_group is {group}, which does not divide the width {odd[0]}. Set it to a common divisor of "
            f"{', '.join(map(str, sorted(set(widths))))}, e.g. {math.gcd(*widths, 64)}, or to null."
        )
    return group


def captured_keys(capture: CaptureConfig, model: ModelFacts) -> tuple[ActivationKey, ...]:
    """The activations that `capture` asks for. Raises ConfigError for a layer or site that the model lacks."""
    names = [str(site) for site in model.sites]
    unknown = [site for site in capture.sites if site not in names]
    if unknown or not capture.sites:
        raise ConfigError(
            f"capture.sites contains {shown(unknown) if unknown else 'nothing'}, but the model has {', '.join(names)}. "
            f"Set capture.sites to a subset, e.g. [resid_post]."
        )
    if twice := _repeated(capture.sites):
        raise ConfigError(f"capture.sites names {twice} twice. Name each site once.")
    return activation_keys(
        captured_layers(capture.layers, model.num_layers), tuple(Site(site) for site in capture.sites)
    )


def captured_layers(layers: object, num_layers: int) -> tuple[int, ...]:
    """`capture.layers` as sorted layer numbers: "all", or a list of numbers within the model."""
    have = f"the model has layers 0..{num_layers - 1}"
    if layers == "all":
        return tuple(range(num_layers))
    if not isinstance(layers, Sequence) or isinstance(layers, str) or not layers:
        raise ConfigError(
            f"capture.layers is {shown(layers)}; {have}. Set it to a list such as [0,{num_layers - 1}], or to all."
        )
    for layer in layers:
        if not isinstance(layer, int) or isinstance(layer, bool) or not 0 <= layer < num_layers:
            raise ConfigError(f"capture.layers contains {shown(layer)}, but {have}. Set capture.layers to a subset.")
    if twice := _repeated(layers):
        raise ConfigError(f"capture.layers names layer {twice} twice. Name each layer once.")
    return tuple(sorted(layers))


def _repeated(values: Sequence[object]) -> str:
    """The first value that is not the only one of its kind; empty where there is none."""
    return next((str(value) for place, value in enumerate(values) if value in values[:place]), "")


def _process_rows(config: RunConfig, topology: Topology, data: int) -> int:
    """Rows per step of one process; every device along the mesh's data axis gets the same number."""
    rows = config.batch.rows
    if rows < 1 or rows % data:
        raise ConfigError(
            f"batch.rows = {rows} is not a multiple of the {data} devices that share the rows. "
            f"Set batch.rows to a multiple of {data}."
        )
    if not 0 <= config.run.worker_index < config.run.worker_count:
        raise ConfigError(
            f"run.worker_index is {config.run.worker_index} with run.worker_count={config.run.worker_count}. "
            f"Set it to 0..{config.run.worker_count - 1}."
        )
    return rows // topology.processes


def _rows_per_block(config: RunConfig, process_rows: int, row_bytes: int, stored: StoredGeometry | None) -> int:
    """From the target size of a store shard, and whole steps of a process; a store keeps the number that it has."""
    if stored is None:
        return rows_per_block_for(config.store.shard_mib, row_bytes, process_rows, MAX_STEPS_PER_BLOCK)
    if stored.rows_per_block % process_rows:
        raise ConfigError(
            f"batch.rows = {config.batch.rows} is {process_rows} per process, which does not divide the "
            f"{stored.rows_per_block} rows per block that the store was made with. Set batch.rows so that each process "
            f"has a divisor of {stored.rows_per_block}, or choose another store.path."
        )
    return stored.rows_per_block


def _num_streams(config: RunConfig, num_source_shards: int, topology: Topology, stored: StoredGeometry | None) -> int:
    """As configured, else as stored, else few for a small job and one per process at least for a large one."""
    wanted = config.data.num_streams
    if wanted is not None:
        if not 1 <= wanted <= num_source_shards:
            raise ConfigError(
                f"data.num_streams is {wanted}, but the data has {num_source_shards} source shards, which are divided "
                f"among the streams. Set it to 1..{num_source_shards}, or to null."
            )
        return wanted
    if stored is not None:
        return stored.num_streams
    step_tokens = config.batch.rows * config.batch.length
    affordable = (config.run.max_tokens or 0) // (STEPS_PER_AUTO_STREAM * step_tokens)
    least = MAX_AUTO_STREAMS if config.run.claim else 1  # not to depend on how large the worker is that comes first
    return min(num_source_shards, max(topology.count, least, min(affordable, MAX_AUTO_STREAMS)))


def _streams(run: RunOptions, num_streams: int, topology: Topology) -> tuple[int, ...]:
    """Those that this process works on, or may claim."""
    if not run.claim:
        return tuple(range(topology.index, num_streams, topology.count))
    if run.worker_count != 1:
        raise ConfigError(
            f"run.claim is true and run.worker_count is {run.worker_count}: either workers claim streams, or each has "
            f"a fixed share. Set run.claim=false, or run.worker_count=1."
        )
    return tuple(range(num_streams))


def _inflight_steps(max_inflight_mib: float, step_bytes: int, topology: Topology) -> int:
    """On few cores one: they compute or copy, and a second step would bring its own memory into the caches."""
    most = 1 if topology.few_cores else MAX_STEPS_IN_FLIGHT
    steps = min(most, int(max_inflight_mib * MIB) // step_bytes)
    if steps < 1:
        raise ConfigError(
            f"run.max_inflight_mib is {max_inflight_mib:g}, but a step's activations take {step_bytes / MIB:.1f} MiB. "
            f"Set it to at least {math.ceil(min(most, 2) * step_bytes / MIB)}, or lower batch.rows."
        )
    return steps


def _notes(
    config: RunConfig, inflight_steps: int, num_streams: int, num_source_shards: int, topology: Topology
) -> tuple[str, ...]:
    notes = []
    if config.run.claim:
        notes.append(
            f"each process claims one stream at a time, so that {num_streams} can work at once; the number is fixed "
            f"when the store is created, by data.num_streams (up to {num_source_shards})"
        )
    elif config.run.max_tokens is None and config.data.num_streams is None and num_streams < num_source_shards:
        notes.append(
            f"the number of streams is fixed when the store is created; set data.num_streams (up to "
            f"{num_source_shards}) if more processes or workers are to share this job later"
        )
    if inflight_steps == 1 and not topology.few_cores:
        notes.append("one step in flight: nothing overlaps; raise run.max_inflight_mib")
    if num_streams < topology.count:
        notes.append(
            f"{topology.count - num_streams} of {topology.count} processes have no stream; set data.num_streams"
        )
    return tuple(notes)
