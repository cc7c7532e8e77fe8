"""Attention in rows whose positions are divided along `context`.

Queries stay where they are, and the devices exchange keys, values and segments. Under a causal mask, a device's first
chunk needs only the first half of the row, so it need not wait for the second. With a window that is no longer than a
chunk, a chunk needs only the end of the one before.
"""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int32, PyTree

from pipeline.models.attention.spec import Attend, AttentionInputs, AttentionSpec
from pipeline.models.exchange.context import chunk_ends, chunk_numbers, gathered_halves, halves, joined

_BLOCK = 1024  # keys, at most, of a kernel's step

BY_HEADS = 1 << 16  # positions of the shortest rows whose key-value heads are gathered one by one

_Values = tuple[Float[Array, "B S K H"], Float[Array, "B S K W"]]
"""Keys and values."""

_Keys = tuple[Float[Array, "B S K H"], Float[Array, "B S K W"], Int32[Array, "B S"]]
"""Keys, values and segments."""


def attend_chunks(
    attend: Attend, mesh: Mesh, inputs: AttentionInputs, spec: AttentionSpec
) -> Float[Array, "B T N ..."]:
    """The result of `attend`, which each device calls with its own queries and heads."""
    heads, rows = PartitionSpec("data", "context", "tensor"), PartitionSpec("data", "context")
    divided = jax.shard_map(
        partial(_attend_on_device, attend, spec),
        mesh=mesh,
        in_specs=(heads, (heads, heads, rows), PartitionSpec("tensor")),
        out_specs=heads,
        check_vma=False,  # JAX does not track the axes over which a Pallas kernel's output varies
    )
    return divided(inputs.q, (inputs.k, inputs.v, inputs.segments), inputs.sinks)


def _attend_on_device(
    attend: Attend, spec: AttentionSpec, q: Float[Array, "B t N H"], keys: _Keys, sinks: Float[Array, " N"] | None
) -> Float[Array, "B t N ..."]:
    (k, v, segments), size = keys, q.shape[1] // 2

    def attend_to(
        queries: tuple[Array, Array], keys: _Keys, offset: int | Int32[Array, ""], sinks: Array | None
    ) -> Float[Array, "B chunk N ..."]:
        (q, segments), (k, v, key_segments) = queries, keys
        return attend(AttentionInputs(q, k, v, segments, sinks, key_segments, offset), spec)

    if spec.window is not None and (margin := _margin(spec.window, size)) <= size:
        reached = map(joined, chunk_ends(keys, margin), halves(keys))
        return joined(*map(partial(attend_to, sinks=sinks, offset=margin), halves((q, segments)), reached))

    key_segments, numbers = gathered_halves(segments), chunk_numbers()

    def attend_to_rows(q: Array, sinks: Array | None, gathered: tuple[_Values, _Values]) -> Float[Array, "B t N ..."]:
        beginning, end = ((*values, part) for values, part in zip(gathered, key_segments, strict=True))
        rows = joined(beginning, end)
        first, second = halves((q, segments))
        offsets = [number * size for number in numbers]
        keys_of_first = beginning if spec.causal else rows
        return joined(attend_to(first, keys_of_first, offsets[0], sinks), attend_to(second, rows, offsets[1], sinks))

    if 2 * size * jax.lax.axis_size("context") < BY_HEADS or k.shape[2] == 1:
        return attend_to_rows(q, sinks, gathered_halves((k, v)))
    return _head_by_head(attend_to_rows, q, sinks, (k, v))


def _head_by_head(
    attend: Callable[[Array, Array | None, tuple[_Values, _Values]], Array],
    q: Float[Array, "B t N H"],
    sinks: Float[Array, " N"] | None,
    values: _Values,
) -> Float[Array, "B t N ..."]:
    """Each key-value head with its queries, so that only two heads' keys and values are gathered at a time: the next
    ones while attention to the last is computed."""
    num_heads = values[0].shape[2]
    by_head = jax.tree.map(lambda x: jnp.moveaxis(x[:, :, :, None], 2, 0), values)
    q = jnp.moveaxis(q.reshape(*q.shape[:2], num_heads, -1, q.shape[3]), 2, 0)
    queries = q, None if sinks is None else sinks.reshape(num_heads, -1)

    def at(x: PyTree, index: int | slice) -> PyTree:
        return jax.tree.map(lambda x: x[index], x)

    def compute(gathered: PyTree, inputs: tuple[PyTree, PyTree]) -> tuple[PyTree, Array]:
        queries, following = inputs
        return gathered_halves(following), attend(*queries, gathered)

    first = gathered_halves(at(by_head, 0))
    last, z = jax.lax.scan(compute, first, (at(queries, slice(0, -1)), at(by_head, slice(1, None))))
    z = jnp.concatenate([z, attend(*at(queries, -1), last)[None]])
    z = jnp.moveaxis(z, 0, 2)
    return z.reshape(*z.shape[:2], -1, *z.shape[4:])


def _margin(window: int, size: int) -> int:
    """How many keys before a chunk of `size` its queries get: those of the window, rounded up to a kernel's blocks."""
    unit = math.gcd(size, _BLOCK)
    return -(-(window - 1) // unit) * unit
