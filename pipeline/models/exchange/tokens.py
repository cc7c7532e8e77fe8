"""Tokens that travel to the devices with their experts, inside `shard_map`.

The devices of a group divide a layer's experts. Each sorts its pairs of a token and an expert by expert, and sends each
pair's token to the device that has the expert, which returns the output. In a round, a device sends at most c tokens to
each other one; there are as many rounds as the largest number of tokens needs, so no token is dropped. (A ragged
all-to-all would need no padding, but the compiler refuses it for more than 16 chips of v5e, and has none for CPUs.)

Letters: S tokens, R pairs of a token and one of its experts, the first R / S pairs of the first token, D model dim,
E experts, e of them on a device, g devices of a group, c capacity.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

_MIN_CAPACITY = 128
_UNROLLED = 8  # receivers


class Order(NamedTuple):
    """Where pairs are if they are sorted by expert. Arbitrary for places after theirs, and for pairs of no expert."""

    order: Int32[Array, " n"]  # the pair at each place
    inverse: Int32[Array, " n"]  # the place of each pair
    ends: Int32[Array, " e"]  # the place after each expert's pairs

    def tokens(self, places: Int32[Array, "..."] | slice, num_tokens: int) -> Int32[Array, "..."]:
        """The numbers of the tokens at some places."""
        return self.order[places] // (len(self.order) // num_tokens)


Compute = Callable[[Float[Array, "S D"], Order], Float[Array, "R D"]]
"""The outputs of pairs; undefined for those of no expert."""


def exchange_tokens(
    compute: Compute, x: Float[Array, "S D"], order: Order, axis: str, mesh_axes: tuple[str, ...], on_gpus: bool
) -> Float[Array, "R D"]:
    """The output of each pair's expert; undefined for pairs of no expert.

    `axis` is the mesh axis of the group; `compute` is called with tokens for this device's experts. If all devices
    receive as many pairs, there are 2 rounds, on GPUs 4: TPUs multiply few rows per expert less well.
    """
    group, num_pairs = jax.lax.axis_size(axis), len(order.order)
    ends = order.ends.reshape(group, -1)
    starts = jnp.pad(ends[:-1, -1:], ((1, 0), (0, 0)))
    bounds = jnp.pad(ends - starts, ((0, 0), (1, 0)))  # of the pairs for a device, divided among its experts
    received_bounds, sent = jax.lax.all_to_all(bounds, axis, 0, 0), starts + bounds
    capacity = min(num_pairs, max(_MIN_CAPACITY, -(-num_pairs // ((4 if on_gpus else 2) * group))))

    def swap(rows: Float[Array, "g c D"]) -> Float[Array, "g c D"]:
        return jax.lax.all_to_all(rows, axis, split_axis=0, concat_axis=0, tiled=True)

    def exchange(state: tuple[Array, Array]) -> tuple[Array, Array]:
        left, outputs = state
        first = (left - 1) // capacity * capacity
        places = sent[:, :1] + first + jnp.arange(capacity)
        received = swap(x[order.tokens(jnp.minimum(places, num_pairs - 1), len(x))])
        received_order = _received_order(received_bounds - first, capacity)
        returned = swap(compute(received.reshape(-1, x.shape[1]), received_order).reshape(received.shape))
        if on_gpus:  # one kernel, and no need of the inverse
            pairs = jnp.where(places < sent[:, -1:], order.order[places], num_pairs)
            return first, outputs.at[pairs].set(returned, mode="drop", unique_indices=True)
        return first, _write_in_turn(outputs, returned, jnp.minimum(places[:, 0], sent[:, -1]))

    # From the last round to the first: empty slots of windows overwrite what is written later, or the end.
    outputs = jax.lax.empty((num_pairs if on_gpus else num_pairs + capacity, x.shape[1]), x.dtype)
    left = jax.lax.pmax(jnp.max(bounds), mesh_axes)  # all devices run one program
    outputs = jax.lax.while_loop(lambda state: state[0] > 0, exchange, (left, outputs))[1]
    return outputs if on_gpus else outputs[order.inverse]


def _write_in_turn(
    outputs: Float[Array, "R D"], windows: Float[Array, "g c D"], places: Int32[Array, " g"]
) -> Float[Array, "R D"]:
    """Writes windows to their places, one after the other: TPUs would read what they overwrite at once, and so move
    1.5 times the bytes."""

    def write(number: Int32[Array, ""], outputs: Float[Array, "R D"]) -> Float[Array, "R D"]:
        return jax.lax.dynamic_update_slice(outputs, windows[number], (places[number], 0))

    return jax.lax.fori_loop(0, len(windows), write, outputs, unroll=min(len(windows), _UNROLLED))


def _received_order(bounds: Int32[Array, "g e+1"], capacity: int) -> Order:
    """The order of a round's slots by expert, then by sender; `bounds` divide a sender's pairs among the experts, and
    those from 0 to `capacity` have slots."""
    senders = jnp.arange(len(bounds))[:, None]
    starts, ends = (jnp.clip(part, 0, capacity) for part in (bounds[:, :-1], bounds[:, 1:]))
    slots = starts + capacity * senders
    # Before a sender's pairs of an expert: lower experts' of all senders, and the same expert's of lower senders.
    is_lower = senders < jnp.arange(len(bounds) + 1)[:, None, None]
    places = jnp.sum(jnp.where(is_lower, ends, starts), axis=1)
    places, ends_of_experts = places[:-1], places[-1]  # where one more sender's pairs would be

    def moved(sources: Int32[Array, "g e"], targets: Int32[Array, "g e"]) -> Int32[Array, " gc"]:
        offsets = jnp.arange(len(bounds) * capacity)[:, None] - sources.ravel()
        is_moved = (offsets >= 0) & (offsets < (ends - starts).ravel())
        return jnp.sum(jnp.where(is_moved, offsets + targets.ravel(), 0), axis=1)

    return Order(moved(places, slots), moved(slots, places), ends_of_experts)


def by_expert(experts: Int32[Array, " n"], num_experts: int) -> Order:
    """The order of pairs by their expert. Those of expert `num_experts` come last."""
    order = jnp.argsort(experts, stable=True)
    inverse = jax.lax.empty(order.shape, order.dtype).at[order].set(jnp.arange(len(order)), unique_indices=True)
    return Order(order, inverse, jnp.sum(experts[:, None] <= jnp.arange(num_experts), axis=0, dtype=jnp.int32))
