"""The cache on the devices: keys and values of earlier positions, and attention to them; inputs of
convolutions and states of DeltaNets.

Position p of a row is in slot p, or p modulo the number of slots in a local layer, which has only as many slots as its
window needs. So the row's activations and tokens do not depend on other rows. Slots without a position that a query may
attend to are masked, so attention never sees padding or an earlier completion. Latent attention caches latents.

Letters: B rows, T positions of a step, S slots, P prompt slots, N heads, K key-value heads, G = N / K, Q = G * T,
H head dim, W head dim of values; for others, see `recurrent/recur.py`.
"""

from functools import partial, reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int8, Int32

from pipeline.models.architecture import LocalAttention
from pipeline.models.attention.spec import Attend, AttentionInputs, AttentionSpec
from pipeline.models.attention.xla import SoftmaxSums, attend_xla, products, softmax_sums, sums_of_sinks
from pipeline.models.partition import Partition
from pipeline.models.quantised_weights import quantise
from pipeline.models.recurrent.recur import Heads, Rule, convolution


class Int8Slots(NamedTuple):
    """Keys or values in int8."""

    values: Int8[Array, "B K S H"]
    scale: Float32[Array, "B K S"]

    @classmethod
    def of(cls, x: Float[Array, "B K S H"]) -> "Int8Slots":
        return cls(*quantise(x, num_inputs=1))


Slots = Float[Array, "B K S H"] | Int8Slots


def attend_rounded(inputs: AttentionInputs, spec: AttentionSpec) -> Float[Array, "B T N W"]:
    """`Attend` with keys and values, or latents, rounded like in an int8 cache."""

    def rounded(x: Array) -> Array:
        slots = Int8Slots.of(x)
        return (slots.values * slots.scale[..., None]).astype(x.dtype)

    if (latent := inputs.latent) is None:
        k, v = rounded(inputs.k), rounded(inputs.v)
    else:
        latent = latent._replace(values=rounded(latent.values), rotary=rounded(latent.rotary))
        k, v = latent.expanded(inputs.k.shape[-1])
    return attend_xla(inputs._replace(k=k, v=v), spec)


def _to_cache(inputs: AttentionInputs) -> tuple[Float[Array, "B K T H"], Float[Array, "B K T W"]]:
    """What the cache keeps of these positions: keys and values, or latents and rotary keys as of a single head."""
    if inputs.latent is not None:
        return inputs.latent.values[:, None], inputs.latent.rotary[:, None]
    return jnp.einsum("BTKH->BKTH", inputs.k), jnp.einsum("BTKH->BKTH", inputs.v)


def _slot_positions(slots: Int32[Array, " s"], last: Int32[Array, " B"], num_slots: int) -> Int32[Array, "B s"]:
    """The position in each of these slots if a row has the positions up to `last`; negative if there is none."""
    offset = (last % num_slots)[:, None]
    return last[:, None] - offset + slots - jnp.where(slots > offset, num_slots, 0)


class PromptLayer:
    """One layer's `Attend` for prompts. It keeps what the cache needs."""

    def __init__(self, attend: Attend) -> None:
        self._attend = attend

    def __call__(self, inputs: AttentionInputs, spec: AttentionSpec) -> Float[Array, "B P N W"]:
        self._prompt = _to_cache(inputs)
        return self._attend(inputs, spec)

    def cache(self, lengths: Int32[Array, " B"], num_slots: int, is_int8: bool) -> tuple[Slots, Slots]:
        """The cache after prompts of `lengths`. Slots after the prompt are 0: a NaN from the row's previous completion
        would make sums NaN, even though it is masked."""

        def slots(x: Float[Array, "B K P H"]) -> Slots:
            unfilled = num_slots - x.shape[2]
            if unfilled >= 0:
                x = jnp.pad(x, ((0, 0), (0, 0), (0, unfilled), (0, 0)))
            else:
                positions = _slot_positions(jnp.arange(num_slots), lengths - 1, num_slots)[:, None, :, None]
                x = jnp.where(positions >= 0, jnp.take_along_axis(x, jnp.maximum(positions, 0), axis=2), 0)
            return Int8Slots.of(x) if is_int8 else x

        return tuple(map(slots, self._prompt))


