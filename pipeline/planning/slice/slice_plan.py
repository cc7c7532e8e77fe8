"""The plan of a job on a TPU slice or a machine's GPUs: compiles its step, and estimates its limits, time and cost.

No TPU or GPU is needed. Data, tokenizer, weights and store are not opened; config.json is enough (`model.init=random`).
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from pipeline.cluster.devices import Topology, unreserved
from pipeline.config.choices import Weights
from pipeline.config.schema import RunConfig
from pipeline.core.errors import ConfigError
from pipeline.core.messages import counted
from pipeline.models.registry import Model, open_model
from pipeline.models.runs import layer_runs
from pipeline.planning.encoders import open_encoders
from pipeline.planning.expert_groups import gathered_bytes, pair_bytes, used_bytes
from pipeline.planning.plan import Plan, make_plan, shown_bytes
from pipeline.planning.sae_contexts import compare_contexts, with_sae_contexts
from pipeline.planning.slice.chips import GIB, Slice, parse_slice
from pipeline.planning.slice.compile_check import Program, compile_program, slice_devices
from pipeline.planning.slice.roofline import (
    BUCKET_WRITES_PER_S,
    Cost,
    decoding_step_s,
    feed_tokens_per_s,
    forward_mfu,
    received_bytes,
    throughput_limits,
)
from pipeline.step.compiler import DeviceMemory
from pipeline.store.format.layout import ITEM_BYTES, MIB

_FILL = 0.95  # of token slots with a valid token, as packing reaches
_RECORDS_PER_BLOCK = 2  # the commit record, and the table of documents
_MIN_REMOTE_SHARD = 64 * MIB
_REMEDIES = {  # by what binds
    "feed": "use fewer chips or, on GPUs, one process for each (distributed.num_processes)",
    "hbm": "raise batch.rows, so that weights are read for more tokens",
    "interconnect": "raise batch.rows if weights are gathered (fsdp), lower mesh.tensor or mesh.context if it is more "
    "than 1, or use larger chips",
}
_LESS_TO_STORE = (
    "capture fewer layers or sites, fewer tokens (capture.positions), or int8 (capture.dtype=int8 "
    "capture.scale_group=64), or use fewer chips"
)


def print_slice_plan(config: RunConfig) -> None:
    """Prints the plan for the slice that `config.topology` names. Raises ConfigError for a job that does not fit."""
    tpu_slice = parse_slice(config.topology)
    init, seed, adapter = str(config.model.init), config.model.seed, config.model.adapter
    model = open_model(config.model.path, revision=config.model.revision, init=init, seed=seed, adapter=adapter)
    job = plan_job(config, model, tpu_slice)
    # Before compiling, refuses a job whose weights and outputs alone are too large.
    available = tpu_slice.chip.hbm_bytes - job.reserved_bytes
    job = job.fitted(DeviceMemory(job.weights.device_bytes, _output_bytes(job, tpu_slice), 0, 0), available)
    program = compile_program(model, job, config, slice_devices(tpu_slice))
    job = job.fitted(program, available)
    plan = slice_plan(config, model, tpu_slice, job, program)
    print(json.dumps(plan, indent=2) if config.plan.json else f"{job.describe()}\n{described(plan)}")


def plan_job(config: RunConfig, model: Model, tpu_slice: Slice) -> Plan:
    """The plan of the first process. The data is not opened; it is assumed to have enough source shards."""
    topology = Topology(
        devices=tpu_slice.num_devices,
        device_bytes=unreserved(tpu_slice.chip.hbm_bytes, config.run),
        host_memory=int(tpu_slice.host_memory_bytes),
        platform=tpu_slice.chip.platform,
        processes=_num_processes(config, tpu_slice),
    )
    encoders = open_encoders(config.capture, model)
    config = with_sae_contexts(config, encoders, None)
    compare_contexts(config, encoders, None)
    specs = tuple(encoder.spec for encoder in encoders)
    num_source_shards = max(config.data.num_streams or 1, topology.processes)
    return make_plan(config, model, num_source_shards, topology, encoders=specs)


def _num_processes(config: RunConfig, tpu_slice: Slice) -> int:
    """One per host, or on GPUs `distributed.num_processes`. Raises ConfigError unless that divides the GPUs."""
    wanted = config.distributed.num_processes
    if tpu_slice.chip.platform == "tpu" or wanted is None:
        return tpu_slice.num_hosts
    if tpu_slice.num_devices % wanted:
        raise ConfigError(
            f"distributed.num_processes={wanted} does not divide the {tpu_slice.num_devices} GPUs of {tpu_slice.name}."
        )
    return wanted


def slice_plan(config: RunConfig, model: Model, tpu_slice: Slice, job: Plan, program: Program) -> dict[str, Any]:
    """The plan of a job whose step was compiled, as JSON values. Bytes are per device, or for hosts per host; rates
    count valid tokens."""
    step, num_tokens = job.step, job.streams.max_tokens
    mfu = _expected_mfu(model, tpu_slice, job) if config.plan.mfu is None else config.plan.mfu
    received = _received_bytes(config, model, job) / (step.rows * step.length)
    hbm = _hbm_bytes(job, tpu_slice) * tpu_slice.num_devices / (step.rows * step.length)
    fill = _FILL * (1 - config.batch.overlap / step.length)  # as of documents much longer than rows
    cost = Cost(job.flops, step.row_bytes / step.length, fill, received, step.index_bytes, hbm)
    bytes_per_object = job.rows_per_block * step.length * cost.stored_bytes * fill / _objects_per_block(job)
    processes, cores = job.mesh.processes, tpu_slice.num_hosts * tpu_slice.host_cores
    limits = {"feed": feed_tokens_per_s(processes, cores / processes)}
    limits |= throughput_limits(cost, tpu_slice, mfu, BUCKET_WRITES_PER_S * bytes_per_object)
    binding = min(limits, key=limits.__getitem__)
    usd_per_hour = config.plan.usd_per_chip_hour
    usd_per_hour = tpu_slice.chip.usd_per_hour if usd_per_hour is None else usd_per_hour
    shard_bytes = max(math.prod(job.layout.shard_shape(spec)[:2]) * spec.position_bytes for spec in step.stored_arrays)
    plan = {
        "topology": tpu_slice.name,
        "num_chips": tpu_slice.num_chips,
        "num_hosts": tpu_slice.num_hosts,
        "mesh": {"data": job.mesh.data, "context": job.mesh.context, "tensor": job.mesh.tensor},
        "weights": str(job.weights.sharding),
        "rows_per_device": step.rows // job.mesh.data,
        "row_bytes": job.row_bytes(program),  # on each device that has a part of it, without the weights
        "length": step.length,
        "weight_bytes": job.weights.device_bytes,  # calculated, to compare with the compiler's report
        "output_bytes": _output_bytes(job, tpu_slice),  # calculated, too
        "program": asdict(program),
        "hbm_bytes": tpu_slice.chip.hbm_bytes - job.reserved_bytes,
        "hbm_bytes_needed": program.resident_bytes(job.memory.inflight_steps),
        "mfu": mfu,
        "stored_bytes_per_token": cost.stored_bytes,
        "limits": limits,
        "binding": binding,
        "tokens_per_s": limits[binding],
        "shard_bytes": shard_bytes,  # the largest object
        "usd_per_chip_hour": usd_per_hour,
        "num_tokens": num_tokens,  # run.max_tokens
        "hours": num_tokens and num_tokens / limits[binding] / 3600,
        "terabytes": num_tokens and num_tokens * cost.stored_bytes / 1e12,
        "decoding": _decoding(config, model, tpu_slice, job),  # for data=generate
    }
    return plan | {"notes": [*_notes(job, program), *_advice(config, limits, binding, shard_bytes)]}


def described(plan: Mapping[str, Any]) -> str:
    """What the plan adds to that of a run, as human-readable text. The first limit binds."""
    program, num_chips, num_tokens = plan["program"], plan["num_chips"], plan["num_tokens"]
    collectives = ", ".join(f"{count} {name}" for name, count in sorted(program["collectives"].items())) or "none"
    axes = ", ".join(f"{name} {size}" for name, size in plan["mesh"].items())
    gib = {name: f"{program[f'{name}_bytes'] / GIB:.2f}" for name in ("argument", "output", "temporary", "peak")}
    usd_per_s = plan["usd_per_chip_hour"] and num_chips * plan["usd_per_chip_hour"] / 3600
    lines = [
        f"slice     {plan['topology']}: {counted(num_chips, 'chip')}, {counted(plan['num_hosts'], 'host')}; "
        f"mesh {axes}",
        f"device    {plan['hbm_bytes'] / GIB:.2f} GiB each: arguments {gib['argument']}, outputs "
        f"{gib['output']}, temporaries {gib['temporary']}, peak {gib['peak']}; "
        f"{plan['hbm_bytes_needed'] / GIB:.2f} with all steps in flight; a row takes {plan['row_bytes'] / GIB:.2f} on "
        f"{counted(plan['mesh']['context'], 'device')}",
        f"program   attention {program['attention']}; collectives: {collectives}; compiled in "
        f"{program['compile_s']:.0f} s",
        f"limits    tokens per second, computing at {plan['mfu']:.0%} of the peak:",
    ]
    for name, rate in sorted(plan["limits"].items(), key=lambda limit: limit[1]):
        lines.append(f"          {rate:14,.0f}  {name.replace('_', ' ')}")
    if num_tokens is not None:
        price = "" if usd_per_s is None else f", {plan['hours'] * 3600 * usd_per_s:,.0f} USD"
        lines.append(
            f"job       {num_tokens:,} tokens, {shown_bytes(plan['terabytes'] * 1e12)}: {plan['hours']:,.2f} hours"
            f"{price}, without start-up, compilation and preemptions"
        )
    if (decoding := plan["decoding"]) is not None:
        rate = decoding["tokens_per_s"]
        price = "" if usd_per_s is None else f", {usd_per_s / rate * 1e6:.2f} USD per million tokens"
        lines.append(
            f"decoding  a step reads {decoding['hbm_bytes'] / 1e9:.2f} GB on each device and receives "
            f"{decoding['received_bytes'] / 1e9:.2f}: at least {decoding['step_s'] * 1e3:.1f} ms, at most {rate:,.0f} "
            f"tokens/s{price}"
        )
    return "\n".join([*lines, *(f"note      {line}" for line in plan["notes"])])


def _expected_mfu(model: Model, tpu_slice: Slice, job: Plan) -> float:
    step, window = job.step, None if model.arch.local is None else model.arch.local.window
    without_attention = model.flops_per_token(step.forward_keys, step.length, step.head_share, {None: 0, window: 0})
    return forward_mfu(tpu_slice.chip, model.arch, job.flops, job.flops - step.encoder_flops - without_attention)


def _received_bytes(config: RunConfig, model: Model, job: Plan) -> int:
    """Bytes that each device receives from others in a step."""
    step, mesh, item_bytes = job.step, job.mesh, ITEM_BYTES[config.model.dtype]
    num_layers = sum(map(len, layer_runs(step.forward_keys, model.arch)))
    row_tokens = step.rows // mesh.data * step.length
    summed = _summed_bytes(config, model, num_layers, row_tokens // mesh.context)
    num_pair_bytes = pair_bytes(model.arch, row_tokens, item_bytes)
    received = received_bytes(job.weights, mesh.data * mesh.context, summed, num_pair_bytes)
    keys = num_layers * model.arch.num_kv_heads // mesh.tensor * (model.arch.head_dim + model.arch.value_dim)
    return received + item_bytes * keys * row_tokens * (mesh.context - 1) // mesh.context


def _hbm_bytes(job: Plan, tpu_slice: Slice) -> int:
    """Bytes that a step reads and writes at least in the memory of each device: weights without the embedding, what is
    gathered of them, and the activations, which are written and copied."""
    mesh, tensor, weights, group = job.mesh, job.mesh.tensor, job.weights.needed, job.weights.expert_group
    read = used_bytes(weights, tensor, group) - replace(weights, leaves=weights.leaves["embed"]).on_device(tensor)
    if job.weights.sharding is Weights.fsdp:
        read += gathered_bytes(weights, mesh.data * mesh.context, tensor, group)
    return read + 2 * _output_bytes(job, tpu_slice)


def _decoding(config: RunConfig, model: Model, tpu_slice: Slice, job: Plan) -> dict[str, float] | None:
    """What a decoding step reads and receives, and how long it takes at least."""
    generation = job.generation
    if generation is None:
        return None
    weights, tensor = generation.weights.needed, generation.weights.tensor
    data = tpu_slice.num_devices // tensor
    num_tokens = generation.spec.rows // data
    summed = _summed_bytes(config, model, model.num_layers, num_tokens)
    num_pair_bytes = pair_bytes(model.arch, num_tokens, ITEM_BYTES[config.model.dtype])
    received = received_bytes(generation.weights, data, summed, num_pair_bytes)
    read = used_bytes(weights, tensor, generation.weights.expert_group) + generation.cache_bytes
    if model.head.tensor is not None:  # a step reads only a few rows of the embedding
        read -= replace(weights, leaves=weights.leaves["embed"]).on_device(tensor)
    step_s = decoding_step_s(read, received, tpu_slice)
    rate = generation.spec.rows / step_s
    return {"hbm_bytes": read, "received_bytes": received, "step_s": step_s, "tokens_per_s": rate}


def _summed_bytes(config: RunConfig, model: Model, num_layers: int, num_tokens: int) -> int:
    """Bytes of the activations that are summed along `tensor`: the embedding, and two per layer. Products of int8
    matrices are summed before they are rounded."""
    item_bytes = ITEM_BYTES[config.model.dtype]
    product_bytes = 4 if config.model.quantised == "int8" else item_bytes
    return (item_bytes + 2 * num_layers * product_bytes) * num_tokens * model.arch.d_model


def _output_bytes(job: Plan, tpu_slice: Slice) -> int:
    """Bytes of one step's activations on a device."""
    return job.memory.step_bytes * job.mesh.processes // tpu_slice.num_devices


