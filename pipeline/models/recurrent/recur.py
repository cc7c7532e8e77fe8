"""How positions get the history of their document: in whole rows, or from a cache while decoding.

Convolutions and states start over at each segment, so documents in a row do not see each other.

Letters: B rows, T positions, D model dim, J key heads, O value heads per key head, k and v dims of a key head and a
value head, c convolution taps.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pipeline.core.sites import Site
from pipeline.models.architecture import Architecture
from pipeline.models.layers import BlockWeights, norm_if_any, project
from pipeline.models.partition import Partition


class Heads(NamedTuple):
    """The inputs of a rule, in float32. Where `write` and `log_decay` are 0, a position leaves the state as it is."""

    q: Float32[Array, "B T J k"]
    k: Float32[Array, "B T J k"]
    v: Float32[Array, "B T J O v"]
    write: Float32[Array, "B T J O"]  # write strength (beta): 0 leaves the state, 1 replaces the value at the key
    log_decay: Float32[Array, "B T J O"]  # applied to the state before the position writes


class Rule(NamedTuple):
    """How a state changes from position to position, and what is read from it."""

    # segments [B, T], heads -> the outputs [B, T, J, O, v], and the states after the rows [B, 1, J, O, k, v]
    rows: Callable[[Int32[Array, "B T"], Heads], tuple[Array, Array]]
    # states [B, J, O, k, v], heads of one position -> its outputs [B, 1, J, O, v], and the states after it
    step: Callable[[Array, Heads], tuple[Array, Array]]


class Recur(Protocol):
    """How positions of a DeltaNet or convolution get their history: from the same row, or from a cache in decoding."""

    def convolve(
        self,
        name: str,
        x: Float[Array, "B T *heads"],
        taps: Float[Array, "*heads 1 c"],
        segments: Int32[Array, "B T"],
    ) -> Float32[Array, "B T *heads"]:
        """The causal convolution of each feature of x, within documents. `name` is unique in the layer."""

    def outputs(
        self, rule: Rule, segments: Int32[Array, "B T"], heads: Heads, partition: Partition
    ) -> Float32[Array, "B T J O v"]:
        """The outputs of the value heads."""


@dataclass(frozen=True)
class WholeRows:
    """`Recur` for rows of whole documents: no history precedes the row."""

    partition: Partition

    def convolve(self, name: str, x: Array, taps: Array, segments: Array) -> Array:
        return self.partition.with_earlier(convolution, taps.shape[-1] - 1, x, taps, segments)

    def outputs(self, rule: Rule, segments: Array, heads: Heads, partition: Partition) -> Array:
        return partition.by_rows_and_heads(lambda *inputs: rule.rows(*inputs)[0], segments, heads)


@jax.named_scope("short_conv")
def conv_block(
    x: Float[Array, "B T D"],
    attention: BlockWeights,
    weights: BlockWeights,
    arch: Architecture,
    segments: Int32[Array, "B T"],
    recur: Recur,
) -> dict[Site, Array]:
    """The sites of a gated short convolution (transformers' `Lfm2ShortConv`) on the residual stream x. `attention`
    contains the norm before it."""
    x = norm_if_any(x, attention, "norm", arch)
    inputs = project(x, weights, "in_gate") * project(x, weights, "in")
    y = recur.convolve("in", inputs, weights["taps"], segments) + weights.get("taps_bias", 0)
    outputs = project(x, weights, "out_gate") * y.astype(x.dtype)
    return {Site.attn_in: x, Site.attn_out: project(outputs, weights, "o")}


def convolution(
    x: Float[Array, "B T *heads"], taps: Float[Array, "*heads 1 c"], segments: Int32[Array, "B T"]
) -> Float32[Array, "B T *heads"]:
    """The causal convolution of each feature over the positions of its document. The last tap multiplies the current
    position."""
    num_taps = taps.shape[-1]
    total = jnp.zeros(x.shape, jnp.float32)
    for offset in range(num_taps):
        is_same = segments == _shift(segments, offset)
        earlier = jnp.where(is_same.reshape(*segments.shape, *[1] * (x.ndim - 2)), _shift(x, offset), 0)
        total += earlier.astype(jnp.float32) * taps[..., 0, num_taps - 1 - offset].astype(jnp.float32)
    return total


def _shift(x: Array, offset: int) -> Array:
    """The values `offset` positions earlier; 0 before the row."""
    return jnp.pad(x[:, : x.shape[1] - offset], [(0, 0), (offset, 0), *[(0, 0)] * (x.ndim - 2)])