class StepSlots(NamedTuple):
    """Which slots a decoding step writes and reads."""

    positions: Int32[Array, "B T"]
    num_filled: Int32[Array, ""]  # in the active row with most positions
    length: int  # of a row: later positions are not written
    block: int  # attention reads blocks of at least as many slots


class CachedLayer:
    """One layer's `Attend` during one step. It writes the step's keys and values into `cache` at each row's positions,
    and attends to all positions up to each query's, or those in its window or chunk."""

    def __init__(self, cache: tuple[Slots, Slots], step: StepSlots, local: LocalAttention | None) -> None:
        """local: None for a global layer."""
        self.cache, self._step, self._local = cache, step, local
        self._num_slots = jax.tree.leaves(cache)[0].shape[2]

    @jax.named_scope("cached")
    def __call__(self, inputs: AttentionInputs, spec: AttentionSpec) -> Float[Array, "B T N W"]:
        """`Attend` for the step's positions, after updating the cache."""
        new, positions = _to_cache(inputs), self._step.positions
        # Out of range: not written.
        slots = jnp.where(positions < self._step.length, positions % self._num_slots, self._num_slots + positions)
        self.cache = jax.tree.map(
            lambda old, x: put_at(old, x, slots, axis=1),
            self.cache,
            tuple(map(Int8Slots.of, new)) if isinstance(self.cache[0], Int8Slots) else new,
        )
        return self.attend_again(inputs, spec)

    def attend_again(self, inputs: AttentionInputs, spec: AttentionSpec) -> Float[Array, "B T N W"]:
        """`Attend` for a later layer that uses this layer's keys and values."""
        (rows, length, num_heads, _), latent = inputs.q.shape, inputs.latent
        num_kv_heads = jax.tree.leaves(self.cache)[0].shape[1]

        def by_kv_head(q: Float[Array, "B T N H"]) -> Float[Array, "B K Q H"]:
            groups = q.reshape(rows, length, num_kv_heads, -1, q.shape[-1])
            return jnp.einsum("BTKGH->BKGTH", groups).reshape(rows, num_kv_heads, -1, q.shape[-1])

        before = None if inputs.sinks is None else sums_of_sinks(inputs.sinks, num_kv_heads, length)
        if latent is None:
            queries, cached = (by_kv_head(inputs.q),), self.cache
        else:
            queries, cached = tuple(map(by_kv_head, latent.absorb(inputs.q))), (*self.cache, self.cache[0])
        z = self._mean(queries, cached, spec, before)
        z = jnp.einsum("BKGTH->BTKGH", z.reshape(rows, num_kv_heads, -1, length, z.shape[-1]))
        z = z.reshape(rows, length, num_heads, -1)
        return z if latent is None else latent.outputs(z, inputs.v.shape[-1])

    def _mean(
        self,
        queries: tuple[Float[Array, "B K Q H"], ...],
        cached: tuple[Slots, ...],
        spec: AttentionSpec,
        before: SoftmaxSums | None,
    ) -> Float[Array, "B K Q W"]:
        """The mean of the values, which are `cached` last, weighted by the queries' products with the other arrays.

        It reads blocks of slots up to the last one that a row has filled. Masked slots add exactly 0, so the number of
        blocks, which depends on all rows, does not change a row's result.
        """
        size, dtype = self._num_slots, queries[0].dtype
        block = -(-size // max(1, size // self._step.block))

        def sums(number: Int32[Array, ""] | int, before: SoftmaxSums | None) -> SoftmaxSums:
            start = jnp.minimum(number * block, size - block)
            slots = start + jnp.arange(block)
            read = partial(jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=block, axis=2)
            *keys, values = jax.tree.map(read, cached)
            values, value_scale = values if isinstance(values, Int8Slots) else (values, None)
            scores = reduce(jnp.add, map(_products, queries, keys))
            visible = self._visible(slots) & (slots >= number * block)
            return softmax_sums(scores, values.astype(dtype), visible, spec, value_scale, before)

        if block == size:
            return sums(0, before).mean().astype(dtype)
        first = sums(0, before)
        num_blocks = (jnp.minimum(self._step.num_filled, size) + block - 1) // block
        return jax.lax.fori_loop(1, num_blocks, sums, first).mean().astype(dtype)

    def _visible(self, slots: Int32[Array, " s"]) -> Bool[Array, "B T s"]:
        """Whether the slots contain positions that each query attends to."""
        queries = self._step.positions[:, :, None]
        last = jnp.minimum(self._step.positions[:, -1], self._step.length - 1)
        positions = _slot_positions(slots, last, self._num_slots)[:, None]
        visible, distances = positions >= 0, queries - positions
        if self._local is None:
            return visible & (distances >= 0)
        limits = queries % self._local.window if self._local.chunked else self._local.window - 1
        return visible & (distances >= 0) & (distances <= limits)


def _products(q: Float[Array, "B K Q H"], slots: Slots) -> Float32[Array, "B K Q S"]:
    if isinstance(slots, Int8Slots):
        return products(q, slots.values) * slots.scale[:, :, None]
    return products(q, slots)


History = dict[str, Array]
"""The cache of a layer with a DeltaNet or a short convolution: the last inputs [B, c-1, *heads] of each convolution, by
its name, and a DeltaNet's `state` [B, J, O, k, v] in float32."""


class PromptHistory:
    """`Recur` for prompts. `cache` then contains what decoding continues from."""

    def __init__(self, lengths: Int32[Array, " B"]) -> None:
        self._lengths, self.cache = lengths, History()

    def convolve(self, name: str, x: Float[Array, "B P *heads"], taps: Array, segments: Array) -> Array:
        # The prompt's last positions; negative before it begins.
        positions = self._lengths[:, None] - jnp.arange(taps.shape[-1] - 1, 0, -1)
        positions = positions.reshape(*positions.shape, *[1] * (x.ndim - 2))
        last_inputs = jnp.take_along_axis(x, jnp.maximum(positions, 0), axis=1)
        self.cache[name] = jnp.where(positions >= 0, last_inputs, 0)
        return convolution(x, taps, segments)

    def outputs(self, rule: Rule, segments: Int32[Array, "B P"], heads: Heads, partition: Partition) -> Array:
        """The outputs of the value heads. Positions after the prompt do not change the state."""
        is_prompt = (segments > 0)[..., None, None]
        heads = heads._replace(
            write=jnp.where(is_prompt, heads.write, 0), log_decay=jnp.where(is_prompt, heads.log_decay, 0)
        )
        outputs, state = partition.by_rows_and_heads(rule.rows, jnp.ones_like(segments), heads)
        self.cache["state"] = state[:, 0]
        return outputs


class CachedHistory:
    """`Recur` for one decoding step. It continues from `cache`, and updates it for active rows."""

    def __init__(self, cache: History, is_active: Bool[Array, " B"]) -> None:
        self.cache, self._is_active = cache, is_active

    def convolve(self, name: str, x: Float[Array, "B 1 *heads"], taps: Array, segments: Array) -> Array:
        window = jnp.concatenate([self.cache[name], x], axis=1)
        self._update(**{name: window[:, 1:]})
        taps_by_position = jnp.moveaxis(taps[..., 0, :], -1, 0).astype(jnp.float32)
        return jnp.sum(window.astype(jnp.float32) * taps_by_position, axis=1, keepdims=True)

    def outputs(self, rule: Rule, segments: Array, heads: Heads, partition: Partition) -> Array:
        outputs, state = rule.step(self.cache["state"], heads)
        self._update(state=state)
        return outputs

    def _update(self, **new: Array) -> None:
        self.cache = self.cache | {name: self._select_active(values, self.cache[name]) for name, values in new.items()}

    def _select_active(self, new: Array, old: Array) -> Array:
        return jnp.where(self._is_active.reshape(-1, *[1] * (new.ndim - 1)), new, old)


def put_at(slots: Array, new: Array, positions: Int32[Array, "B T"], axis: int) -> Array:
    """Writes each row of `new` [B, ..., T, ...] into `slots` [B, ..., S, ...] at its positions along S, which is axis
    `axis` of a row. Positions differ, and those out of range are not written."""
    outer = slots.shape[: axis + 1]
    index = (
        *(each[..., None] for each in jnp.indices(outer, sparse=True)),
        jnp.expand_dims(positions, tuple(range(1, axis + 1))),
    )
    return slots.at[index].set(new, unique_indices=True, mode="drop")
