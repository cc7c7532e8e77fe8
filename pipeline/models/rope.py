"""Rotary position embeddings. The table is made once per step, in float32, and shared by all layers."""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, Int32

from pipeline.models.architecture import (
    LayerKind,
    LongRope,
    ProportionalRope,
    Rope,
    RopeKind,
    RotaryPairs,
    ScaledRope,
    YarnRope,
)


class RopeTable(NamedTuple):
    """Cosine and sine of every position's angles; the axis of size 1 stands for the heads."""

    cos: Float32[Array, "B T 1 half"]
    sin: Float32[Array, "B T 1 half"]


def inverse_frequencies(rope: Rope, head_dim: int) -> Float32[np.ndarray, " half"]:
    """Radians per position of each pair of dimensions (transformers' `modeling_rope_utils`).

    Rounded where torch rounds: at position 100,000 one unit in the last place turns a vector by 0.01 radians.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    wavelengths = np.power(np.float64(rope.theta), exponents.astype(np.float64)).astype(np.float32)
    frequencies = np.float32(1.0) / wavelengths
    if rope.kind is RopeKind.linear:
        return frequencies / np.float32(rope.factor)
    if rope.kind is RopeKind.llama3:
        return _llama3(rope, frequencies)
    if isinstance(rope, YarnRope):
        return _yarn(rope, wavelengths, head_dim)
    if isinstance(rope, ProportionalRope):
        rotates = np.arange(len(frequencies)) < int(rope.rotating * head_dim // 2)
        return np.where(rotates, frequencies, np.float32(0)) / np.float32(rope.factor)
    if isinstance(rope, LongRope):
        return 1 / (np.array(rope.short_factors, np.float32) * wavelengths)
    return frequencies


def _llama3(rope: Rope, frequencies: Float32[np.ndarray, " half"]) -> Float32[np.ndarray, " half"]:
    """Long wavelengths are stretched by `factor`, short ones kept, those between interpolated (Llama 3.1)."""
    wavelengths = np.float32(2 * math.pi) / frequencies
    periods = rope.original_max_positions / wavelengths  # of the wave within the original context
    kept = (periods - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = np.clip(kept, 0.0, 1.0)
    return ((1 - kept) * frequencies / rope.factor + kept * frequencies).astype(np.float32)


def _yarn(rope: YarnRope, wavelengths: Float32[np.ndarray, " half"], head_dim: int) -> Float32[np.ndarray, " half"]:
    """As `_llama3`, but interpolated between pairs of dimensions, not between their wavelengths."""

    def pair(rotations: float) -> float:
        """The pair of dimensions that rotates so often within the original context."""
        wavelength = rope.original_max_positions / (rotations * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    first, last = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    length = last - first or 0.001
    stretched = np.clip((np.arange(head_dim // 2, dtype=np.float32) - first) / np.float32(length), 0, 1)
    kept = 1 - stretched
    return (1 / (np.float32(rope.factor) * wavelengths) * (1 - kept) + 1 / wavelengths * kept).astype(np.float32)


def rope_table(rope: Rope, head_dim: int, positions: Int32[Array, "B T"]) -> RopeTable:
    """The table for one batch's positions, which are not 0..T-1 in packed rows. `head_dim` counts the rotating
    dimensions."""
    angles = positions[:, :, None, None].astype(jnp.float32) * inverse_frequencies(rope, head_dim)
    table = RopeTable(jnp.cos(angles), jnp.sin(angles))
    if isinstance(rope, ScaledRope):
        table = RopeTable(table.cos * rope.attention_factor, table.sin * rope.attention_factor)
    return table


def choose_table(tables: tuple[RopeTable, RopeTable], kind: LayerKind) -> RopeTable:
    """The table of a global (first) or of a local layer. Where rotation is data, angles are 0 in a layer without."""
    global_table, local_table = tables
    if isinstance(kind.is_local, bool) or global_table is local_table:
        table = local_table if kind.is_local is True else global_table
    else:
        table = jax.tree.map(lambda a, b: jnp.where(kind.is_local, a, b), local_table, global_table)
    if kind.is_rotated is True:
        return table
    return RopeTable(jnp.where(kind.is_rotated, table.cos, 1.0), jnp.where(kind.is_rotated, table.sin, 0.0))


def apply_rope(x: Float[Array, "B T N H"], table: RopeTable) -> Float[Array, "B T N H"]:
    """Rotates (x[h], x[h + half]) by the position's angle, as HF checkpoints expect; the dimensions after them stay."""
    return jax.lax.platform_dependent(x, table, tpu=_rotate_by_product, default=_rotate)


