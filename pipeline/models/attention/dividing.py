"""Divides attention among devices: each computes it for its rows and heads."""

from collections.abc import Callable

import jax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array

from pipeline.models.architecture import Architecture


def obstacle_to_dividing(arch: Architecture, mesh: Mesh, length: int, block: int) -> str | None:
    """Why rows of `length` cannot be divided into blocks, or the heads among the mesh's `tensor` devices, as a clause
    for messages; None if they can."""
    if length % block:
        return f"it needs batch.length to be a multiple of {block}, and batch.length is {length}"
    tensor = mesh.shape["tensor"]
    for sizes in arch.all_sizes:
        if sizes.num_heads % tensor or sizes.num_kv_heads % tensor:
            return (
                f"mesh.tensor={tensor} does not divide {sizes.num_heads} heads and {sizes.num_kv_heads} key-value heads"
            )
    return None


def divide_attention(attend: Callable[..., Array], mesh: Mesh) -> Callable[..., Array]:
    """Returns `attend` (of q, k, v, segments and sinks) with rows divided along the mesh's `data` axis and heads along
    `tensor`."""
    # check_vma=False: JAX does not track the axes over which a Pallas kernel's output varies, and loops may begin with
    # constants, which are equal on all devices, and end with values that are not.
    heads, rows = PartitionSpec("data", None, "tensor"), PartitionSpec("data")
    in_specs = (heads, heads, heads, rows, PartitionSpec("tensor"))
    return jax.shard_map(attend, mesh=mesh, in_specs=in_specs, out_specs=heads, check_vma=False)
