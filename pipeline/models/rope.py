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


def rotate_pairs(
    x: Float[Array, "B T N H"], table: RopeTable, pairs: RotaryPairs = RotaryPairs.halves
) -> Float[Array, "B T N H"]:
    """Rotates pairs of dimensions by the position's angle. Later dimensions do not rotate."""
    rotating, rest = jnp.split(x, [2 * table.cos.shape[-1]], axis=-1)
    rotate = partial(_rotate_by_product, pairs=pairs), partial(_rotate, pairs=pairs)
    rotated = jax.lax.platform_dependent(rotating, table, tpu=rotate[0], default=rotate[1])
    return jnp.concatenate([rotated, rest], axis=-1) if rest.shape[-1] else rotated


def _rotate(x: Float[Array, "B T N R"], table: RopeTable, pairs: RotaryPairs) -> Float[Array, "B T N R"]:
    if pairs is not RotaryPairs.halves:
        x = x.reshape(*x.shape[:-1], -1, 2).swapaxes(-1, -2).reshape(x.shape)
    first, second = (part.astype(jnp.float32) for part in jnp.split(x, 2, axis=-1))
    rotated = [first * table.cos - second * table.sin, second * table.cos + first * table.sin]
    rotated = jnp.concatenate([part.astype(x.dtype) for part in rotated], axis=-1)
    if pairs is RotaryPairs.adjacent:
        return rotated.reshape(*x.shape[:-1], 2, -1).swapaxes(-1, -2).reshape(x.shape)
    return rotated


def _rotate_by_product(x: Float[Array, "B T N R"], table: RopeTable, pairs: RotaryPairs) -> Float[Array, "B T N R"]:
    """`_rotate` for TPUs, by permutation matrices, which are exact. A TPU would pad and copy halves of 128 lanes, and
    is slow to transpose arrays whose last axis has size 2.

    Compiled for v5e: 16 rows of 1024 with Qwen2.5-0.5B's shape, 4.76 -> 3.78 ms per layer by XLA's estimate; adjacent
    dimensions with the projection of 16 heads of 192 for 8 rows of 1024, 893 -> 530 MB of memory traffic.
    """
    dims, axis = np.arange(x.shape[-1]), -1 if pairs is RotaryPairs.adjacent else -2
    order = dims.reshape(2, -1) if pairs is RotaryPairs.halves else dims.reshape(-1, 2).T  # of x, [2, half]
    cos, sin = jnp.stack([table.cos] * 2, axis), jnp.stack([-table.sin, table.sin], axis)
    cos, sin = (values.reshape(*values.shape[:-2], -1) for values in (cos, sin))

    def permute(indices: Int[np.ndarray, "2 half"]) -> Float32[Array, "B T N R"]:
        indices = indices.T.ravel() if pairs is RotaryPairs.adjacent else indices.ravel()
        if np.array_equal(indices, dims):
            return x.astype(jnp.float32)
        permutation = jnp.eye(x.shape[-1], dtype=x.dtype)[:, indices]
        return jnp.einsum("BTNR,RS->BTNS", x, permutation, precision="highest").astype(jnp.float32)

    return (permute(order) * cos + permute(order[::-1]) * sin).astype(x.dtype)
