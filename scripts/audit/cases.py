"""Compiles the programs of one audited case for its TPU slice or GPUs, as a run with these settings would.

    python -m scripts.audit.cases CASE DIRECTORY

Each case has its own process, which loads the compiler once and frees all memory at its end. Writes each program's
optimised HLO to `DIRECTORY/PROGRAM.txt`, and its memory and minimal HBM traffic to `DIRECTORY/PROGRAM.json`.
"""

import dataclasses
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from pipeline.config import composing
from pipeline.config.schema import RunConfig
from pipeline.core.errors import ConfigError
from pipeline.job.generation.decode import compile_programs
from pipeline.models.leaves import LeafTree
from pipeline.models.partition import Partition
from pipeline.models.registry import Model, open_model
from pipeline.models.runs import layer_runs
from pipeline.planning.plan import Plan
from pipeline.planning.slice.chips import parse_slice
from pipeline.planning.slice.compile_check import abstract_weights, slice_devices
from pipeline.planning.slice.slice_plan import plan_job
from pipeline.step.compiled_step import compile_step
from pipeline.store.format.layout import ITEM_BYTES
from scripts.bench.published_shapes import SHAPES

_INPUT_BYTES = 3 * 4  # per token slot: token, segment, position


@dataclass(frozen=True)
class Case:
    """A model's published shape and the settings of its run; `layers` replaces the number of layers."""

    shape: str
    overrides: tuple[str, ...]
    layers: int | None = None


def _extract(shape: str, topology: str, rows: int, length: int, captured: str, layers: int | None = None) -> Case:
    sizes = (f"batch.rows={rows}", f"batch.length={length}")
    return Case(shape, (f"topology={topology}", *sizes, *captured.split()), layers)


def _generate(topology: str, *mesh: str) -> Case:
    """256 rows of 1024 + 1024 tokens."""
    data = ("data=generate", "data.path=/nowhere", "data.rows=256", "data.prompt_length=1024")
    sizes = ("data.max_new_tokens=1024", "batch.rows=256", "batch.length=2048", "capture.layers=[0]")
    return Case("Qwen2.5-7B", (f"topology={topology}", *data, *sizes, *mesh))


def _long(shape: str, topology: str, length: int, context: int, layer: int) -> Case:
    """Rows whose positions are divided among `context` devices."""
    rows = parse_slice(topology).num_devices // context
    return _extract(shape, topology, rows, length, f"capture.layers=[{layer}] mesh.context={context}")


