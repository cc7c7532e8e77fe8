"""Compiles a job's step for a TPU slice or for GPUs, and reports whether it fits and which collectives it contains.

Needs no TPU and no GPU, only libtpu (the extra `tpu`) or JAX's CUDA plugin (the extra `cuda`). For GPUs, products are
not tuned by running them, and cuDNN's kernels are not built, so a program on a GPU may choose others.
"""

import collections
import importlib.util
import os
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import jax
from jax.experimental import topologies

from pipeline.cluster.devices import is_out_of_memory
from pipeline.config.schema import RunConfig
from pipeline.core.errors import ConfigError
from pipeline.models.checkpoints.loading import abstract_params
from pipeline.models.decoder import Params
from pipeline.models.leaves import LeafTree, quantised_leaves
from pipeline.models.partition import Partition
from pipeline.models.registry import Model
from pipeline.models.sae.params import abstract_params as abstract_sae
from pipeline.planning.plan import Plan
from pipeline.planning.slice.chips import Slice
from pipeline.step.compiled_step import compile_step
from pipeline.step.compiler import DeviceMemory

# XLA's GpuTargetConfigProto. Limits: "Technical specifications per compute capability" in NVIDIA's CUDA programming
# guide. The rest: XLA's description of the H100 (openxla/xla, backends/gpu/target_config/specs), and "NVIDIA Ada GPU
# Architecture".
_CONFIG = """
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 patch: 0 }} device_description_str: "{name}"
gpu_device_info {{
  runtime_version: "12.8.0" cuda_compute_capability {{ major: {capability[0]} minor: {capability[1]} }}
  core_count: {cores} clock_rate_ghz: {clock_ghz} device_memory_size: {memory} memory_bandwidth: {memory_per_s}
  l2_cache_size: {cache} shared_memory_per_core: {shared} shared_memory_per_block_optin: {shared_per_block}
  shared_memory_per_block: 49152 threads_per_core_limit: {threads} fpus_per_core: 128 threads_per_warp: 32
  threads_per_block_limit: 1024 registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
}}"""
_CUDNN = 91000  # 9.10
_GPUS = {  # sizes in bytes; shared memory and threads of a core, a streaming multiprocessor
    "h100": {
        **{"name": "NVIDIA H100 80GB HBM3", "capability": (9, 0), "cores": 132, "clock_ghz": 1.98},
        **{"memory": 84_942_979_072, "memory_per_s": 3_352_320_000_000, "cache": 50 << 20},
        **{"shared": 228 << 10, "shared_per_block": 227 << 10, "threads": 2048},
    },
    "rtx4090": {
        **{"name": "NVIDIA GeForce RTX 4090", "capability": (8, 9), "cores": 128, "clock_ghz": 2.52},
        **{"memory": 25_393_692_672, "memory_per_s": 1_008_096_000_000, "cache": 72 << 20},
        **{"shared": 100 << 10, "shared_per_block": 99 << 10, "threads": 1536},
    },
}


def gpu_devices(name: str, count: int) -> Sequence[jax.Device]:
    """`count` GPUs of one machine, to compile for. Raises ConfigError if JAX's CUDA plugin is missing.

    From then on, this process lowers cuDNN's attention for this GPU. Otherwise JAX would ask the GPU of this machine,
    if there is one, for its compute capability and for the version of cuDNN.
    """
    from jax._src.cudnn import fused_attention_stablehlo as attention

    gpu = _GPUS[name]
    options = {"target_config": _CONFIG.format(**gpu), "topology": f"1x1x{count}"}
    try:
        description = topologies.get_topology_desc(platform="cuda", **options)
    except NotImplementedError as error:
        raise ConfigError(
            f"topology={name}-{count} requires JAX's CUDA plugin, which is not installed. Run pip install -e '.[cuda]'."
        ) from error
    attention.check_cudnn_version = lambda: _CUDNN
    attention.check_compute_capability = lambda least: gpu["capability"] >= tuple(map(int, least.split(".")))
    attention.is_cuda_compute_capability_equal = lambda capability: False  # asked for Blackwell's only
    return description.devices


_COLLECTIVE = re.compile(
    r"%(\S+) = .* (all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute|collective-broadcast)"
    r"(?:-start)?\((?:.*chain_id=\"(\d+)\")?"
)

_LIBTPU_OPTIONS = {
    # Otherwise libtpu asks a TPU VM's metadata server for these, and logs errors if there is none.
    **{"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-1"},
    **{"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"},
    # No chip is used, so another process may load libtpu at the same time.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@dataclass(frozen=True)
class Program(DeviceMemory):
    """The compiler's report about the step."""

    attention: str
    attention_note: str | None
    collectives: dict[str, int]  # by kind; a collective in the loop over layers counts once
    compile_s: float


def slice_devices(tpu_slice: Slice) -> Sequence[jax.Device]:
    """The devices of a slice, to compile for. Raises ConfigError if libtpu, or for GPUs JAX's CUDA plugin, is missing,
    and if libtpu does not know the slice."""
    jax.config.update("jax_platforms", "cpu")  # this machine's accelerators are not used
    if tpu_slice.chip.platform == "gpu":
        return gpu_devices(tpu_slice.chip.name, tpu_slice.num_devices)
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError("topology requires libtpu, which is not installed. Run pip install -e '.[tpu]'.")
    for name, value in _LIBTPU_OPTIONS.items():
        os.environ.setdefault(name, value)
    try:
        description = topologies.get_topology_desc(tpu_slice.name, platform="tpu", **tpu_slice.topology_options)
    except jax.errors.JaxRuntimeError as error:
        raise ConfigError(
            f"topology {tpu_slice.name}: libtpu does not know this slice: {error}. Give another shape."
        ) from error
    return description.devices


def abstract_weights(config: RunConfig, leaves: LeafTree, partition: Partition) -> Params:
    """The shapes and shardings of the weights that a run with this configuration loads."""
    leaves = quantised_leaves(leaves, config.model.quantised)
    return abstract_params(leaves, str(config.model.dtype), partition.leaf_sharding)


def compile_program(model: Model, plan: Plan, config: RunConfig, devices: Sequence[jax.Device]) -> Program:
    """Compiles the step of a run with this plan. Raises ConfigError if it does not fit."""
    partition = plan.weights.partition(devices)
    leaves = model.leaves(plan.step.forward_keys, with_head=bool(plan.step.head_outputs))
    params = abstract_weights(config, leaves, partition)
    if plan.step.encoders:
        params["encoders"] = {
            encoder.name: abstract_sae(encoder.sae, encoder.arrays, str(config.model.dtype), partition.mesh)
            for encoder in plan.step.encoders
        }
    began = time.perf_counter()
    try:
        step = compile_step(model, plan.step, params, partition)
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).splitlines()[0].partition("Ran out of memory")[2]
        raise ConfigError(
            f"a step of {plan.step.rows} rows of {plan.step.length} tokens does not fit: ran out of memory{reason} "
            f"{plan.remedy()}"
        ) from error
    return Program(
        **asdict(step.memory),
        attention=step.attention.name,
        attention_note=step.attention.note,
        collectives=count_collectives(step.executable.as_text()),
        compile_s=time.perf_counter() - began,
    )


def count_collectives(program_text: str) -> dict[str, int]:
    """Collectives by kind. One that is fused with overlapping computation has several instructions in one chain. All
    collectives inside `shard_map` have the same channel."""
    found = {(kind, chain or name) for name, kind, chain in _COLLECTIVE.findall(program_text)}
    return dict(collections.Counter(kind for kind, _ in found))
