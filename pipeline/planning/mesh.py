"""The mesh of the devices, each process's rows of a step, and how the weights are divided."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import jax

from pipeline.cluster.devices import Topology
from pipeline.cluster.sharding import make_mesh
from pipeline.config.choices import Weights
from pipeline.config.schema import GenerateData, MeshConfig, RunConfig
from pipeline.core.errors import ConfigError
from pipeline.core.sites import Site
from pipeline.models.architecture import Architecture
from pipeline.models.checkpoints.loading import WeightBytes
from pipeline.models.partition import Partition
from pipeline.planning.expert_groups import choose_group
from pipeline.store.format.layout import MIB

_MIN_CHUNK = 8  # tokens: more than the taps of a convolution
MAX_WEIGHTS_SHARE = 0.6  # of a device's memory before model.weights=auto chooses fsdp: activations need the rest


@dataclass(frozen=True)
class MeshPlan:
    """The mesh of one job, and one process's share of a step."""

    data: int  # devices along the axis that divides rows
    tensor: int  # devices along the axis that divides heads and neurons
    processes: int  # processes of the job, which run every step together
    process_rows: int  # rows per step and process
    first_row: int  # of this process, in a step
    context: int = 1  # devices along the axis that divides the positions of a row


def plan_mesh(mesh: MeshConfig, rows: int, topology: Topology, tensor_dims: Mapping[str, int]) -> MeshPlan:
    """The mesh, whose axis `tensor` must divide each of the model's `tensor_dims`, and the division of `rows` per step
    among the processes. Raises ConfigError."""
    tensor, context = mesh.tensor, mesh.context
    process_devices = topology.devices // topology.processes
    if process_devices % (tensor * context):
        raise ConfigError(
            f"mesh.context * mesh.tensor = {context} * {tensor} does not divide the {process_devices} devices of a "
            f"process ({topology.devices} devices / {topology.processes} processes): rows must stay within their "
            f"process. Set their product to a divisor of {process_devices}."
        )
    for name, size in tensor_dims.items():
        if size % tensor:
            raise ConfigError(
                f"mesh.tensor={tensor} does not divide the model's {size} {name}: {size} = {size // tensor} * {tensor} "
                f"+ {size % tensor}. Set mesh.tensor to a common divisor of "
                f"{', '.join(f'{size} {name}' for name, size in tensor_dims.items())}."
            )
    data = topology.devices // (context * tensor)
    if mesh.data not in (None, data):
        raise ConfigError(
            f"mesh.data * mesh.context * mesh.tensor = {mesh.data} * {context} * {tensor} is not the number of "
            f"devices, {topology.devices}. Set mesh.data=null."
        )
    if rows % data:
        raise ConfigError(
            f"batch.rows = {rows} is not a multiple of the {data} devices that share the rows. "
            f"Set batch.rows to a multiple of {data}."
        )
    process_rows = rows // topology.processes
    return MeshPlan(data, tensor, topology.processes, process_rows, topology.process * process_rows, context)


def require_divisible_rows(config: RunConfig, arch: Architecture) -> None:
    """Raises ConfigError if mesh.context cannot divide the positions of this run's rows."""
    context, length, tensor = config.mesh.context, config.batch.length, config.mesh.tensor
    if context == 1:
        return
    multiple = 2 * context * _MIN_CHUNK
    if length % (2 * context) or length < multiple:
        raise ConfigError(
            f"batch.length is {length}, but with mesh.context={context} each device holds two chunks of a row, which "
            f"must have one size, at least {_MIN_CHUNK} tokens. Set batch.length to a multiple of {2 * context}, at "
            f"least {multiple}."
        )
    if isinstance(config.data, GenerateData):
        raise ConfigError(
            f"mesh.context is {context} with data=generate, which divides rows among devices, but not their positions. "
            "Set mesh.context=1."
        )
    if Site.attn_pattern in config.capture.sites:
        raise ConfigError(
            f"mesh.context is {context} and capture.sites contains attn_pattern, which is computed on one device. Set "
            "mesh.context=1, or remove attn_pattern."
        )
    if arch.delta is not None and arch.delta.num_heads % (context * tensor):
        raise ConfigError(
            f"mesh.context * mesh.tensor = {context} * {tensor} does not divide the {arch.delta.num_heads} key heads "
            "of the model's recurrent layers, which devices exchange for positions. Lower mesh.context."
        )