_SIX_ARRAYS = "capture.layers=[6,12,18] capture.sites=[resid_mid,resid_post]"
_ROUTED = "capture.layers=[24] capture.sites=[router_logits,router_indices,resid_post]"
_LAST_OF_FEW = "capture.layers=[-1] model.weights=fsdp"
TPU_CASES: Mapping[str, Case] = {
    "0.5B 16x1024 v5e-64": _extract("Qwen2.5-0.5B", "v5e-64", 1024, 1024, "capture.layers=[12]"),
    "0.5B 16x1024 v5e-64, 6 arrays": _extract("Qwen2.5-0.5B", "v5e-64", 1024, 1024, _SIX_ARRAYS),
    "0.5B 1x8192 v5e-64": _extract("Qwen2.5-0.5B", "v5e-64", 64, 8192, "capture.layers=[12]"),
    "7B 4x2048 v5e-64": _extract("Qwen2.5-7B", "v5e-64", 256, 2048, "capture.layers=[7,14,21]"),
    "8B 4x2048 v5e-64": _extract("Llama-3-8B", "v5e-64", 256, 2048, "capture.layers=[8,16,24]"),
    "70B 2x2048 v5e-256": _extract("Llama-3-70B", "v5e-256", 512, 2048, "capture.layers=[20,40,60]"),
    "Gemma-2-9B 1x8192 v6e-64": _extract("Gemma-2-9B", "v6e-64", 64, 8192, "capture.layers=[20]"),
    "Qwen3-30B-A3B 4x2048 v5e-64": _extract("Qwen3-30B-A3B", "v5e-64", 256, 2048, _ROUTED),
    "Mixtral-8x7B 4x2048 v6e-64": _extract("Mixtral-8x7B", "v6e-64", 256, 2048, "capture.layers=[16]"),
    "gpt-oss-20b 4x2048 v6e-64": _extract("gpt-oss-20b", "v6e-64", 256, 2048, _ROUTED.replace("24", "12")),
    "gpt-oss-120b, 4 layers, 4x2048 v5p-256": _extract("gpt-oss-120b", "v5p-256", 512, 2048, _LAST_OF_FEW, 4),
    "DeepSeek-V3, 5 layers, 4x2048 v5p-256": _extract("DeepSeek-V3", "v5p-256", 512, 2048, _LAST_OF_FEW, 5),
    "7B generate v5e:8x8, auto": _generate("v5e:8x8"),
    "7B generate v5e:8x8, fsdp": _generate("v5e:8x8", "model.weights=fsdp"),
    "8B 4x2048 tpu7x-8": _extract("Llama-3-8B", "tpu7x-8", 32, 2048, "capture.layers=[8,16,24]"),
    "7B 32768 over 4 v5e-64": _long("Qwen2.5-7B", "v5e-64", 32768, 4, 14),
    "8B 131072 over 4 v5e-64": _long("Llama-3-8B-1048k", "v5e-64", 131072, 4, 16),
    "8B 131072 over 4 v5p-64": _long("Llama-3-8B-1048k", "v5p-64", 131072, 4, 16),
    "8B 131072 over 2 v5e-64": _long("Llama-3-8B-1048k", "v5e-64", 131072, 2, 16),
    "8B 262144 over 4 v5e-128": _long("Llama-3-8B-1048k", "v5e-128", 262144, 4, 16),
    "8B 1048576 over 4 v6e-256": _long("Llama-3-8B-1048k", "v6e-256", 1048576, 4, 16),
    "0.5B, 2 layers, fsdp, 2x512 v5e-4": _extract(
        "Qwen2.5-0.5B", "v5e-4", 8, 512, "capture.layers=[1] model.weights=fsdp", layers=2
    ),
}
"""Names contain rows x length per device, and the slice; "131072 over 4" are rows that 4 devices divide. The generation
cases have 256 rows of 1024 + 1024 tokens over all devices. The last case is small, for the tests."""
_ON_GPUS = {  # shape, rows per GPU, length, what is captured, topologies
    "0.5B 16x1024": ("Qwen2.5-0.5B", 16, 1024, "capture.layers=[12]", "h100-1 h100-8 rtx4090-1"),
    "0.5B 16x1024, 6 arrays": ("Qwen2.5-0.5B", 16, 1024, _SIX_ARRAYS, "h100-1"),
    "0.5B 1x8192": ("Qwen2.5-0.5B", 1, 8192, "capture.layers=[12]", "h100-1 rtx4090-1"),
    "7B 4x2048": ("Qwen2.5-7B", 4, 2048, "capture.layers=[7,14,21]", "h100-1 rtx4090-1"),
    "8B 4x2048": ("Llama-3-8B", 4, 2048, "capture.layers=[8,16,24]", "h100-1 rtx4090-1"),
    "8B 4x2048, fsdp": ("Llama-3-8B", 4, 2048, "capture.layers=[8,16,24] model.weights=fsdp", "h100-8"),
    "70B 2x2048": ("Llama-3-70B", 2, 2048, "capture.layers=[20,40,60]", "h100-8"),
    "Gemma-2-9B 1x8192": ("Gemma-2-9B", 1, 8192, "capture.layers=[20]", "h100-1 rtx4090-1"),
    "Qwen3-30B-A3B 4x2048": ("Qwen3-30B-A3B", 4, 2048, _ROUTED, "h100-1"),
    "Qwen3-30B-A3B 4x2048, fsdp": ("Qwen3-30B-A3B", 4, 2048, f"{_ROUTED} model.weights=fsdp", "h100-8"),
    "Mixtral-8x7B 4x2048": ("Mixtral-8x7B", 4, 2048, "capture.layers=[16]", "h100-8"),
    "DeepSeek-V2-Lite 4x2048": ("DeepSeek-V2-Lite", 4, 2048, "capture.layers=[13]", "h100-1"),
    "gpt-oss-20b 4x2048": ("gpt-oss-20b", 4, 2048, _ROUTED.replace("24", "12"), "h100-1 h100-8"),
}
GPU_CASES: Mapping[str, Case] = {
    f"{name} {topology}": _extract(shape, topology, rows * parse_slice(topology).num_devices, length, captured)
    for name, (shape, rows, length, captured, topologies) in _ON_GPUS.items()
    for topology in topologies.split()
} | {"7B generate h100-8, fsdp": _generate("h100-8", "model.weights=fsdp")}


