"""Attention on an NVIDIA GPU: FlashAttention (arXiv 2307.08691) for packed rows, as a Pallas kernel for Triton.

Segment, causal mask and window give each query one range of keys (`key_ranges`). The kernel visits only the blocks of
keys in the ranges of its block of queries, so scores are never in memory, and other documents cost nothing.
"""

import itertools
import math
import re
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int32

from pipeline.models.architecture import Architecture
from pipeline.models.attention.sharding import attend_rows, undivided_heads
from pipeline.models.attention.spec import Attend, AttentionInputs, AttentionSpec

_AMPERE = 8.0  # compute capability
_SMALLEST_DOT = 16  # Triton's products have axes of at least this size
_LOG2_E = math.log2(math.e)
_MASKED = float(jnp.finfo(jnp.float32).min) / 2  # half, so that differences are finite


class Tile(NamedTuple):
    """The queries and keys per step of a program of the kernel, its warps, and how many steps' keys are in flight."""

    queries: int
    keys: int
    warps: int
    stages: int


_TILES = {
    2: {
        256: Tile(128, 64, 4, 3),
        512: Tile(128, 64, 8, 2),
        640: Tile(128, 32, 8, 2),
        1024: Tile(64, 32, 4, 2),
        2048: Tile(64, 16, 8, 2),
    },
    4: {1024: Tile(64, 32, 8, 2), 2048: Tile(32, 16, 4, 2), 4096: Tile(16, 16, 4, 2)},
}
"""By the bytes of a number, and of a key and its value at most: the largest that fit in the 99 KiB of shared memory of
compute capabilities 8.6, 8.9 and 12.0, and in registers, as compiled for 8.9 and 9.0."""


def tile_for(key_dim: int, value_dim: int, item_bytes: int) -> Tile | None:
    """The tile for heads of these sizes; None if they are too large."""
    size = (key_dim + value_dim) * item_bytes
    return next((tile for limit, tile in _TILES[item_bytes].items() if size <= limit), None)


def runs_triton(device: jax.Device) -> bool:
    """Whether the device is a GPU of NVIDIA's for which JAX compiles kernels in Triton."""
    capability = str(getattr(device, "compute_capability", None))  # of AMD's GPUs, a name such as gfx90a
    is_new = re.fullmatch(r"[\d.]+", capability) is not None and float(capability) >= _AMPERE
    return is_new and _jax_has_triton()


def _jax_has_triton() -> bool:
    """Whether this version of JAX has Pallas's backend for Triton, which jax 0.12 calls deprecated."""
    return find_spec("jax.experimental.pallas.triton") is not None


def obstacle(arch: Architecture, mesh: Mesh, rows: int, length: int, dtype: str) -> str | None:
    """Why the model cannot use the kernel, as a clause for messages; None if it can."""
    device = mesh.devices.flat[0]
    if not _jax_has_triton():
        return f"jax {jax.__version__} lacks Pallas's backend for Triton; earlier versions (0.10 to 0.12) have it"
    if not runs_triton(device):
        return f"it needs compute capability {_AMPERE} (Ampere) or later, and the GPU has {device.compute_capability}"
    for sizes in arch.all_sizes:
        if tile_for(sizes.head_dim, sizes.value_dim, jnp.dtype(dtype).itemsize) is None:
            return f"it needs heads of at most 512, and its keys have {sizes.head_dim}, its values {sizes.value_dim}"
    return undivided_heads(arch, mesh)


def for_mesh(mesh: Mesh) -> Attend:
    """The kernel for rows on a mesh. If positions are divided, `attend_chunks` calls it on each device."""
    return partial(attend_rows, attend_flash, mesh) if mesh.shape["context"] == 1 else attend_flash


