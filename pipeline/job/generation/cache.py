"""The cache on the devices: keys and values of earlier positions, and attention to them; inputs of
convolutions and states of DeltaNets.

A row's position p is always in slot p, so that its activations and tokens do not depend on other rows. Slots after a
row's position are masked, so attention never sees padding or an earlier completion.

Letters: B rows, T = 1 position, S slots, P prompt slots, N heads, K key-value heads, G = N / K, H head dim, W head dim
of values; for others, see `recurrent/recur.py`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int8, Int32

from pipeline.models.attention.spec import AttentionInputs, AttentionSpec
from pipeline.models.attention.xla import attend_visible, attend_xla
from pipeline.models.int8_weights import quantise
from pipeline.models.partition import Partition
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
    """`Attend` with keys and values rounded like in an int8 cache."""
    rounded = [Int8Slots.of(x) for x in (inputs.k, inputs.v)]
    k, v = ((slots.values * slots.scale[..., None]).astype(inputs.q.dtype) for slots in rounded)
    return attend_xla(inputs._replace(k=k, v=v), spec)


class CachedLayer:
    """One layer's `Attend` during one step. It writes the step's keys and values into `cache` at each row's position,
    and attends to all positions up to it."""

    def __init__(self, keys: Slots, values: Slots, positions: Int32[Array, " B"]) -> None:
        self.cache, self._positions = (keys, values), positions

    @jax.named_scope("cached")
    def __call__(self, inputs: AttentionInputs, spec: AttentionSpec) -> Float[Array, "B T N W"]:
        """`Attend` for one position per row, after updating the cache."""
        self.cache = tuple(
            self._put(cache, jnp.einsum("BTKH->BKTH", new))
            for cache, new in zip(self.cache, (inputs.k, inputs.v), strict=True)
        )
        return self.attend_again(inputs, spec)

    def attend_again(self, inputs: AttentionInputs, spec: AttentionSpec) -> Float[Array, "B T N W"]:
        """`Attend` for a later layer that uses this layer's keys and values."""
        keys, values = self.cache
        scales = None
        if isinstance(keys, Int8Slots):
            (keys, values), scales = zip(keys, values, strict=True)
        distances = self._positions[:, None] - jnp.arange(keys.shape[2])
        visible = distances >= 0
        if spec.window is not None:
            visible &= distances < spec.window
        if spec.chunk is not None:
            visible &= distances <= self._positions[:, None] % spec.chunk
        rows, _, num_heads, head_dim = inputs.q.shape
        groups = inputs.q.reshape(rows, inputs.k.shape[2], -1, 1, head_dim)
        z = attend_visible(groups, keys, values, visible[:, None], spec, inputs.sinks, scales)
        return z.reshape(rows, 1, num_heads, -1)

    def _put(self, slots: Slots, new: Float[Array, "B K T H"]) -> Slots:
        if not isinstance(slots, Int8Slots):
            return put_at(slots, new, self._positions, axis=1)
        return Int8Slots(*(put_at(old, x, self._positions, 1) for old, x in zip(slots, Int8Slots.of(new), strict=True)))


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


def put_at(slots: Array, new: Array, positions: Int32[Array, " B"], axis: int) -> Array:
    """Writes each row of `new` [B, ..., 1, ...] into `slots` [B, ..., S, ...] at its position along S, which is axis
    `axis` of a row. A row whose position is out of range is not written."""
    outer = slots.shape[: axis + 1]
    index = (*jnp.indices(outer, sparse=True), positions.reshape(-1, *[1] * axis))
    options = {"unique_indices": True, "indices_are_sorted": True, "mode": "drop"}
    return slots.at[index].set(jnp.squeeze(new, axis + 1), **options)