def _decode(shape: str, layers: int, rows: int, length: int, topology: str, proposals: int) -> Case:
    """`rows` of `length` tokens on each device, with a short prompt: a step's traffic is that of full caches."""
    rows *= parse_slice(topology).num_devices
    data = f"data=generate data.path=/nowhere data.rows={rows} data.prompt_length=128 model.weights=replicated"
    sizes = f"data.max_new_tokens={length - 128} batch.rows={rows} batch.length={length}"
    options = f"data.speculate={proposals} capture.layers=[0] topology={topology}"
    return Case(shape, tuple(f"{data} {sizes} {options}".split()), layers)


_DECODED = {  # layers, at least one of each kind; rows of a device; length
    "Llama-3-8B": (2, 32, 2048),
    "Gemma-3-1B": (6, 32, 8192),
    "DeepSeek-V2-Lite": (2, 16, 2048),
}
DECODE_CASES: Mapping[str, Case] = {
    f"{shape}, {sizes[0]} layers, {sizes[1]}x{sizes[2]} {topology}{', 4 proposals' if proposals else ''}": _decode(
        shape, *sizes, topology, proposals
    )
    for topology in ("v5e-4", "v6e-4", "h100-1")
    for shape, sizes in _DECODED.items()
    for proposals in (0, 4)
}
CASES = {"tpu": TPU_CASES, "gpu": GPU_CASES, "decode": DECODE_CASES}
Facts = dict[str, Any]  # about a compiled program, in addition to its text. Bytes are per device


def compile_case(case: Case) -> Iterator[tuple[str, str, Facts]]:
    """Compiles a case: name, optimised HLO and facts of each program. Raises ConfigError."""
    with planned(case) as (config, model, plan):
        yield from (_generation if plan.generation else _extraction)(config, model, plan)


@contextmanager
def planned(case: Case) -> Iterator[tuple[RunConfig, Model, Plan]]:
    """A case's configuration, its model without weights, and its plan. Raises ConfigError."""
    with tempfile.TemporaryDirectory() as path:
        shape = SHAPES[case.shape] | ({} if case.layers is None else {"num_hidden_layers": case.layers})
        Path(path, "config.json").write_text(json.dumps(shape))
        common = (f"model.path={path}", "model.init=random", "model.dtype=bfloat16", "store.path=gs://bucket/store")
        config = composing.compose([*common, "run.max_inflight_mib=40000", *case.overrides])
        model = open_model(path, init="random")
        yield config, model, plan_job(config, model, parse_slice(config.topology))


