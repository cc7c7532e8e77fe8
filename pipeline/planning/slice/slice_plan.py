"""The plan of a job on a TPU slice: compiles its step, and estimates its limits, time and cost.

No TPU is needed. Data, tokenizer, weights and store are not opened; config.json is enough (`model.init=random`).
"""

import json
import logging
from dataclasses import asdict, dataclass, replace

from pipeline.cluster.topology import Topology, unreserved
from pipeline.config.schema import PlanConfig, RunConfig
from pipeline.core.counts import counted
from pipeline.core.errors import ConfigError
from pipeline.models.leaves import num_params
from pipeline.models.registry import Model, open_model
from pipeline.models.runs import layer_runs
from pipeline.planning.encoders import open_encoders
from pipeline.planning.plan import Plan, make_plan
from pipeline.planning.slice.advice import advise
from pipeline.planning.slice.chips import GIB, Slice, parse_slice
from pipeline.planning.slice.compile_check import Program, compile_program, largest_power, slice_devices
from pipeline.planning.slice.roofline import (
    BUCKET_WRITES_PER_S,
    Bill,
    Cost,
    Decoding,
    Limits,
    Traffic,
    bill,
    decoding,
    forward_mfu,
    received_bytes,
    throughput_limits,
    traffic,
)
from pipeline.planning.units import shown_bytes
from pipeline.step.device_memory import DeviceMemory
from pipeline.store.format.layout import ITEM_BYTES, MIB, SIDE_ARRAYS

log = logging.getLogger("pipeline")

_RECORDS_PER_BLOCK = 2  # the commit record, and the table of documents


@dataclass(frozen=True)
class SlicePlan:
    """The plan. Bytes are per chip unless the name or a comment says otherwise; rates count valid tokens."""

    family: str
    num_layers: int
    num_params: int  # needed for the captured activations
    topology: str
    num_chips: int
    num_hosts: int
    mesh: dict[str, int]
    weights: str
    rows: int  # per step, over all chips
    rows_per_chip: int
    length: int
    steps_in_flight: int
    weight_bytes: int  # calculated, to compare with the compiler's report
    output_bytes: int  # calculated, too
    program: Program
    hbm_bytes: int  # without run.reserved_mib
    hbm_bytes_needed: int  # with all steps in flight
    flops_per_slot: int
    mfu: float  # of the forward pass
    activation_bytes_per_slot: float
    stored_bytes_per_token: float
    limits: Limits
    binding: str
    tokens_per_s: float
    traffic: Traffic
    host_bytes: int  # maximum of activations in one host's memory
    shard_bytes: int  # the largest object
    objects_per_block: int
    slots_per_block: int
    num_tokens: int | None  # run.max_tokens
    bill: Bill | None  # None without run.max_tokens
    decoding: Decoding | None  # for data=generate
    usd_per_chip_hour: float
    price_source: str
    notes: tuple[str, ...]
    advice: tuple[str, ...]

    def describe(self) -> str:
        """The plan as human-readable text."""
        program, limits, traffic = self.program, self.limits, self.traffic
        collectives = ", ".join(f"{count} {name}" for name, count in sorted(program.collectives.items())) or "none"
        rates = ", ".join(f"{name.replace('_', ' ')} {rate:,.0f}" for name, rate in limits.rates.items())
        axes = ", ".join(f"{name} {size}" for name, size in self.mesh.items())
        lines = [
            f"model     {self.family}, {self.num_layers} layers; the capture needs {self.num_params:,} parameters",
            f"weights   {self.weights}: {self.weight_bytes / GIB:.2f} GiB on each chip",
            f"slice     {self.topology}: {counted(self.num_chips, 'chip')}, {counted(self.num_hosts, 'host')}; "
            f"mesh {axes}",
            f"step      {counted(self.rows, 'row')} of {self.length} tokens, {self.rows_per_chip} per chip; "
            f"{self.steps_in_flight} in flight",
            f"memory    of {self.hbm_bytes / GIB:.2f} GiB per chip: arguments {program.argument_bytes / GIB:.2f}, "
            f"outputs {program.output_bytes / GIB:.2f}, temporaries {program.temporary_bytes / GIB:.2f}, peak "
            f"{program.peak_bytes / GIB:.2f}; {self.hbm_bytes_needed / GIB:.2f} with all steps in flight",
            f"program   attention {program.attention}; collectives: {collectives}; compiled in "
            f"{program.compile_s:.0f} s",
            f"token     {self.flops_per_slot:,} FLOPs and {self.activation_bytes_per_slot:,.10g} bytes per slot; "
            f"{self.stored_bytes_per_token:,.0f} bytes stored per valid token",
            f"limits    tokens/s, computing at {self.mfu:.0%} of the peak: {rates}",
            f"bound by  {self.binding.replace('_', ' ')}: {self.tokens_per_s:,.0f} tokens/s",
            f"traffic   {traffic.device_to_host / 1e9:.1f} GB/s to the hosts; per host {traffic.host_memory / 1e9:.1f} "
            f"GB/s of memory, {traffic.network / 1e9:.2f} GB/s to the store",
            f"hosts     up to {self.host_bytes / GIB:.1f} GiB of activations on each",
            f"store     shards of {self.shard_bytes / MIB:.1f} MiB, {self.objects_per_block} objects per block of "
            f"{self.slots_per_block:,} slots",
        ]
        if self.bill is not None:
            size = shown_bytes(self.bill.terabytes * 1e12)
            lines += [
                f"job       {self.num_tokens:,} tokens: {self.bill.hours:,.2f} hours, {size}, "
                f"{self.bill.chips_usd:,.0f} USD for the chips, {self.bill.store_usd_per_month:,.0f} per month for the "
                f"store",
                f"price     {counted(self.num_chips, 'chip')} x {self.bill.hours:,.2f} hours x "
                f"{self.usd_per_chip_hour:,.2f} USD ({self.price_source}); start-up, compilation and preemptions come "
                f"on top",
            ]
        if self.decoding is not None:
            usd = self.num_chips * self.usd_per_chip_hour / 3600 / self.decoding.tokens_per_s * 1e6
            lines.append(
                f"decoding  a step reads {self.decoding.hbm_bytes / 1e9:.2f} GB on each chip and receives "
                f"{self.decoding.received_bytes / 1e9:.2f}: at least {self.decoding.step_s * 1e3:.1f} ms, at most "
                f"{self.decoding.tokens_per_s:,.0f} tokens/s, {usd:.2f} USD per million tokens"
            )
        lines += [f"note      {line}" for line in self.notes]
        return "\n".join([*lines, *(f"advice    {line}" for line in self.advice)])


