"""Attention on a TPU: splash attention, the Pallas kernel that comes with JAX. It skips masked blocks.

In long rows it also skips blocks of keys that no query's segment reaches (`blocks_to_run`).
"""

import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int32, Integer

from pipeline.models.architecture import Architecture
from pipeline.models.attention.arithmetic import scaled
from pipeline.models.attention.spec import AttentionInputs, AttentionSpec

_LANES = 128  # the kernel's block sizes are multiples of this
_SKIPPING_LENGTH = 2048  # the shortest rows in which blocks are skipped
_MAX_SCALAR_BYTES = 3 << 18  # out of 1 MiB of scalar memory, where the kernel keeps two numbers per step


def obstacle(arch: Architecture, mesh: Mesh, rows: int, length: int, dtype: str) -> str | None:
    """Why the model cannot use the kernel, as a clause for messages; None if it can."""
    if length % _LANES:
        return f"it needs batch.length to be a multiple of {_LANES}, and batch.length is {length}"
    tensor = mesh.shape["tensor"]
    for sizes in arch.all_sizes:
        if sizes.num_heads % tensor or sizes.num_kv_heads % tensor:
            return (
                f"mesh.tensor={tensor} does not divide {sizes.num_heads} heads and {sizes.num_kv_heads} key-value heads"
            )
    return None


def block_size(length: int, item_bytes: int) -> int:
    """The number of queries and of keys per step of the kernel: the largest multiple of 128 up to 512 that divides the
    row.

    Up to 1,024 in rows of 8,192 and more, where skipped steps would take as long as the others; not in float32, since
    heads of 256 would then not fit in a chip's vector memory.
    """
    largest = 1024 if length >= 8192 and item_bytes == 2 else 512
    return max(size for size in range(_LANES, largest + 1, _LANES) if length % size == 0)


def skips_blocks(num_rows: int, length: int, block: int) -> bool:
    """Whether a chip's rows are long enough for `blocks_to_run` and its scalar memory is large enough."""
    num_blocks = length // block
    scalar_bytes = 2 * 4 * num_rows * num_blocks * math.ceil(num_blocks / _LANES) * _LANES
    return length >= _SKIPPING_LENGTH and scalar_bytes <= _MAX_SCALAR_BYTES


@jax.named_scope("splash")
def attend_splash(
    inputs: AttentionInputs, spec: AttentionSpec, *, mesh: Mesh, interpret: bool = False
) -> Float[Array, "B T N W"]:
    """`Attend` with rows divided along the mesh's `data` axis and heads along `tensor`.

    The kernel does not scale, so queries are scaled first, in float32. `interpret` runs it on a CPU, for tests.
    """

    def on_device(*inputs: Array) -> Array:
        inputs = AttentionInputs(*inputs)
        num_rows, length = inputs.segments.shape
        block = block_size(length, inputs.q.dtype.itemsize)
        return attend_blocks(inputs, spec, block, skips_blocks(num_rows, length, block), interpret)

    heads, rows = PartitionSpec("data", None, "tensor"), PartitionSpec("data")
    in_specs = (heads, heads, heads, rows, PartitionSpec("tensor"))
    # check_vma=False: JAX does not track the axes over which a Pallas kernel's output varies.
    divided = jax.shard_map(on_device, mesh=mesh, in_specs=in_specs, out_specs=heads, check_vma=False)
    return divided(*inputs._replace(q=scaled(inputs.q, spec.scale)))


