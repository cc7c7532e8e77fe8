"""What a job would do on a TPU slice that is not there: compiled, with its limits, time and cost.

Neither data, tokenizer, weights nor store are opened: config.json is enough (`model.init=random`).
"""

import json
import logging
from dataclasses import asdict, dataclass, replace

from pipeline.cluster.topology import Topology
from pipeline.config.schema import RunConfig
from pipeline.core.errors import ConfigError
from pipeline.models.registry import Model, open_model
from pipeline.planning.plan import Plan, make_plan
from pipeline.planning.slice.advice import advise
from pipeline.planning.slice.chips import GIB, Slice, parse_slice
from pipeline.planning.slice.compile_check import Program, compile_program, largest_power, require_room, slice_devices
from pipeline.planning.slice.roofline import (
    BUCKET_WRITES_PER_S,
    SIDE_BYTES,
    Bill,
    Cost,
    Limits,
    Traffic,
    bill,
    limits,
    traffic,
)
from pipeline.store.format.layout import ITEM_BYTES, MIB, SIDE_ARRAYS

log = logging.getLogger("pipeline")

_RECORDS_PER_BLOCK = 2  # the commit record, and the table of documents


@dataclass(frozen=True)
class SlicePlan:
    """Bytes without another word are of one chip; rates are of valid tokens."""

    family: str
    num_layers: int
    num_params: int  # that the capture needs
    topology: str
    num_chips: int
    num_hosts: int
    mesh: dict[str, int]
    weights: str
    rows: int  # per step, over all chips
    rows_per_chip: int
    length: int
    steps_in_flight: int
    weight_bytes: int  # by arithmetic, to compare with the compiler's
    output_bytes: int  # likewise
    program: Program
    hbm_bytes: int
    hbm_bytes_needed: int  # with all steps in flight
    flops_per_slot: int
    activation_bytes_per_slot: float
    stored_bytes_per_token: float
    limits: Limits
    binding: str
    tokens_per_s: float
    traffic: Traffic
    host_bytes: int  # of activations in one host's memory, at most
    shard_bytes: int  # the largest object
    objects_per_block: int
    slots_per_block: int
    num_tokens: int | None  # run.max_tokens
    bill: Bill | None  # None without run.max_tokens
    notes: tuple[str, ...]
    advice: tuple[str, ...]

    def describe(self) -> str:
        """The plan in a few lines, for people."""
        program, limits, traffic = self.program, self.limits, self.traffic
        collectives = ", ".join(f"{count} {name}" for name, count in sorted(program.collectives.items())) or "none"
        rates = ", ".join(f"{name.replace('_', ' ')} {rate:,.0f}" for name, rate in vars(limits).items())
        axes = ", ".join(f"{name} {size}" for name, size in self.mesh.items())
        lines = [
            f"model     {self.family}, {self.num_layers} layers; the capture needs {self.num_params:,} parameters",
            f"weights   {self.weights}: {self.weight_bytes / GIB:.2f} GiB on each chip",
            f"slice     {self.topology}: {self.num_chips} chips, {self.num_hosts} hosts; mesh {axes}",
            f"step      {self.rows} rows of {self.length} tokens, {self.rows_per_chip} per chip; "
            f"{self.steps_in_flight} in flight",
            f"memory    of {self.hbm_bytes / GIB:.2f} GiB a chip: arguments {program.argument_bytes / GIB:.2f}, "
            f"outputs {program.output_bytes / GIB:.2f}, temporaries {program.temporary_bytes / GIB:.2f}, peak "
            f"{program.peak_bytes / GIB:.2f}; {self.hbm_bytes_needed / GIB:.2f} with all steps in flight",
            f"program   attention {program.attention}; collectives: {collectives}; compiled in "
            f"{program.compile_s:.0f} s",
            f"token     {self.flops_per_slot:,} FLOPs and {self.activation_bytes_per_slot:,.10g} bytes a slot; "
            f"{self.stored_bytes_per_token:,.0f} bytes stored per valid token",
            f"limits    tokens/s: {rates}",
            f"bound by  {self.binding.replace('_', ' ')}: {self.tokens_per_s:,.0f} tokens/s",
            f"traffic   {traffic.device_to_host / 1e9:.1f} GB/s to the hosts; per host {traffic.host_memory / 1e9:.1f} "
            f"GB/s of memory, {traffic.network / 1e9:.2f} GB/s to the store",
            f"hosts     up to {self.host_bytes / GIB:.1f} GiB of activations on each",
            f"store     shards of {self.shard_bytes / MIB:.1f} MiB, {self.objects_per_block} objects per block of "
            f"{self.slots_per_block:,} slots",
        ]
        if self.bill is not None:
            lines.append(
                f"job       {self.num_tokens:,} tokens: {self.bill.hours:,.2f} hours, {self.bill.terabytes:,.2f} TB, "
                f"{self.bill.chips_usd:,.0f} USD for the chips, {self.bill.store_usd_per_month:,.0f} a month for the "
                f"store"
            )
        lines += [f"note      {line}" for line in self.notes]
        return "\n".join([*lines, *(f"advice    {line}" for line in self.advice)])


def print_slice_plan(config: RunConfig) -> None:
    """Raises ConfigError for what does not fit, saying what would."""
    where = parse_slice(config.topology)
    model = open_model(
        config.model.path, revision=config.model.revision, init=str(config.model.init), seed=config.model.seed
    )
    plan = search(config, model, where) if config.plan.search else plan_slice(config, model, where)
    print(json.dumps(asdict(plan), indent=2) if config.plan.json else plan.describe())