def print_slice_plan(config: RunConfig) -> None:
    """Prints the plan for the slice that `config.topology` names. Raises ConfigError for a job that does not fit."""
    tpu_slice = parse_slice(config.topology)
    model = open_model(
        config.model.path, revision=config.model.revision, init=str(config.model.init), seed=config.model.seed
    )
    plan = search(config, model, tpu_slice) if config.plan.search else plan_slice(config, model, tpu_slice)
    print(json.dumps(asdict(plan), indent=2) if config.plan.json else plan.describe())


def plan_slice(config: RunConfig, model: Model, tpu_slice: Slice) -> SlicePlan:
    """Compiles the step for the slice, and plans the job. Raises ConfigError for a job that does not fit."""
    job = plan_job(config, model, tpu_slice)
    return make_slice_plan(config, model, tpu_slice, *_compile(config, model, tpu_slice, job))


def search(config: RunConfig, model: Model, tpu_slice: Slice) -> SlicePlan:
    """The plan with the largest batch.rows, a power of two per chip, that fits with two steps in flight.

    Compiles several times, and logs every attempt. Raises ConfigError if one row per chip does not fit.
    """
    num_data = tpu_slice.num_chips // config.mesh.tensor
    plans: dict[int, SlicePlan] = {}

    def fits(rows_per_chip: int) -> bool:
        tried = replace(config, batch=replace(config.batch, rows=rows_per_chip * num_data))
        try:
            job = plan_job(tried, model, tpu_slice)
            if job.memory.inflight_steps == 1 and rows_per_chip > 1:
                log.info("%d rows per chip: two steps exceed run.max_inflight_mib", rows_per_chip)
                return False
            job, program = _compile(tried, model, tpu_slice, job)
            if job.memory.inflight_steps == 1 and rows_per_chip > 1:
                raise ConfigError(job.memory.notes[-1])
        except ConfigError as error:
            if rows_per_chip == 1:
                raise
            log.info("%d rows per chip: %s", rows_per_chip, error)
            return False
        plan = plans[rows_per_chip] = make_slice_plan(tried, model, tpu_slice, job, program)
        log.info("%d rows per chip: %.2f of %.2f GiB", rows_per_chip, plan.hbm_bytes_needed / GIB, plan.hbm_bytes / GIB)
        return True

    return plans[largest_power(fits)]


