"""The arrays of an SAE on the devices.

Matrices are in the model's dtype, all other arrays in float32. The mesh's `tensor` axis divides the features.
"""

import math
from collections.abc import Callable, Collection

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Shaped

from pipeline.models.exchange.context import MESH_AXES
from pipeline.models.sae.spec import ARRAYS, SAESpec

SAEParams = dict[str, Array]
"""Array by its name in `ARRAYS`."""


def needed_arrays(names: Collection[str], decodes: bool) -> tuple[str, ...]:
    """The names of a checkpoint's arrays that encoding needs; with `decodes`, also those for decoding."""
    return tuple(name for name, axes in ARRAYS.items() if name in names and (decodes or "O" not in axes))


def load_params(
    sae: SAESpec, names: Collection[str], read: Callable[[str], Shaped[np.ndarray, "..."]], dtype: str, mesh: Mesh
) -> SAEParams:
    """Loads the named arrays onto the devices. `read` reads one array; every process reads all of them, and keeps the
    parts for its devices."""

    def load(name: str) -> Array:
        values = read(name).astype(_dtype(name, dtype))
        sharding = NamedSharding(mesh, params_partition(name, sae, mesh))
        # Not device_put, which gathers all processes' values to compare them.
        return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])

    return {name: load(name) for name in names}


def abstract_params(
    sae: SAESpec, names: Collection[str], dtype: str, mesh: Mesh | AbstractMesh
) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes and shardings of the result of `load_params`. Reads nothing, and needs no device."""
    return {
        name: jax.ShapeDtypeStruct(
            sae.axis_sizes(ARRAYS[name]),
            _dtype(name, dtype),
            sharding=NamedSharding(mesh, params_partition(name, sae, mesh)),
        )
        for name in names
    }


def params_bytes(sae: SAESpec, names: Collection[str], dtype: str, tensor: int) -> int:
    """Bytes of the arrays on each device, if `tensor` devices divide the features."""
    arrays = abstract_params(sae, names, dtype, AbstractMesh((1, 1, tensor), MESH_AXES)).values()
    return sum(math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize for array in arrays)


def tensor_axis(sae: SAESpec, mesh: Mesh | AbstractMesh) -> str | None:
    """The mesh axis that divides the features; None if none does."""
    return "tensor" if mesh.shape["tensor"] > 1 and sae.width % mesh.shape["tensor"] == 0 else None


def params_partition(name: str, sae: SAESpec, mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """How an array is divided over the mesh, by features."""
    return PartitionSpec(*(tensor_axis(sae, mesh) if axis == "F" else None for axis in ARRAYS[name]))


def _dtype(name: str, dtype: str) -> str:
    return dtype if len(ARRAYS[name]) == 2 else "float32"