def attend_blocks(
    inputs: AttentionInputs, spec: AttentionSpec, block: int, skips: bool, interpret: bool = False
) -> Float[Array, "B T N W"]:
    """The kernel for scaled queries, with `block` queries and keys per step, over the blocks that the causal mask or
    the window allows.

    With `skips`, it runs only the steps of `blocks_to_run`. The result is then the same to the bit, except at padding,
    where it differs but is finite.
    """
    # Imported here, so that machines without a TPU do not import Pallas.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    q, k, v, segments, sinks = inputs
    num_rows, length, num_heads, _ = q.shape
    if spec.window is not None:
        mask = splash.LocalMask((length, length), (spec.window - 1, 0), offset=0)
    elif spec.causal:
        mask = splash.CausalMask((length, length))
    else:
        mask = splash.FullMask((length, length))
    kernel = splash.make_splash_mha(
        splash.MultiHeadMask([mask] * num_heads),
        block_sizes=splash.BlockSizes(block_q=block, block_kv=block),
        attn_logits_soft_cap=spec.softcap,
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )
    if not skips:
        q, k, v = (jnp.einsum("BTNH->BNTH", x) for x in (q, k, v))
        attend = jax.vmap(kernel, in_axes=(0, 0, 0, 0, None))
        return jnp.einsum("BNTH->BTNH", attend(q, k, v, splash.SegmentIds(segments, segments), sinks))

    # For rows with different blocks, vmap would become a loop. Instead the kernel gets one row of S = B * T.
    info = kernel.fwd_mask_info
    runs, key_blocks = blocks_to_run(segments, info.block_mask[0] != 0, info.data_next[0], block)
    kernel.fwd_mask_info = info._replace(
        block_mask=runs.reshape(1, -1, runs.shape[2]).astype(jnp.int32),
        data_next=key_blocks.reshape(1, -1, runs.shape[2]),
        q_sequence=None if info.q_sequence is None else jnp.arange(num_rows * length, dtype=jnp.int32),
    )
    q, k, v = (jnp.einsum("SNH->NSH", x.reshape(-1, *x.shape[2:])) for x in (q, k, v))
    z = kernel(q, k, v, splash.SegmentIds(segments.reshape(-1), segments.reshape(-1)), sinks)
    return jnp.einsum("NSH->SNH", z).reshape(num_rows, length, num_heads, -1)


def blocks_to_run(
    segments: Int32[Array, "B T"], allowed: Bool[Array, "Q S"], key_blocks: Integer[Array, "Q S"], block: int
) -> tuple[Bool[Array, "B Q S"], Int32[Array, "B Q S"]]:
    """Which steps of the kernel run, and the block of keys that each step reads, counted over all rows.

    A row has Q = T / block blocks of queries. Step s of block q reads block `key_blocks[q, s]` of the row's keys. It
    runs if the mask allows it (`allowed`) and the queries' segments reach these keys (`reached_blocks`). A step that
    does not run gets the keys of the next one that does, so that the kernel fetches those early, and once.
    """
    num_rows, length = segments.shape
    key_blocks = key_blocks.astype(jnp.int32)
    reached = reached_blocks(segments, block)
    runs = allowed & jnp.take_along_axis(reached, key_blocks[None], axis=2)

    order = jnp.arange(runs.size)
    next_run = jax.lax.cummin(jnp.where(runs.reshape(-1), order, runs.size), reverse=True)  # the last step always runs
    row_starts = jnp.arange(num_rows)[:, None, None] * (length // block)
    return runs, (row_starts + key_blocks).reshape(-1)[next_run].reshape(runs.shape)


def reached_blocks(segments: Int32[Array, "B T"], block: int) -> Bool[Array, "B Q Q"]:
    """Whether the segment ranges of a block of queries (second axis) and a block of keys (third axis) overlap.

    If segments do not decrease along the row, as in packed rows, they overlap exactly if a query and a key share a
    segment. Each padding position counts as a separate segment, so that a block of padding reaches itself only.
    """
    num_rows, length = segments.shape
    numbers = jnp.where(segments == 0, length + jnp.arange(length), segments).reshape(num_rows, -1, block)
    first, last = numbers.min(axis=2), numbers.max(axis=2)  # [B, Q]
    return (first[:, None, :] <= last[:, :, None]) & (first[:, :, None] <= last[:, None, :])
