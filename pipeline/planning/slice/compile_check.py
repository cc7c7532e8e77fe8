"""Compiles a job's step for a TPU slice or for GPUs, and reports whether it fits and which collectives it contains.

Needs no TPU and no GPU, only libtpu (the extra `tpu`) or JAX's CUDA plugin (the extra `cuda`).
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
from pipeline.planning.slice.gpu_targets import gpu_devices
from pipeline.step.compiled_step import compile_step
from pipeline.step.compiler import DeviceMemory

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
