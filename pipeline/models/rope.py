"""Rotary position embeddings. Their tables are computed once per step, in float32, and shared by all layers."""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from pipeline.models.architecture import Rope, RopeKind, RotaryPairs


class RopeTable(NamedTuple):
    """Cosine and sine of every position's angles. The axis of size 1 broadcasts over heads."""

    cos: Float32[Array, "B T 1 half"]
    sin: Float32[Array, "B T 1 half"]


def inverse_frequencies(rope: Rope, head_dim: int, is_long: bool = False) -> Float32[np.ndarray, " half"]:
    """Radians per position of each pair of dimensions (transformers' `modeling_rope_utils`). is_long: in windows longer
    than the original context, which matters for LongRoPE only.

    Rounded where torch rounds: at position 100,000, one unit in the last place rotates a vector by 0.01 radians.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    wavelengths = np.power(np.float64(rope.theta), exponents.astype(np.float64)).astype(np.float32)
    frequencies = np.float32(1.0) / wavelengths
    match rope.kind:
        case RopeKind.linear:
            return frequencies / np.float32(rope.factor)
        case RopeKind.llama3:
            return _llama3(rope, frequencies)
        case RopeKind.yarn:
            return _yarn(rope, wavelengths, head_dim)
        case RopeKind.proportional:
            rotates = np.arange(len(frequencies)) < int(rope.rotating * head_dim // 2)
            return np.where(rotates, frequencies, np.float32(0)) / np.float32(rope.factor)
        case RopeKind.longrope:
            factors = rope.long_factors if is_long else rope.short_factors
            return 1 / (np.array(factors, np.float32) * wavelengths)
    return frequencies


def _llama3(rope: Rope, frequencies: Float32[np.ndarray, " half"]) -> Float32[np.ndarray, " half"]:
    """Long wavelengths are multiplied by `factor`, short ones are kept, and those between are interpolated (Llama
    3.1)."""
    wavelengths = np.float32(2 * math.pi) / frequencies
    periods = rope.original_max_positions / wavelengths  # in the original context
    with np.errstate(divide="ignore"):  # Llama 4 Scout has equal factors, so nothing is interpolated
        kept = (periods - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = np.clip(kept, 0.0, 1.0)
    return ((1 - kept) * frequencies / rope.factor + kept * frequencies).astype(np.float32)


def _yarn(rope: Rope, wavelengths: Float32[np.ndarray, " half"], head_dim: int) -> Float32[np.ndarray, " half"]:
    """Like `_llama3`, but interpolates by the index of a pair of dimensions, not by its wavelength."""

    def pair(rotations: float) -> float:
        """The index of the pair of dimensions that makes `rotations` rotations in the original context."""
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


def rope_table(rope: Rope, head_dim: int, positions: Int32[Array, "B T"], segments: Int32[Array, "B T"]) -> RopeTable:
    """The table for one batch's positions, which are not 0..T-1 in packed rows. `head_dim` is the number of dimensions
    that rotate. segments: the windows, in which positions count from 0."""
    frequencies = inverse_frequencies(rope, head_dim)
    if rope.kind is RopeKind.longrope and positions.shape[1] > rope.original_max_positions:
        is_long = _in_long_windows(positions, segments, rope.original_max_positions)[:, :, None, None]
        frequencies = jnp.where(is_long, inverse_frequencies(rope, head_dim, is_long=True), frequencies)
    angles = positions[:, :, None, None].astype(jnp.float32) * frequencies
    return RopeTable(jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor)


def _in_long_windows(
    positions: Int32[Array, "B T"], segments: Int32[Array, "B T"], original: int
) -> Bool[Array, "B T"]:
    """Whether each token's window has more than `original` tokens. A row has few such windows, and each has one token
    at position `original`."""
    marked = jnp.where(positions == original, segments, 0)
    long_segments, _ = jax.lax.top_k(marked, positions.shape[1] // (original + 1))
    return jnp.any((segments[:, :, None] == long_segments[:, None, :]) & (long_segments > 0)[:, None, :], axis=2)


def apply_rope(x: Float[Array, "B T N H"], table: RopeTable) -> Float[Array, "B T N H"]:
    """Rotates (x[h], x[h + half]) by the position's angle, as HF checkpoints expect. Later dimensions do not rotate."""
    return jax.lax.platform_dependent(x, table, tpu=_rotate_by_product, default=_rotate)