def rotate_pairs(x: Float[Array, "B T N R"], table: RopeTable, pairs: RotaryPairs) -> Float[Array, "B T N R"]:
    """`apply_rope` to heads all of whose dimensions rotate, in other pairs."""
    if pairs is RotaryPairs.halves:
        return apply_rope(x, table)
    rotate = partial(_rotate_neighbours_by_product, pairs=pairs), partial(_rotate_neighbours, pairs=pairs)
    return jax.lax.platform_dependent(x, table, tpu=rotate[0], default=rotate[1])


def _rotate_neighbours(x: Float[Array, "B T N R"], table: RopeTable, pairs: RotaryPairs) -> Float[Array, "B T N R"]:
    x = x.reshape(*x.shape[:-1], -1, 2).swapaxes(-1, -2).reshape(x.shape)
    x = _rotate(x, table)
    return x.reshape(*x.shape[:-1], 2, -1).swapaxes(-1, -2).reshape(x.shape) if pairs is RotaryPairs.adjacent else x


def _rotate_neighbours_by_product(
    x: Float[Array, "B T N R"], table: RopeTable, pairs: RotaryPairs
) -> Float[Array, "B T N R"]:
    """The same for TPUs, as `_rotate_by_product`: it would transpose arrays whose last axis has two numbers.

    Compiled for v5e, with the projection of 16 heads of 192 for 8 rows of 1024: 893 -> 530 MB of memory traffic.
    """
    cos, sin = table.cos, table.sin
    order = np.arange(x.shape[-1]).reshape(-1, 2)  # of each pair
    axis, first, exchanged = -1, order, order[:, ::-1]
    if pairs is RotaryPairs.to_halves:
        axis, first, exchanged = -2, order.T, order.T[::-1]
    cos, sin = jnp.stack([cos, cos], axis), jnp.stack([-sin, sin], axis)
    cos, sin = (values.reshape(*values.shape[:-2], -1) for values in (cos, sin))

    def reordered(places: Int[np.ndarray, "..."]) -> Float32[Array, "B T N R"]:
        permutation = jnp.eye(x.shape[-1], dtype=x.dtype)[:, places.ravel()]
        return jnp.einsum("BTNR,RS->BTNS", x, permutation, precision="highest").astype(jnp.float32)

    unmoved = x.astype(jnp.float32) if pairs is RotaryPairs.adjacent else reordered(first)
    return (unmoved * cos + reordered(exchanged) * sin).astype(x.dtype)


def _rotate(x: Float[Array, "B T N H"], table: RopeTable) -> Float[Array, "B T N H"]:
    half = table.cos.shape[-1]
    first, second, rest = jnp.split(x, [half, 2 * half], axis=-1)
    first, second = first.astype(jnp.float32), second.astype(jnp.float32)
    rotated = [first * table.cos - second * table.sin, second * table.cos + first * table.sin]
    return jnp.concatenate([*(part.astype(x.dtype) for part in rotated), rest], axis=-1)


def _rotate_by_product(x: Float[Array, "B T N H"], table: RopeTable) -> Float[Array, "B T N H"]:
    """The same for TPUs, which pad and copy halves of 128 lanes: a permutation matrix exchanges them, exactly.

    Compiled for v5e, 16 rows of 1024 of Qwen2.5-0.5B's shape: 4.76 -> 3.78 ms a layer by XLA's estimate.
    """
    half = table.cos.shape[-1]
    cos, sin = jnp.concatenate([table.cos, table.cos], axis=-1), jnp.concatenate([-table.sin, table.sin], axis=-1)
    rotating, rest = jnp.split(x, [2 * half], axis=-1)
    permutation = jnp.roll(jnp.eye(2 * half, dtype=x.dtype), half, axis=1)
    exchanged = jnp.einsum("BTNR,RS->BTNS", rotating, permutation, precision="highest")
    rotated = rotating.astype(jnp.float32) * cos + exchanged.astype(jnp.float32) * sin
    return jnp.concatenate([rotated.astype(x.dtype), rest], axis=-1)