@jax.named_scope("flash")
def attend_flash(inputs: AttentionInputs, spec: AttentionSpec, interpret: bool = False) -> Float[Array, "B T N W"]:
    """`Attend` on one device. `interpret` runs the kernel on a CPU, for tests."""
    # Imported here, so that machines without a GPU do not import Pallas.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    q, k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, -x.shape[3] % _SMALLEST_DOT))) for x in inputs[:3])
    num_rows, length, num_heads, _ = q.shape
    cap = spec.softcap and spec.softcap * _LOG2_E
    in_base_2 = replace(spec, scale=spec.scale * _LOG2_E, softcap=cap)  # the softmax is of powers of 2
    group = num_heads // k.shape[2]
    tile = tile_for(k.shape[3], v.shape[3], k.dtype.itemsize)

    def heads_of(x: Array, group: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, x.shape[1], None, x.shape[3]), lambda _, head, row: (row, 0, head // group, 0))

    of_row = pl.BlockSpec((None, length), lambda _, head, row: (row, 0))
    out = jax.ShapeDtypeStruct((*q.shape[:3], v.shape[3]), v.dtype)
    z = pl.pallas_call(
        partial(_kernel, spec=in_base_2, tile=tile),
        grid=(pl.cdiv(length, tile.queries), num_heads, num_rows),
        in_specs=[
            *(heads_of(q, 1), heads_of(k, group), heads_of(v, group), of_row, of_row),
            None if inputs.sinks is None else pl.BlockSpec((None,), lambda _, head, row: (head,)),
        ],
        out_specs=heads_of(out, 1),
        out_shape=out,
        compiler_params=triton.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="flash_attention",
    )(q, k, v, *key_ranges(inputs, spec), inputs.sinks)
    return z[..., : inputs.v.shape[3]]


def key_ranges(inputs: AttentionInputs, spec: AttentionSpec) -> tuple[Int32[Array, "B T"], Int32[Array, "B T"]]:
    """The first key that each query attends to, and the one after the last. Padding attends to itself."""
    segments, num_queries = inputs.segments_of_keys, inputs.q.shape[1]
    keys, queries = jnp.arange(segments.shape[1]), inputs.start + jnp.arange(num_queries)
    begins, ends = (
        (jnp.diff(segments, axis=1, **end) != 0) | (segments == 0) for end in ({"prepend": -1}, {"append": -1})
    )
    first = jax.lax.cummax(jnp.where(begins, keys, 0), axis=1)
    stop = jax.lax.cummin(jnp.where(ends, keys + 1, len(keys)), axis=1, reverse=True)
    first, stop = (jax.lax.dynamic_slice_in_dim(x, inputs.start, num_queries, axis=1) for x in (first, stop))
    if spec.window is not None:
        first = jnp.maximum(first, queries - (spec.window - 1))
    return first, jnp.broadcast_to(queries + 1, first.shape) if spec.causal else stop


def _kernel(*refs, spec: AttentionSpec, tile: Tile) -> None:
    """One block of queries of one head. The references are q [T, H], k [S, H], v [S, W], first and stop [T], sink [] or
    None, and the output z [T, W]."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    q_ref, k_ref, v_ref, first_ref, stop_ref, sink_ref, z_ref = refs
    # The last queries have most keys under the causal mask: they begin first.
    start = (pl.num_programs(0) - 1 - pl.program_id(0)) * tile.queries
    queries = pl.ds(start, tile.queries)
    exists = start + jnp.arange(tile.queries) < q_ref.shape[0]
    first = triton.load(first_ref.at[queries], mask=exists, other=k_ref.shape[0])
    stop = triton.load(stop_ref.at[queries], mask=exists, other=0)
    q = [_load(q_ref, start, tile.queries, part) for part in _parts(q_ref.shape[1])]

    def step(block: Array, carry: tuple, masks: bool) -> tuple:
        highest, total, z = carry
        start = block * tile.keys
        k = [_load(k_ref, start, tile.keys, part) for part in _parts(k_ref.shape[1])]
        products = [triton.dot(*pair, trans_b=True) for pair in zip(q, k, strict=True)]
        scores = spec.capped(sum(products[1:], products[0]) * spec.scale)
        if masks:
            keys = start + jnp.arange(tile.keys)[None]
            scores = jnp.where((keys >= first[:, None]) & (keys < stop[:, None]), scores, _MASKED)
        previous, highest = highest, jnp.maximum(highest, jnp.max(scores, axis=1))
        weights, decay = jnp.exp2(scores - highest[:, None]), jnp.exp2(previous - highest)
        total = total * decay + jnp.sum(weights, axis=1)
        v = [_load(v_ref, start, tile.keys, part) for part in _parts(v_ref.shape[1])]
        weights = weights.astype(v_ref.dtype)
        return highest, total, [old * decay[:, None] + triton.dot(weights, new) for old, new in zip(z, v, strict=True)]

    highest = jnp.full(tile.queries, _MASKED if sink_ref is None else sink_ref[...] * _LOG2_E, jnp.float32)
    total = jnp.full(tile.queries, 0 if sink_ref is None else 1, jnp.float32)
    z = [jnp.zeros((tile.queries, size), jnp.float32) for _, size in _parts(v_ref.shape[1])]
    begin, end = jax.lax.div(jnp.min(first), tile.keys), pl.cdiv(jnp.max(stop), tile.keys)
    # Blocks that all queries see whole need no mask. The order of blocks does not matter, so these come first.
    whole = pl.cdiv(jnp.max(first), tile.keys)
    num_whole = jnp.maximum(jax.lax.div(jnp.min(stop), tile.keys) - whole, 0)
    carry = jax.lax.fori_loop(whole, whole + num_whole, partial(step, masks=False), (highest, total, z))

    def masked_step(number: Array, carry: tuple) -> tuple:
        return step(jnp.where(number < whole, number, number + num_whole), carry, masks=True)

    _, total, z = jax.lax.fori_loop(begin, end - num_whole, masked_step, carry)
    for part, values in zip(_parts(v_ref.shape[1]), z, strict=True):
        block, exists = _block(z_ref, start, tile.queries, part)
        triton.store(block, (values / total[:, None]).astype(z_ref.dtype), mask=exists)


def _parts(width: int) -> list[tuple[int, int]]:
    """Starts and sizes of the parts of a head of a multiple of 16: powers of two, as Triton needs."""
    powers = [1 << bit for bit in reversed(range(width.bit_length())) if width & 1 << bit]
    return list(zip(itertools.accumulate(powers, initial=0), powers, strict=False))


def _block(ref, start: Array, size: int, part: tuple[int, int]):
    """The reference to some rows and columns of `ref`, and which of these rows exist; None if all do."""
    from jax.experimental import pallas as pl

    exists = (start + jnp.arange(size) < ref.shape[0])[:, None] if ref.shape[0] % size else None
    return ref.at[pl.ds(start, size), pl.ds(*part)], exists


def _load(ref, start: Array, size: int, part: tuple[int, int]) -> Array:
    """Some rows and columns of `ref`, with zeros beyond its end."""
    from jax.experimental.pallas import triton

    block, exists = _block(ref, start, size, part)
    return triton.load(block, mask=exists, other=None if exists is None else 0)
