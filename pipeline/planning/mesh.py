"""The mesh of the devices, and each process's rows of a step."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.cluster.topology import Topology
from pipeline.config.schema import MeshConfig
from pipeline.core.errors import ConfigError


@dataclass(frozen=True)
class MeshPlan:
    """The mesh of one job, and one process's share of a step."""

    data: int  # devices along the axis that divides rows
    tensor: int  # devices along the axis that divides heads and neurons
    processes: int  # processes of the job, which run every step together
    process_rows: int  # rows per step and process
    first_row: int  # of this process, in a step


def plan_mesh(options: MeshConfig, rows: int, topology: Topology, tensor_dims: Mapping[str, int]) -> MeshPlan:
    """Divides `rows` per step among the processes. Raises ConfigError if mesh, devices, model and rows do not match."""
    data, tensor = mesh_shape(options, topology, tensor_dims)
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


def mesh_shape(options: MeshConfig, topology: Topology, tensor_dims: Mapping[str, int]) -> tuple[int, int]:
    """Devices along `data` and along `tensor`, which must divide each of the model's `tensor_dims`.

    Raises ConfigError.
    """
    tensor = options.tensor
    data = options.data if options.data is not None else max(1, topology.devices // tensor)
    if data * tensor != topology.devices:
        raise ConfigError(
            f"mesh.data * mesh.tensor = {data} * {tensor} is not the number of devices, {topology.devices}. "
            f"Set mesh.data=null and mesh.tensor to a divisor of {topology.devices}."
        )
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
    return data, tensor
