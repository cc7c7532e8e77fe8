"""Attention on a TPU: splash attention, the Pallas kernel that comes with JAX. It skips masked blocks.

In long rows it also skips blocks of keys that no query's segment reaches (`blocks_to_run`).
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int32, Integer

from pipeline.models.architecture import Architecture
from pipeline.models.attention.arithmetic import scaled
from pipeline.models.attention.sharding import attend_rows, undivided_heads
from pipeline.models.attention.spec import Attend, AttentionInputs, AttentionSpec

_LANES = 128  # the kernel's block sizes are multiples of this
_SKIPPING_LENGTH = 2048  # the shortest rows in which blocks are skipped
_PADDING = 1 << 30  # more than the number of any segment
_MAX_SCALAR_BYTES = 3 << 18  # out of 1 MiB of scalar memory, where the kernel keeps two numbers per step


def obstacle(arch: Architecture, mesh: Mesh, rows: int, length: int, dtype: str) -> str | None:
    """Why the model cannot use the kernel, as a clause for messages; None if it can."""
    multiple = 2 * mesh.shape["context"] * _LANES
    if mesh.shape["context"] > 1 and length % multiple:
        return f"it needs batch.length to be a multiple of {multiple}, and batch.length is {length}"
    return undivided_heads(arch, mesh)


def for_mesh(mesh: Mesh) -> Attend:
    """The kernel for rows on a mesh. If positions are divided, `attend_chunks` calls it on each device."""
    return partial(attend_splash, mesh=mesh) if mesh.shape["context"] == 1 else attend_chunk


def block_size(length: int, item_bytes: int, num_keys: int | None = None) -> int:
    """The number of queries and of keys per step of the kernel: the largest multiple of 128 up to 512 that divides the
    row.

    Up to 1,024 for 8,192 keys and more, where skipped steps would take as long as the others; not in float32, since
    heads of 256 would then not fit in a chip's vector memory.
    """
    largest = 1024 if (num_keys or length) >= 8192 and item_bytes == 2 else 512
    return max(size for size in range(_LANES, largest + 1, _LANES) if length % size == 0)


def skips_blocks(num_rows: int, length: int, block: int) -> bool:
    """Whether a chip's rows are long enough for `blocks_to_run` and its scalar memory is large enough."""
    return length >= _SKIPPING_LENGTH and _scalar_bytes(num_rows, length, length, block) <= _MAX_SCALAR_BYTES


