"""Tokens that travel to the devices with their experts, inside `shard_map`.

The devices of a group divide a layer's experts. Each sorts its pairs of a token and an expert by expert, and sends each
pair's token to the device that has the expert, which returns the output. In a round, a device sends at most c tokens to
each other one; there are as many rounds as the largest number of tokens needs, so no token is dropped. (A ragged
all-to-all would need no padding, but the compiler refuses it for more than 16 chips of v5e, and has none for CPUs.)

Letters: R pairs of a token and one of its experts, D model dim, E experts, e of them on a device, g devices of a group,
c capacity.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

_MIN_CAPACITY = 128
_UNROLLED = 8  # receivers

Take = Callable[[Int32[Array, "..."]], Float[Array, "... D"]]
"""The tokens of pairs, which are sorted by expert."""


class Order(NamedTuple):
    """Where pairs are if they are sorted by expert. Arbitrary for places after theirs, and for pairs of no expert."""

    order: Int32[Array, " n"]  # the pair at each place
    inverse: Int32[Array, " n"]  # the place of each pair
    sizes: Int32[Array, " e"]  # the number of each expert's pairs


Compute = Callable[[Float[Array, "n D"], Order], Float[Array, "n D"]]
"""The outputs of tokens for their experts; undefined for those of no expert."""


def exchange_tokens(
    compute: Compute, take: Take, num_pairs: int, sizes: Int32[Array, " E"], axis: str, mesh_axes: tuple[str, ...]
) -> Float[Array, "R+c D"]:
    """The output of each pair's expert; undefined for pairs beyond `sizes`, the number of each expert's pairs, and in
    the last c rows, which are not cut off because that would copy the others.

    `axis` is the mesh axis of the group; `compute` is called with tokens for this device's experts.
    """
    group = jax.lax.axis_size(axis)
    ends = jnp.cumsum(jax.lax.all_to_all(sizes.reshape(group, -1), axis, 0, 0), axis=1)  # of each sender's pairs here
    sent = jnp.sum(sizes.reshape(group, -1), axis=1)
    starts = jnp.cumsum(sent) - sent
    capacity = min(num_pairs, max(_MIN_CAPACITY, -(-num_pairs // (2 * group))))
    last = jax.lax.pmax((jnp.max(sent) - 1) // capacity * capacity, mesh_axes)  # all devices run one program

    def swap(rows: Float[Array, "g c D"]) -> Float[Array, "g c D"]:
        return jax.lax.all_to_all(rows, axis, split_axis=0, concat_axis=0, tiled=True)

    def exchange(state: tuple[Array, Array]) -> tuple[Array, Array]:
        first, outputs = state
        slots = jnp.arange(capacity)
        received = swap(take(jnp.minimum((starts + first)[:, None] + slots, num_pairs - 1)))
        stops = jnp.clip(ends - first, 0, capacity)
        order = _received_order(jnp.pad(stops, ((0, 0), (1, 0))), capacity)
        returned = swap(compute(received.reshape(-1, received.shape[2]), order).reshape(received.shape))

        def keep(receiver: Int32[Array, ""], outputs: Float[Array, "R+c D"]) -> Float[Array, "R+c D"]:
            return jax.lax.dynamic_update_slice(outputs, returned[receiver], (starts[receiver] + first, 0))

        return first - capacity, jax.lax.fori_loop(0, group, keep, outputs, unroll=min(group, _UNROLLED))

    # From the last round to the first, each by receiver: empty slots overwrite what is written later, or the end.
    token = jax.eval_shape(take, jax.ShapeDtypeStruct((), jnp.int32))
    outputs = jax.lax.empty((num_pairs + capacity, *token.shape), token.dtype)
    return jax.lax.while_loop(lambda state: state[0] >= 0, exchange, (last, outputs))[1]


def _received_order(bounds: Int32[Array, "g e+1"], capacity: int) -> Order:
    """The order of a round's slots by expert, then by sender; `bounds` divide a sender's slots among the experts."""
    group = len(bounds)
    num_pairs = jnp.diff(bounds, axis=1)
    slots = (bounds[:, :-1] + capacity * jnp.arange(group)[:, None]).T.ravel()
    sizes = num_pairs.T.ravel()
    places = jnp.cumsum(sizes) - sizes

    def moved(sources: Int32[Array, " ge"], targets: Int32[Array, " ge"]) -> Int32[Array, " gc"]:
        offsets = jnp.arange(group * capacity)[:, None] - sources
        return jnp.sum(jnp.where((offsets >= 0) & (offsets < sizes), offsets + targets, 0), axis=1)

    return Order(moved(places, slots), moved(slots, places), jnp.sum(num_pairs, axis=0))


def by_expert(experts: Int32[Array, " n"], num_experts: int) -> Order:
    """The order of pairs by their expert. Those of expert `num_experts` come last and are not counted."""
    order = jnp.argsort(experts, stable=True)
    inverse = jnp.zeros_like(order).at[order].set(jnp.arange(len(order)), unique_indices=True)
    return Order(order, inverse, jnp.sum(experts[:, None] == jnp.arange(num_experts), axis=0, dtype=jnp.int32))