def plan_slice(config: RunConfig, model: Model, where: Slice) -> SlicePlan:
    """Compiles the step for the slice. Raises ConfigError for what does not fit."""
    return _compiled(config, model, where, _job_plan(config, model, where))


def search(config: RunConfig, model: Model, where: Slice) -> SlicePlan:
    """The plan with the largest batch.rows that fits with two steps in flight: a power of two per chip, found by
    compiling; it logs what it tries. Raises ConfigError if one row per chip does not fit."""
    along_data = where.num_chips // config.mesh.tensor
    plans: dict[int, SlicePlan] = {}

    def fits(per_chip: int) -> bool:
        tried = replace(config, batch=replace(config.batch, rows=per_chip * along_data))
        try:
            job = _job_plan(tried, model, where)
            if job.memory.inflight_steps == 1 and per_chip > 1:
                log.info("%d rows per chip: two steps exceed run.max_inflight_mib", per_chip)
                return False
            plan = plans[per_chip] = _compiled(tried, model, where, job)
        except ConfigError as error:
            if per_chip == 1:
                raise
            log.info("%d rows per chip: %s", per_chip, error)
            return False
        log.info("%d rows per chip: %.2f of %.2f GiB", per_chip, plan.hbm_bytes_needed / GIB, plan.hbm_bytes / GIB)
        return True

    return plans[largest_power(fits)]


def _compiled(config: RunConfig, model: Model, where: Slice, job: Plan) -> SlicePlan:
    outputs = _output_bytes(job, where)  # what these take is known without a compiler
    require_room(
        job.weights.device_bytes + outputs, job.weights.device_bytes + job.memory.inflight_steps * outputs, job, where
    )
    program = compile_program(model, job, config, slice_devices(where))
    require_room(program.resident_bytes(1), program.resident_bytes(job.memory.inflight_steps), job, where)
    options = config.plan
    slot_bytes = job.step.row_bytes / job.step.length
    cost = Cost(model.flops_per_token(job.step.keys, job.step.length), slot_bytes, options.fill)
    slots_per_block = job.rows_per_block * job.step.length
    objects_per_block = len(job.step.keys) + len(job.step.scale_counts) + len(SIDE_ARRAYS) + _RECORDS_PER_BLOCK
    objects_per_block += (job.step.selected is not None) + job.step.statistics
    store_bytes_per_s = (options.store_gb_per_s or 0) * 1e9
    if not store_bytes_per_s:
        store_bytes_per_s = BUCKET_WRITES_PER_S * slots_per_block * (slot_bytes + SIDE_BYTES) / objects_per_block
    reach = limits(cost, where, options.mfu, store_bytes_per_s)
    price = where.chip.usd_per_hour if options.usd_per_chip_hour is None else options.usd_per_chip_hour
    along_data = where.num_chips // job.mesh.tensor
    rows_per_chip = job.step.rows // along_data
    shard_bytes = job.rows_per_block * job.step.slots * max(job.step.widths) * ITEM_BYTES[job.step.dtype]
    notes = job.notes
    if job.generation:
        notes += (job.generation.describe(), "what generating takes in time and money is not in these figures")
    if program.attention_note:
        notes += (program.attention_note,)
    return SlicePlan(
        family=model.family,
        num_layers=model.num_layers,
        num_params=model.num_params(job.step.keys),
        topology=where.name,
        num_chips=where.num_chips,
        num_hosts=where.num_hosts,
        mesh={"data": along_data, "tensor": job.mesh.tensor},
        weights=str(job.weights.sharding),
        rows=job.step.rows,
        rows_per_chip=rows_per_chip,
        length=job.step.length,
        steps_in_flight=job.memory.inflight_steps,
        weight_bytes=job.weights.device_bytes,
        output_bytes=_output_bytes(job, where),
        program=program,
        hbm_bytes=where.chip.hbm_bytes,
        hbm_bytes_needed=program.resident_bytes(job.memory.inflight_steps),
        flops_per_slot=cost.flops,
        activation_bytes_per_slot=cost.activation_bytes,
        stored_bytes_per_token=cost.stored_bytes,
        limits=reach,
        binding=reach.binding,
        tokens_per_s=reach.tokens_per_s,
        traffic=traffic(cost, where, reach.tokens_per_s),
        host_bytes=job.memory.host_bytes,
        shard_bytes=shard_bytes,
        objects_per_block=objects_per_block,
        slots_per_block=slots_per_block,
        num_tokens=job.streams.max_tokens,
        bill=None
        if job.streams.max_tokens is None
        else bill(cost, where, job.streams.max_tokens, reach.tokens_per_s, price, options.usd_per_tb_month),
        notes=notes,
        advice=tuple(
            advise(
                config,
                model.arch,
                where.chip,
                reach,
                shard_bytes,
                job.memory.host_bytes,
                rows_per_chip * job.step.length,
            )
        ),
    )


def _output_bytes(job: Plan, where: Slice) -> int:
    """Activations of one step that a chip holds."""
    return job.memory.step_bytes * job.mesh.processes // where.num_chips


def _job_plan(config: RunConfig, model: Model, where: Slice) -> Plan:
    """The first process's plan. How many source shards the data has is not known: as many as are needed."""
    shards = max(config.data.num_streams or 1, where.num_hosts * config.run.worker_count)
    topology = Topology(
        devices=where.num_chips,
        device_bytes=where.chip.hbm_bytes,
        processes=where.num_hosts,
        workers=config.run.worker_count,
        worker=config.run.worker_index,
    )
    return make_plan(config, model, shards, topology)