def _scalar_bytes(num_rows: int, num_queries: int, num_keys: int, block: int) -> int:
    """The scalar memory for the kernel's steps."""
    return 2 * 4 * num_rows * (num_queries // block) * math.ceil(num_keys // block / _LANES) * _LANES


@jax.named_scope("splash")
def attend_splash(
    inputs: AttentionInputs, spec: AttentionSpec, *, mesh: Mesh, interpret: bool = False
) -> Float[Array, "B T N W"]:
    """`Attend` with rows divided along the mesh's `data` axis and heads along `tensor`.

    The kernel does not scale, so queries are scaled first, in float32. It needs a multiple of 128 positions, to which
    rows are padded. `interpret` runs it on a CPU, for tests.
    """

    def on_device(inputs: AttentionInputs, spec: AttentionSpec) -> Array:
        row_length = inputs.segments.shape[1]
        padding = -row_length % _LANES
        padded = (jnp.pad(x, [(0, 0), (0, padding), *[(0, 0)] * (x.ndim - 2)]) for x in inputs[:4])
        inputs = AttentionInputs(*padded, inputs.sinks)
        num_rows, length = inputs.segments.shape
        block = block_size(length, inputs.q.dtype.itemsize)
        z = attend_blocks(inputs, spec, block, skips_blocks(num_rows, length, block), interpret)
        return z[:, :row_length]

    return attend_rows(on_device, mesh, inputs._replace(q=scaled(inputs.q, spec.scale)), spec)


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

    q, k, v, segments, sinks = inputs[:5]
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


@jax.named_scope("splash")
def attend_chunk(inputs: AttentionInputs, spec: AttentionSpec, *, interpret: bool = False) -> Float[Array, "B T N W"]:
    """`Attend` on one device, for queries whose keys may begin earlier in the row. The blocks that run are not known
    before `inputs.start` and the segments are.

    Queries that have more blocks than the scalar memory has room for are computed in parts.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds, splash_attention_kernel
    from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

    (num_rows, length, num_heads, _), num_keys = inputs.q.shape, inputs.k.shape[1]
    block = chunk_block(length, num_keys, inputs.q.dtype.itemsize)
    num_queries = length // block
    num_parts = next(
        parts
        for parts in range(1, num_queries + 1)
        if num_queries % parts == 0
        and (parts == num_queries or _scalar_bytes(num_rows, length // parts, num_keys, block) <= _MAX_SCALAR_BYTES)
    )
    if num_parts > 1:
        size = length // num_parts
        parts = (inputs.part(slice(start, start + size)) for start in range(0, length, size))
        return jnp.concatenate([attend_chunk(part, spec, interpret=interpret) for part in parts], axis=1)
    runs, key_blocks = chunk_blocks(inputs.segments, inputs.segments_of_keys, inputs.start, spec, block)
    row_starts = num_keys * jnp.arange(num_rows, dtype=jnp.int32)[:, None]
    order = row_starts + inputs.start + jnp.arange(length, dtype=jnp.int32)
    kernel = splash_attention_kernel.SplashAttentionKernel(
        MaskInfo(
            data_next=key_blocks.reshape(1, -1, key_blocks.shape[2]),
            mask_next=None,
            block_mask=runs.reshape(1, -1, runs.shape[2]).astype(jnp.int32),
            partial_mask_blocks=None,
            q_sequence=order.reshape(-1) if spec.causal else None,
        ),
        None,
        None,
        block_sizes=splash_attention_kernel.BlockSizes(block_q=block, block_kv=block),
        is_mqa=False,
        save_residuals=False,
        mask_value=splash_attention_kernel.DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=spec.softcap,
        residual_checkpoint_name=None,
        mask_function=(lambda queries, keys: spec.masked(True, queries - keys)) if spec.causal else None,
        interpret=interpret,
    )
    q = scaled(inputs.q, spec.scale)
    q, k, v = (jnp.einsum("SNH->NSH", x.reshape(-1, *x.shape[2:])) for x in (q, inputs.k, inputs.v))
    segment_ids = SegmentIds(inputs.segments.reshape(-1), inputs.segments_of_keys.reshape(-1))
    z = kernel(q, k, v, segment_ids, inputs.sinks)
    return jnp.einsum("NSH->SNH", z).reshape(num_rows, length, num_heads, -1)


def chunk_block(length: int, num_keys: int, item_bytes: int) -> int:
    """The block size for a chunk of queries. It also divides the keys."""
    return math.gcd(block_size(length, item_bytes, num_keys), num_keys)


def chunk_blocks(
    segments: Int32[Array, "B T"],
    key_segments: Int32[Array, "B S"],
    offset: int | Int32[Array, ""],
    spec: AttentionSpec,
    block: int,
) -> tuple[Bool[Array, "B Q K"], Int32[Array, "B Q K"]]:
    """`blocks_to_run` for queries whose first is `offset` positions after the first key."""
    first_query, first_key = (block * jnp.arange(x.shape[1] // block) for x in (segments, key_segments))
    distances = (offset + first_query)[:, None] - first_key
    allowed = jnp.ones(distances.shape, bool)
    if spec.causal:
        allowed &= distances > -block
    if spec.window is not None:
        allowed &= distances - (block - 1) < spec.window
    reached = reached_blocks(segments, block, key_segments, offset)
    key_blocks = jnp.broadcast_to(jnp.arange(len(first_key), dtype=jnp.int32), allowed.shape)
    return _fetched_early(allowed & reached, key_blocks, len(first_key))


def blocks_to_run(
    segments: Int32[Array, "B T"], allowed: Bool[Array, "Q S"], key_blocks: Integer[Array, "Q S"], block: int
) -> tuple[Bool[Array, "B Q S"], Int32[Array, "B Q S"]]:
    """Which steps of the kernel run, and the block of keys that each step reads, counted over all rows.

    A row has Q = T / block blocks of queries. Step s of block q reads block `key_blocks[q, s]` of the row's keys. It
    runs if the mask allows it (`allowed`) and the queries' segments reach these keys (`reached_blocks`). A step that
    does not run gets the keys of the next one that does, so that the kernel fetches those early, and once.
    """
    key_blocks = key_blocks.astype(jnp.int32)
    reached = reached_blocks(segments, block)
    runs = allowed & jnp.take_along_axis(reached, key_blocks[None], axis=2)

    return _fetched_early(runs, key_blocks, segments.shape[1] // block)


def _fetched_early(
    runs: Bool[Array, "B Q S"], key_blocks: Int32[Array, "Q S"], row_blocks: int
) -> tuple[Bool[Array, "B Q S"], Int32[Array, "B Q S"]]:
    """The steps that run, and the block of keys that each step reads, of rows with `row_blocks` blocks of keys."""
    order = jnp.arange(runs.size)
    next_run = jax.lax.cummin(jnp.where(runs.reshape(-1), order, runs.size - 1), reverse=True)
    row_starts = jnp.arange(len(runs))[:, None, None] * row_blocks
    return runs, (row_starts + key_blocks).reshape(-1)[next_run].reshape(runs.shape)


def reached_blocks(
    segments: Int32[Array, "B T"],
    block: int,
    key_segments: Int32[Array, "B S"] | None = None,
    offset: int | Int32[Array, ""] = 0,
) -> Bool[Array, "B Q K"]:
    """Whether the segment ranges of a block of queries (second axis) and a block of keys (third axis) overlap. Without
    `key_segments`, the keys are at the queries' positions; else the first query is `offset` after the first key.

    If segments do not decrease along the row, as in packed rows, they overlap exactly if a query and a key share a
    segment. Each padding position counts as a separate segment, so that a block of padding reaches itself only.
    """

    def ranges(segments: Array, first: int | Array) -> tuple[Array, Array]:
        padding = _PADDING + first + jnp.arange(segments.shape[1])
        numbers = jnp.where(segments == 0, padding, segments).reshape(len(segments), -1, block)
        return numbers.min(axis=2), numbers.max(axis=2)

    first, last = ranges(segments, offset)
    first_key, last_key = ranges(segments if key_segments is None else key_segments, 0)
    return (first_key[:, None, :] <= last[:, :, None]) & (first[:, :, None] <= last_key[:, None, :])
