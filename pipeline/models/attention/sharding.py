"""Attention in rows that are divided over devices, and heads, too."""

import jax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float

from pipeline.models.architecture import Architecture
from pipeline.models.attention.spec import Attend, AttentionInputs, AttentionSpec


def attend_rows(attend: Attend, mesh: Mesh, inputs: AttentionInputs, spec: AttentionSpec) -> Float[Array, "B T N W"]:
    """The result of `attend`, which each device calls with its own rows and heads."""

    def on_device(*inputs: Array) -> Array:
        return attend(AttentionInputs(*inputs), spec)

    heads, rows = PartitionSpec("data", None, "tensor"), PartitionSpec("data")
    in_specs = (heads, heads, heads, rows, PartitionSpec("tensor"))
    # check_vma=False: JAX does not track the axes over which a Pallas kernel's output varies.
    divided = jax.shard_map(on_device, mesh=mesh, in_specs=in_specs, out_specs=heads, check_vma=False)
    return divided(*inputs[:5])


def undivided_heads(arch: Architecture, mesh: Mesh) -> str | None:
    """Why a mesh cannot divide the model's heads, as a clause for messages; None if it can."""
    tensor = mesh.shape["tensor"]
    for sizes in arch.all_sizes:
        if sizes.num_heads % tensor or sizes.num_kv_heads % tensor:
            return (
                f"mesh.tensor={tensor} does not divide {sizes.num_heads} heads and {sizes.num_kv_heads} key-value heads"
            )
    return None
