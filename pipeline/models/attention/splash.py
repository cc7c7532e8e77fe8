"""Attention on a TPU: splash attention, the Pallas kernel that comes with JAX. It skips blocks that are masked."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int32

from pipeline.models.architecture import Architecture
from pipeline.models.attention.spec import AttentionSpec

_LANES = 128  # the kernel takes keys in multiples of this
_MAX_BLOCK = 512


def obstacle(arch: Architecture, mesh: Mesh, length: int, dtype: str) -> str | None:
    """Why the model cannot use the kernel, and what would change that; None if it can."""
    tensor = mesh.shape["tensor"]
    if length % _LANES:
        return f"it takes rows in multiples of {_LANES} tokens and batch.length is {length}"
    if arch.num_heads % tensor or arch.num_kv_heads % tensor:
        return f"mesh.tensor={tensor} does not divide {arch.num_heads} heads and {arch.num_kv_heads} key-value heads"
    return None


def block_size(length: int) -> int:
    """Queries and keys of one step of the kernel: the largest multiple of 128 up to 512 that divides the row."""
    return max(size for size in range(_LANES, _MAX_BLOCK + 1, _LANES) if length % size == 0)


@jax.named_scope("splash")
def attend_splash(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segments: Int32[Array, "B T"],
    spec: AttentionSpec,
    *,
    mesh: Mesh,
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """`Attend` with rows divided along the mesh's `data` axis and heads along `tensor`.

    The kernel does not scale: queries are scaled first, in their dtype. `interpret` runs it on a CPU, for tests.
    """
    # Here, so that machines without a TPU do not import Pallas.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    length, block = q.shape[1], block_size(q.shape[1])
    if spec.window is not None:
        mask = splash.LocalMask((length, length), (spec.window - 1, 0), offset=0)
    elif spec.causal:
        mask = splash.CausalMask((length, length))
    else:
        mask = splash.FullMask((length, length))

    def attend_on_device(q: Array, k: Array, v: Array, segments: Array) -> Array:
        kernel = splash.make_splash_mha(
            splash.MultiHeadMask([mask] * q.shape[1]),
            block_sizes=splash.BlockSizes(block_q=block, block_kv=block),
            attn_logits_soft_cap=spec.softcap,
            head_shards=1,
            q_seq_shards=1,
            interpret=interpret,
        )
        return jax.vmap(kernel)(q, k, v, splash.SegmentIds(segments, segments))

    heads, rows = PartitionSpec("data", "tensor"), PartitionSpec("data")
    # check_vma=False: JAX does not track the mesh axes over which a Pallas kernel's output varies.
    attend = jax.shard_map(
        attend_on_device, mesh=mesh, in_specs=(heads, heads, heads, rows), out_specs=heads, check_vma=False
    )
    q, k, v = (jnp.einsum("BTNH->BNTH", x) for x in (q * jnp.asarray(spec.scale, q.dtype), k, v))
    return jnp.einsum("BNTH->BTNH", attend(q, k, v, segments))