def rotate_pairs(x: Float[Array, "B T N H"], table: RopeTable, pairs: RotaryPairs) -> Float[Array, "B T N H"]:
    """`apply_rope` with a choice of the pairs that rotate together."""
    if pairs is RotaryPairs.halves:
        return apply_rope(x, table)
    if x.shape[-1] > (rotary_dim := 2 * table.cos.shape[-1]):
        rotating, rest = jnp.split(x, [rotary_dim], axis=-1)
        return jnp.concatenate([rotate_pairs(rotating, table, pairs), rest], axis=-1)
    rotate = partial(_rotate_neighbours_by_product, pairs=pairs), partial(_rotate_neighbours, pairs=pairs)
    return jax.lax.platform_dependent(x, table, tpu=rotate[0], default=rotate[1])


def _rotate_neighbours(x: Float[Array, "B T N R"], table: RopeTable, pairs: RotaryPairs) -> Float[Array, "B T N R"]:
    x = x.reshape(*x.shape[:-1], -1, 2).swapaxes(-1, -2).reshape(x.shape)
    x = _rotate(x, table)
    return x.reshape(*x.shape[:-1], 2, -1).swapaxes(-1, -2).reshape(x.shape) if pairs is RotaryPairs.adjacent else x


def _rotate_neighbours_by_product(
    x: Float[Array, "B T N R"], table: RopeTable, pairs: RotaryPairs
) -> Float[Array, "B T N R"]:
    """`_rotate_neighbours` for TPUs, by permutation matrices: transposing arrays whose last axis has size 2 is slow.

    Compiled for v5e, with the projection of 16 heads of 192 for 8 rows of 1024: 893 -> 530 MB of memory traffic.
    """
    cos, sin = table.cos, table.sin
    order = np.arange(x.shape[-1]).reshape(-1, 2)
    axis, first, swapped = -1, order, order[:, ::-1]
    if pairs is RotaryPairs.to_halves:
        axis, first, swapped = -2, order.T, order.T[::-1]
    cos, sin = jnp.stack([cos, cos], axis), jnp.stack([-sin, sin], axis)
    cos, sin = (values.reshape(*values.shape[:-2], -1) for values in (cos, sin))

    def permute(indices: Int[np.ndarray, "..."]) -> Float32[Array, "B T N R"]:
        permutation = jnp.eye(x.shape[-1], dtype=x.dtype)[:, indices.ravel()]
        return jnp.einsum("BTNR,RS->BTNS", x, permutation, precision="highest").astype(jnp.float32)

    ordered = x.astype(jnp.float32) if pairs is RotaryPairs.adjacent else permute(first)
    return (ordered * cos + permute(swapped) * sin).astype(x.dtype)


def _rotate(x: Float[Array, "B T N H"], table: RopeTable) -> Float[Array, "B T N H"]:
    half = table.cos.shape[-1]
    first, second, rest = jnp.split(x, [half, 2 * half], axis=-1)
    first, second = first.astype(jnp.float32), second.astype(jnp.float32)
    rotated = [first * table.cos - second * table.sin, second * table.cos + first * table.sin]
    return jnp.concatenate([*(part.astype(x.dtype) for part in rotated), rest], axis=-1)


def _rotate_by_product(x: Float[Array, "B T N H"], table: RopeTable) -> Float[Array, "B T N H"]:
    """`_rotate` for TPUs, which would pad and copy halves of 128 lanes. A permutation matrix swaps the halves exactly.

    Compiled for v5e, 16 rows of 1024 with Qwen2.5-0.5B's shape: 4.76 -> 3.78 ms per layer by XLA's estimate.
    """
    half = table.cos.shape[-1]
    cos, sin = jnp.concatenate([table.cos, table.cos], axis=-1), jnp.concatenate([-table.sin, table.sin], axis=-1)
    rotating, rest = jnp.split(x, [2 * half], axis=-1)
    permutation = jnp.roll(jnp.eye(2 * half, dtype=x.dtype), half, axis=1)
    swapped = jnp.einsum("BTNR,RS->BTNS", rotating, permutation, precision="highest")
    rotated = rotating.astype(jnp.float32) * cos + swapped.astype(jnp.float32) * sin
    return jnp.concatenate([rotated.astype(x.dtype), rest], axis=-1)