def _extraction(config: RunConfig, model: Model, plan: Plan) -> Iterator[tuple[str, str, Facts]]:
    tpu_slice, step = parse_slice(config.topology), plan.step
    partition = plan.weights.partition(slice_devices(tpu_slice))
    quantised = config.model.quantised
    leaves, dtype = model.leaves(step.forward_keys, with_head=bool(step.head_outputs)), str(config.model.dtype)
    compiled = compile_step(model, step, abstract_weights(config, leaves, partition), partition)
    mesh = partition.mesh.shape
    weights = model.weight_bytes(step.forward_keys, dtype, quantised, bool(step.head_outputs))
    read = weights.on_device(mesh["tensor"]) - _embedding_bytes(leaves, dtype, mesh["tensor"])
    rows = step.rows // mesh["data"] * (step.length * _INPUT_BYTES + step.row_bytes // mesh["tensor"])
    layers = sum(map(len, layer_runs(step.forward_keys, model.arch)))
    described = _described(partition, config, layers, str(plan.weights.sharding), compiled.attention.name)
    yield "step", compiled.executable.as_text(), _facts(compiled.executable, read + rows, described)


def _generation(config: RunConfig, model: Model, plan: Plan) -> Iterator[tuple[str, str, Facts]]:
    tpu_slice, generation, dtype = parse_slice(config.topology), plan.generation, str(config.model.dtype)
    partition = generation.weights.partition(slice_devices(tpu_slice))
    quantised = config.model.quantised
    leaves = model.generation.leaves()
    spec = dataclasses.replace(generation.spec, end_tokens=(0,))
    programs = compile_programs(model, abstract_weights(config, leaves, partition), partition, spec)
    sharding = str(generation.weights.sharding)
    described = _described(partition, config, model.num_layers, sharding, programs.attention.name)
    weights = model.generation.weight_bytes(dtype, quantised).on_device(generation.weights.tensor)
    if "head" in leaves:
        weights -= _embedding_bytes(leaves, dtype, generation.weights.tensor)
    data = partition.mesh.shape["data"]
    of_all_caches = generation.cache_bytes * data // spec.rows // spec.length  # for each token of a full row
    prefilled = generation.cache_bytes * spec.prefill_rows(data) // spec.rows
    yield "prefill", programs.prefill.as_text(), _facts(programs.prefill, weights + prefilled, described, of_all_caches)
    decoding = _facts(programs.segment, weights + generation.cache_bytes, described, of_all_caches)
    # How often a decoding step's loops over blocks of full caches run.
    yield (
        "decode",
        programs.segment.as_text(),
        decoding | {"block_loops": max(1, spec.length // programs.spec.block - 1)},
    )


def _embedding_bytes(leaves: LeafTree, dtype: str, tensor: int) -> int:
    """Bytes of the embedding on a device. A lookup reads few of them."""
    return leaves["embed"].size * ITEM_BYTES[dtype] // tensor


def _described(partition: Partition, config: RunConfig, layers: int, weights: str, attention: str) -> Facts:
    """The facts that are the same for all programs of a case, which compute `layers` layers."""
    return {
        "chip": parse_slice(config.topology).chip.name,
        "length": config.batch.length,
        "layers": layers,
        "mesh": " ".join(f"{name} {size}" for name, size in partition.mesh.shape.items()),
        "weights": weights,
        "attention": attention,
    }


def _facts(
    program: jax.stages.Compiled, ideal_hbm_bytes: int, described: Facts, token_cache_bytes: int | None = None
) -> Facts:
    memory = program.memory_analysis()
    return described | {
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "peak_bytes": memory.peak_memory_in_bytes,
        "ideal_hbm_bytes": ideal_hbm_bytes,
        "token_cache_bytes": token_cache_bytes,
        "block_loops": 1,
    }


def main(name: str, directory: Path) -> int:
    """Called by `audit`, once per case. Returns the exit code."""
    directory.mkdir(parents=True, exist_ok=True)
    try:
        for program, text, facts in compile_case((TPU_CASES | GPU_CASES | DECODE_CASES)[name]):
            (directory / f"{program}.txt").write_text(text)
            (directory / f"{program}.json").write_text(json.dumps(facts))
    except ConfigError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