def plan_job(config: RunConfig, model: Model, tpu_slice: Slice) -> Plan:
    """The plan of the first process. The data is not opened; it is assumed to have enough source shards."""
    num_source_shards = max(config.data.num_streams or 1, tpu_slice.num_hosts)
    topology = Topology(
        devices=tpu_slice.num_chips,
        device_bytes=unreserved(tpu_slice.chip.hbm_bytes, config.run),
        host_memory=int(tpu_slice.host_memory_bytes),
        processes=tpu_slice.num_hosts,
    )
    encoders = tuple(encoder.spec for encoder in open_encoders(config.capture, model))
    return make_plan(config, model, num_source_shards, topology, encoders=encoders)


def _compile(config: RunConfig, model: Model, tpu_slice: Slice, job: Plan) -> tuple[Plan, Program]:
    """Compiles the step, and plans the steps in flight that fit. Raises ConfigError if one does not, before compiling
    if weights and outputs alone are too large."""
    available = tpu_slice.chip.hbm_bytes - job.reserved_bytes
    job = job.fitted(DeviceMemory(job.weights.device_bytes, _output_bytes(job, tpu_slice), 0, 0), available)
    program = compile_program(model, job, config, slice_devices(tpu_slice))
    return job.fitted(program, available), program


def make_slice_plan(config: RunConfig, model: Model, tpu_slice: Slice, job: Plan, program: Program) -> SlicePlan:
    """The plan of a job whose step was compiled. Pure arithmetic."""
    options, step, memory = config.plan, job.step, job.memory
    rows_per_chip = step.rows // job.mesh.data
    flops = model.flops_per_token(step.forward_keys, step.length, step.head_share) + step.encoder_flops
    mfu = _mfu(config, model, tpu_slice, job, flops)
    cost = Cost(
        flops,
        step.row_bytes / step.length,
        options.fill,
        _received_bytes(config, model, job) / (step.rows * step.length),
        step.index_bytes,
    )
    limits = throughput_limits(cost, tpu_slice, mfu, _store_bytes_per_s(options, cost, job))
    rate, num_tokens = limits.tokens_per_s, job.streams.max_tokens
    price = tpu_slice.chip.usd_per_hour if options.usd_per_chip_hour is None else options.usd_per_chip_hour
    shard_bytes = job.rows_per_block * step.largest_row_bytes
    return SlicePlan(
        family=model.family,
        num_layers=model.num_layers,
        num_params=num_params(model.leaves(step.forward_keys, with_head=bool(step.head_outputs))),
        topology=tpu_slice.name,
        num_chips=tpu_slice.num_chips,
        num_hosts=tpu_slice.num_hosts,
        mesh={"data": job.mesh.data, "tensor": job.mesh.tensor},
        weights=str(job.weights.sharding),
        rows=step.rows,
        rows_per_chip=rows_per_chip,
        length=step.length,
        steps_in_flight=memory.inflight_steps,
        weight_bytes=job.weights.device_bytes,
        output_bytes=_output_bytes(job, tpu_slice),
        program=program,
        hbm_bytes=tpu_slice.chip.hbm_bytes - job.reserved_bytes,
        hbm_bytes_needed=program.resident_bytes(memory.inflight_steps),
        flops_per_slot=cost.flops,
        mfu=mfu,
        activation_bytes_per_slot=cost.activation_bytes,
        stored_bytes_per_token=cost.stored_bytes,
        limits=limits,
        binding=limits.binding,
        tokens_per_s=rate,
        traffic=traffic(cost, tpu_slice, rate),
        host_bytes=memory.host_bytes,
        shard_bytes=shard_bytes,
        objects_per_block=_objects_per_block(job),
        slots_per_block=job.rows_per_block * step.length,
        num_tokens=num_tokens,
        bill=None if num_tokens is None else bill(cost, tpu_slice, num_tokens, rate, price, options.usd_per_tb_month),
        decoding=_decoding(config, model, tpu_slice, job),
        usd_per_chip_hour=price,
        price_source="list price on demand" if options.usd_per_chip_hour is None else "plan.usd_per_chip_hour",
        notes=_notes(job, program),
        advice=tuple(advise(config, model.arch, tpu_slice, limits, mfu, shard_bytes, rows_per_chip * step.length)),
    )


