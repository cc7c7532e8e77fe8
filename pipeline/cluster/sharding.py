"""The mesh, and how rows and activations are sharded over it."""

from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


def make_mesh(tensor: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of `devices`, by default all. A process's devices are neighbours, so that its rows are contiguous."""
    ordered = sorted(devices or jax.devices(), key=lambda device: (device.process_index, device.id))
    grid = np.array(ordered).reshape(-1, tensor)
    return Mesh(grid, ("data", "tensor"), axis_types=(AxisType.Auto, AxisType.Auto))


def row_sharding(mesh: Mesh) -> NamedSharding:
    """Rows along `data`. A row is never divided."""
    return NamedSharding(mesh, PartitionSpec("data"))


def activation_sharding(mesh: Mesh, width: int) -> NamedSharding:
    """For [B, T, D]: rows along `data`, and D along `tensor` if it is divisible, so that each device copies its
    part."""
    if mesh.shape["tensor"] == 1 or width % mesh.shape["tensor"]:
        return row_sharding(mesh)
    return NamedSharding(mesh, PartitionSpec("data", None, "tensor"))


def replicated(mesh: Mesh) -> NamedSharding:
    """A copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def put_rows(sharding: NamedSharding, local: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """Puts this process's rows [process_rows, T] onto its devices, as its part of global arrays [step_rows, T]."""
    return {name: jax.make_array_from_process_local_data(sharding, values) for name, values in local.items()}
