"""Which blocks of keys in a row the segments of a block of queries reach."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32


def reached_blocks(segments: Int32[Array, "B T"], block: int) -> Bool[Array, "B Q Q"]:
    """Whether the segment ranges of a block of queries (second axis) and a block of keys (third axis) overlap. A row
    has Q = T / block blocks.

    If segments do not decrease along the row, as in packed rows, they overlap exactly if a query and a key share a
    segment. Each padding position counts as a separate segment, so that a block of padding reaches itself only.
    """
    num_rows, length = segments.shape
    numbers = jnp.where(segments == 0, length + jnp.arange(length), segments).reshape(num_rows, -1, block)
    first, last = numbers.min(axis=2), numbers.max(axis=2)  # [B, Q]
    return (first[:, None, :] <= last[:, :, None]) & (first[:, :, None] <= last[:, None, :])
