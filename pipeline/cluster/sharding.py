"""The mesh, and how rows and activations are sharded over it."""

from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pipeline.models.exchange.context import MESH_AXES, context_axis, device_chunks


def make_mesh(tensor: int = 1, devices: Sequence[jax.Device] | None = None, context: int = 1) -> Mesh:
    """A mesh of `devices`, by default all. A process's devices are neighbours, so that its rows are contiguous."""
    ordered = sorted(devices or jax.devices(), key=lambda device: (device.process_index, device.id))
    grid = np.array(ordered).reshape(-1, context, tensor)
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * 3)


def row_sharding(mesh: Mesh, length: int = 1) -> NamedSharding:
    """For [B, length, ...]: rows along `data`, and slots along `context` if they are divisible."""
    axis = context_axis(mesh, length)
    return NamedSharding(mesh, PartitionSpec("data", axis) if axis else PartitionSpec("data"))


def activation_sharding(mesh: Mesh, width: int, length: int = 1) -> NamedSharding:
    """For [B, length, width]: rows along `data`, slots along `context` and the width along `tensor`, if they are
    divisible, so that each device copies its part."""
    tensor = "tensor" if mesh.shape["tensor"] > 1 and width % mesh.shape["tensor"] == 0 else None
    if tensor is None:
        return row_sharding(mesh, length)
    return NamedSharding(mesh, PartitionSpec("data", context_axis(mesh, length), tensor))


def replicated(mesh: Mesh) -> NamedSharding:
    """A copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def put_rows(mesh: Mesh, local: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """Puts this process's rows [process_rows, T] onto its devices, as its part of global arrays [step_rows, T]."""

    def put(values: np.ndarray) -> jax.Array:
        sharding = row_sharding(mesh, *values.shape[1:2])
        if len(sharding.spec) > 1:
            chunks = device_chunks(mesh.shape["context"], values.shape[1])
            values = np.concatenate([values[:, chunk] for chunk in chunks], axis=1)
        return jax.make_array_from_process_local_data(sharding, values)

    return {name: put(values) for name, values in local.items()}
