"""Which blocks of a row's keys the segments of a block of queries reach."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32


def reached_blocks(segments: Int32[Array, "B T"], block: int) -> Bool[Array, "B Q Q"]:
    """Of the row's Q = T / block blocks of queries (second axis) and of keys (third): whether their ranges of segments
    overlap.

    They do if a query and a key are of one segment, and not otherwise where segments do not decrease along the row, as
    in packed ones. A padding position counts as a segment of its own, so that a block of padding reaches itself only.
    """
    num_rows, length = segments.shape
    numbers = jnp.where(segments == 0, length + jnp.arange(length), segments).reshape(num_rows, -1, block)
    first, last = numbers.min(axis=2), numbers.max(axis=2)  # [B, Q]
    return (first[:, None, :] <= last[:, :, None]) & (first[:, :, None] <= last[:, None, :])