def _mfu(config: RunConfig, model: Model, tpu_slice: Slice, job: Plan, flops: int) -> float:
    """plan.mfu, or what to expect if it is null. `flops` are per token slot."""
    if config.plan.mfu is not None:
        return config.plan.mfu
    step, window = job.step, None if model.arch.local is None else model.arch.local.window
    without_attention = model.flops_per_token(step.forward_keys, step.length, step.head_share, {None: 0, window: 0})
    return forward_mfu(tpu_slice.chip, model.arch, flops, flops - step.encoder_flops - without_attention)


def _received_bytes(config: RunConfig, model: Model, job: Plan) -> int:
    """Bytes that each chip receives from other chips in a step."""
    step, mesh, dtype = job.step, job.mesh, str(config.model.dtype)
    weights = model.weight_bytes(step.forward_keys, dtype, config.model.has_int8_weights)
    num_layers = sum(map(len, layer_runs(step.forward_keys, model.arch)))
    summed = _summed_bytes(config, model, num_layers, step.rows // mesh.data * step.length)
    return received_bytes(weights, job.weights.sharding, mesh.data, mesh.tensor, summed)


def _decoding(config: RunConfig, model: Model, tpu_slice: Slice, job: Plan) -> Decoding | None:
    generation, dtype = job.generation, str(config.model.dtype)
    if generation is None:
        return None
    weights = model.generation.weight_bytes(dtype, config.model.has_int8_weights)
    data = tpu_slice.num_chips // generation.tensor
    summed = _summed_bytes(config, model, model.num_layers, generation.rows // data)
    received = received_bytes(weights, generation.weights.sharding, data, generation.tensor, summed)
    read = weights.on_device(generation.tensor) + generation.cache_bytes
    if model.head.tensor is not None:  # a step reads only a few rows of the embedding
        read -= replace(weights, leaves=weights.leaves["embed"]).on_device(generation.tensor)
    return decoding(generation.rows, read, received, tpu_slice)


def _summed_bytes(config: RunConfig, model: Model, num_layers: int, num_tokens: int) -> int:
    """Bytes of the activations that are summed along `tensor`: the embedding, and two per layer. Products of int8
    matrices are summed before they are rounded."""
    item_bytes = ITEM_BYTES[config.model.dtype]
    product_bytes = 4 if config.model.has_int8_weights else item_bytes
    return (item_bytes + 2 * num_layers * product_bytes) * num_tokens * model.arch.d_model


def _output_bytes(job: Plan, tpu_slice: Slice) -> int:
    """Bytes of one step's activations on a chip."""
    return job.memory.step_bytes * job.mesh.processes // tpu_slice.num_chips


def _objects_per_block(job: Plan) -> int:
    arrays = len(job.step.stored_arrays) + len(SIDE_ARRAYS) + (job.step.selected is not None)
    arrays += sum(encoder.indexed for encoder in job.step.encoders)
    return arrays + job.step.statistics + _RECORDS_PER_BLOCK


def _store_bytes_per_s(options: PlanConfig, cost: Cost, job: Plan) -> float:
    """The store's bandwidth: as configured, else as allowed by a bucket's initial rate of writes."""
    if options.store_gb_per_s:
        return options.store_gb_per_s * 1e9
    block_bytes = job.rows_per_block * job.step.length * cost.stored_bytes * cost.fill
    return BUCKET_WRITES_PER_S * block_bytes / _objects_per_block(job)


def _notes(job: Plan, program: Program) -> tuple[str, ...]:
    notes = job.notes
    if job.generation:
        notes += (job.generation.describe(), "hours, USD and tokens/s do not include generation; see decoding")
    if program.attention_note:
        notes += (program.attention_note,)
    if program.computed_twice:
        notes += (
            f"the compiler recomputes {program.computed_twice} results to save memory; lower batch.rows or "
            f"batch.length",
        )
    return notes