def _objects_per_block(job: Plan) -> int:
    layout = job.layout
    shards = sum(map(layout.num_parts, layout.all_arrays))
    indexes = sum(encoder.indexed for encoder in job.step.encoders)
    return shards + indexes + job.step.statistics + _RECORDS_PER_BLOCK


def _notes(job: Plan, program: Program) -> Iterator[str]:
    yield from job.notes
    if job.generation:
        yield "hours, USD and tokens/s do not include generation; see decoding"
    if program.attention_note:
        yield program.attention_note


def _advice(config: RunConfig, limits: Mapping[str, float], binding: str, shard_bytes: int) -> Iterator[str]:
    """A sentence for each setting that should be changed."""
    is_of_shard_mib = 2 * shard_bytes > config.store.shard_mib * MIB  # and not smaller for a small run.max_tokens
    if "://" in config.store.path and shard_bytes < _MIN_REMOTE_SHARD and is_of_shard_mib:
        yield (
            f"store shards of {shard_bytes / MIB:.0f} MiB are small for object storage; raise store.shard_mib to "
            f"{_MIN_REMOTE_SHARD // MIB}-512"
        )
    if binding != "compute":
        remedy = _REMEDIES.get(binding, _LESS_TO_STORE)
        share = limits[binding] / limits["compute"]
        yield f"{binding.replace('_', ' ')} limits this job to {share:.0%} of what the chips could compute: {remedy}"
