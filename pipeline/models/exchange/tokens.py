"""Tokens that travel to the devices with their experts, inside `shard_map`.

The devices of a group divide a layer's experts. Each sorts its pairs of a token and an expert by expert, and sends each
pair's token to the device that has the expert, which returns the output. In a round, a device sends at most c tokens to
each other one; there are as many rounds as the largest number of tokens needs, so no token is dropped. (A ragged
all-to-all would need no padding, but the compiler refuses it for more than 16 chips of v5e, and has none for CPUs.)

Letters: R pairs of a token and one of its experts, D model dim, E experts, e of them on a device, g devices of a group,
c capacity. [g, g] has a row for each sender and a column for each receiver.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

_MIN_CAPACITY = 128

Take = Callable[[Int32[Array, "..."]], Float[Array, "... D"]]
"""The tokens of pairs, which are sorted by expert."""
Compute = Callable[[Float[Array, "n D"], Int32[Array, " e"]], Float[Array, "n D"]]
"""The outputs of tokens that are sorted by expert, and the number of each expert's tokens."""


def exchange_tokens(
    compute: Compute, take: Take, num_pairs: int, sizes: Int32[Array, " E"], axis: str, mesh_axes: tuple[str, ...]
) -> Float[Array, "R+c D"]:
    """The output of each pair's expert; undefined for pairs beyond `sizes`, the number of each expert's pairs, and in
    the last c rows, which are not cut off because that would copy the others.

    `axis` is the mesh axis of the group; `compute` is called with tokens for this device's experts.
    """
    group, device = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    counts = jax.lax.all_gather(sizes, axis).reshape(group, group, -1)
    pairs = jnp.sum(counts, axis=2)
    ends = jnp.cumsum(counts[:, device], axis=1)  # of each sender's pairs for this device's experts
    sent = pairs[device]
    starts = jnp.cumsum(sent) - sent
    capacity = min(num_pairs, max(_MIN_CAPACITY, -(-num_pairs // (2 * group))))
    rounds = jax.lax.pmax(-(-jnp.max(pairs) // capacity), mesh_axes)  # all devices run one program

    def swap(rows: Float[Array, "g c D"]) -> Float[Array, "g c D"]:
        return jax.lax.all_to_all(rows, axis, split_axis=0, concat_axis=0, tiled=True)

    def exchange(state: tuple[Array, Array]) -> tuple[Array, Array]:
        number, outputs = state
        first = number * capacity
        positions = first + jnp.arange(capacity)
        received = swap(take(jnp.minimum(starts[:, None] + positions, num_pairs - 1)))
        experts = jnp.sum(ends[:, None, :] <= positions[:, None], axis=2)  # e in empty slots
        order, inverse, sizes = by_expert(experts.ravel(), ends.shape[1])
        computed = compute(received.reshape(-1, received.shape[2])[order], sizes)
        returned = swap(computed[inverse].reshape(received.shape))

        def keep(receiver: Int32[Array, ""], outputs: Float[Array, "R+c D"]) -> Float[Array, "R+c D"]:
            start = starts[receiver] + first
            old = jax.lax.dynamic_slice_in_dim(outputs, start, capacity)
            new = jnp.where((positions < sent[receiver])[:, None], returned[receiver], old)
            return jax.lax.dynamic_update_slice_in_dim(outputs, new, start, axis=0)

        return number + 1, jax.lax.fori_loop(0, group, keep, outputs)

    token = jax.eval_shape(take, jax.ShapeDtypeStruct((), jnp.int32))
    outputs = jnp.zeros((num_pairs + capacity, *token.shape), token.dtype)
    return jax.lax.while_loop(lambda state: state[0] < rounds, exchange, (0, outputs))[1]


def by_expert(
    experts: Int32[Array, " n"], num_experts: int
) -> tuple[Int32[Array, " n"], Int32[Array, " n"], Int32[Array, " e"]]:
    """The order that sorts pairs by their expert, its inverse, and the number of each expert's pairs. Those of expert
    `num_experts` come last and are not counted."""
    order = jnp.argsort(experts, stable=True)
    inverse = jnp.zeros_like(order).at[order].set(jnp.arange(len(order)), unique_indices=True)
    return order, inverse, jnp.zeros(num_experts, jnp.int32).at[experts].add(1, mode="drop")