def wider_context(config: RunConfig, mesh: MeshPlan, arch: Architecture) -> int | None:
    """The next larger `mesh.context` with which this run works, and its rows divide among fewer groups of devices."""
    of_process = mesh.data * mesh.context // mesh.processes
    for context in range(2 * mesh.context, of_process + 1, mesh.context):
        if of_process % context == 0:
            with suppress(ConfigError):
                require_divisible_rows(replace(config, mesh=replace(config.mesh, context=context)), arch)
                return context
    return None


def largest_tensor(topology: Topology, tensor_dims: Mapping[str, int]) -> int:
    """The largest `tensor` axis that the processes and the model allow."""
    return math.gcd(topology.devices // topology.processes, *tensor_dims.values())


@dataclass(frozen=True)
class WeightsPlan:
    """How the weights that a program needs are divided, and the memory that they need."""

    needed: WeightBytes = field(repr=False)  # processes compare the text of a plan
    sharding: Weights  # replicated, tensor or fsdp
    device_bytes: int  # of weights, on each device
    notes: tuple[str, ...] = ()  # why model.weights=auto chose fsdp
    expert_group: int = 1  # neighbours that divide the experts of a layer and exchange tokens
    tensor: int = 1  # devices along this axis
    context: int = 1
    on_gpus: bool = False

    def partition(self, devices: Sequence[jax.Device] | None = None) -> Partition:
        """Divides the weights over a mesh of `devices`; None: of all."""
        mesh = make_mesh(self.tensor, devices, self.context)
        return Partition(mesh, self.sharding is Weights.fsdp, self.expert_group)


def plan_weights(
    wanted: Weights,
    weights: WeightBytes,
    data: int,
    tensor: int,
    topology: Topology,
    num_pair_bytes: int = 0,
    context: int = 1,
) -> WeightsPlan:
    """Divides the weights over a mesh of `data` * `tensor` devices. `data` includes those along `context`.

    `num_pair_bytes` are a device's `pair_bytes`. Raises ConfigError if `wanted` contradicts the mesh, or if the weights
    do not fit.
    """
    device_memory, on_gpus = topology.device_bytes, topology.platform == "gpu"
    group = choose_group(weights, data, tensor, num_pair_bytes, on_gpus)
    sizes = {
        Weights.replicated: weights.on_device(),
        Weights.tensor: weights.on_device(tensor),
        Weights.fsdp: weights.on_device(tensor, data // context, group, context),
    }
    if (wanted is Weights.tensor and tensor == 1) or (wanted is Weights.replicated and tensor > 1):
        raise ConfigError(
            f"model.weights={wanted} does not match mesh.tensor={tensor}: tensor needs mesh.tensor above 1, replicated "
            f"needs 1. Set model.weights=auto."
        )
    sharding, notes = wanted, ()
    if wanted is Weights.auto:
        sharding = default = Weights.tensor if tensor > 1 else Weights.replicated
        if device_memory is not None and sizes[default] > MAX_WEIGHTS_SHARE * device_memory and data > 1:
            sharding = Weights.fsdp
            notes = (
                f"weights are divided over the {data} devices along data: with model.weights={default}, they would "
                f"take {sizes[default] / MIB:.0f} MiB, more than {MAX_WEIGHTS_SHARE:.0%} of a device's "
                f"{device_memory / MIB:.0f} MiB",
            )
    group = group if sharding is Weights.fsdp else 1
    if device_memory is not None and sizes[sharding] > device_memory:
        raise ConfigError(
            f"the weights ({sharding}) take {sizes[sharding] / MIB:.0f} MiB on each device, which has "
            f"{device_memory / MIB:.0f} MiB. Use more devices with model.weights=fsdp, a larger mesh.tensor, or "
            f"model.weights_dtype=int8 or int4."
        )
    return WeightsPlan(weights, sharding, sizes[sharding], notes, group, tensor, context, on_gpus)
