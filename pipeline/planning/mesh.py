"""The mesh of the devices, each process's rows of a step, and how the weights are divided."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.cluster.topology import Topology
from pipeline.config.choices import Weights
from pipeline.config.schema import MeshConfig
from pipeline.core.errors import ConfigError
from pipeline.models.checkpoints.loading import WeightBytes
from pipeline.store.format.layout import MIB

MAX_WEIGHTS_SHARE = 0.6  # of a device's memory before model.weights=auto chooses fsdp: activations need the rest


@dataclass(frozen=True)
class MeshPlan:
    """The mesh of one job, and one process's share of a step."""

    data: int  # devices along the axis that divides rows
    tensor: int  # devices along the axis that divides heads and neurons
    processes: int  # processes of the job, which run every step together
    process_rows: int  # rows per step and process
    first_row: int  # of this process, in a step


def plan_mesh(mesh: MeshConfig, rows: int, topology: Topology, tensor_dims: Mapping[str, int]) -> MeshPlan:
    """The mesh, whose axis `tensor` must divide each of the model's `tensor_dims`, and the division of `rows` per step
    among the processes. Raises ConfigError."""
    tensor = mesh.tensor
    process_devices = topology.devices // topology.processes
    if process_devices % tensor:
        raise ConfigError(
            f"mesh.tensor={tensor} does not divide the {process_devices} devices of a process "
            f"({topology.devices} devices / {topology.processes} processes): rows must stay within their process. "
            f"Set mesh.tensor to a divisor of {process_devices}."
        )
    for name, size in tensor_dims.items():
        if size % tensor:
            raise ConfigError(
                f"mesh.tensor={tensor} does not divide the model's {size} {name}: {size} = {size // tensor} * {tensor} "
                f"+ {size % tensor}. Set mesh.tensor to a common divisor of "
                f"{', '.join(f'{size} {name}' for name, size in tensor_dims.items())}."
            )
    data = topology.devices // tensor
    if mesh.data not in (None, data):
        raise ConfigError(
            f"mesh.data * mesh.tensor = {mesh.data} * {tensor} is not the number of devices, {topology.devices}. "
            "Set mesh.data=null."
        )
    if rows % data:
        raise ConfigError(
            f"batch.rows = {rows} is not a multiple of the {data} devices that share the rows. "
            f"Set batch.rows to a multiple of {data}."
        )
    process_rows = rows // topology.processes
    return MeshPlan(data, tensor, topology.processes, process_rows, topology.process * process_rows)


def largest_tensor(topology: Topology, tensor_dims: Mapping[str, int]) -> int:
    """The largest `tensor` axis that the processes and the model allow."""
    return math.gcd(topology.devices // topology.processes, *tensor_dims.values())


@dataclass(frozen=True)
class WeightsPlan:
    """How the weights that a program needs are divided, and the memory that they need."""

    sharding: Weights  # replicated, tensor or fsdp
    device_bytes: int  # of weights, on each device
    notes: tuple[str, ...] = ()  # why model.weights=auto chose fsdp, and what fsdp does not divide


def plan_weights(
    wanted: Weights, weights: WeightBytes, data: int, tensor: int, device_memory: int | None
) -> WeightsPlan:
    """Divides the weights over a mesh of `data` * `tensor` devices.

    `device_memory` is in bytes; None if it is unknown. Raises ConfigError if `wanted` contradicts the mesh, or if the
    weights do not fit.
    """
    sizes = {
        Weights.replicated: weights.on_device(),
        Weights.tensor: weights.on_device(tensor),
        Weights.fsdp: weights.on_device(tensor, fsdp=data),
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
                f"weights are divided over the {data} devices along data: with model.weights={default}, "
                "they would take "
                f"{sizes[default] / MIB:.0f} MiB, more than {MAX_WEIGHTS_SHARE:.0%} of a device's "
                f"{device_memory / MIB:.0f} MiB",
            )
    divided = weights.least_divided(tensor, fsdp=data) if sharding is Weights.fsdp else None
    if divided is not None and divided[1] < data:
        leaf, group = divided
        notes += (
            f"fsdp divides {leaf.key} {list(leaf.layer_shape)} among {group} of the {data} devices along data, which "
            "divide none of its axes",
        )
    if device_memory is not None and sizes[sharding] > device_memory:
        why = "".join(f"; {note}" for note in notes)
        raise ConfigError(
            f"the weights ({sharding}) take {sizes[sharding] / MIB:.0f} MiB on each device, which has "
            f"{device_memory / MIB:.0f} MiB{why}. Use more devices with model.weights=fsdp, a larger mesh.tensor, or "
            f"model.weights_dtype=int8."
        )
    return WeightsPlan(sharding, sizes[sharding], notes)
