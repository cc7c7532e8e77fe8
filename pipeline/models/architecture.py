"""The description of a transformer, which a family's reader makes from config.json.

Shape letters, here and in every file of this package:

    B rows, T positions, S positions as keys, D model dim, N heads, K key-value heads, G = N / K, H head dim,
    F MLP dim, V vocabulary, P learned positions, Y token types, C = 3 for q, k and v in one tensor, L layers of a
    stack, E experts, A experts of a token, M MLP dim of an expert, U MLP dim of the shared expert; W head dim of
    values (H, but in latent attention), and of latent attention Q rank of queries, Z rank of keys and values, R
    rotating dims of a head, X = H - R + W; of DeltaNet J key heads, O value heads of each, k and v dims of a key and of
    a value head, c taps of the convolutions; p dims of a token's vector for a layer
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from jaxtyping import Array, Bool

DELTA_CHUNK = 64  # positions of a row that a DeltaNet computes at once


class Axis(StrEnum):
    """The logical axes of weights; the values are their shape letters."""

    vocab = "V"
    d_model = "D"
    heads = "N"
    kv_heads = "K"
    head_dim = "H"
    value_dim = "W"
    q_rank = "Q"
    kv_rank = "Z"
    rotary = "R"
    key_value = "X"
    d_mlp = "F"
    positions = "P"
    token_types = "Y"
    qkv = "C"
    experts = "E"
    d_expert = "M"
    d_shared = "U"
    delta_heads = "J"
    delta_values = "O"
    delta_key_dim = "k"
    delta_value_dim = "v"
    delta_taps = "c"
    layers = "L"
    layer_input = "p"
    one = "I"


class RopeKind(StrEnum):
    """How rotary frequencies are stretched for longer contexts; the names are those of config.json."""

    default = "default"
    linear = "linear"
    llama3 = "llama3"
    dynamic = "dynamic"
    yarn = "yarn"
    longrope = "longrope"
    proportional = "proportional"


@dataclass(frozen=True)
class Rope:
    """Rotary position embeddings (Su et al., arXiv 2104.09864), rotating the two halves of a head."""

    theta: float
    kind: RopeKind = RopeKind.default
    factor: float = 1.0  # of all others
    low_freq_factor: float = 1.0  # of llama3
    high_freq_factor: float = 1.0  # of llama3
    original_max_positions: int = 0  # of llama3, yarn and longrope


@dataclass(frozen=True)
class ScaledRope(Rope):
    """One that makes queries and keys longer. The classes below have fields that would change others' identity."""

    attention_factor: float = 1.0  # of cosines and sines


@dataclass(frozen=True)
class YarnRope(ScaledRope):
    """YaRN (Peng et al., arXiv 2309.00071)."""

    beta_fast: float = 32.0  # pairs of dimensions with more rotations in the original context are not stretched
    beta_slow: float = 1.0  # those with fewer are stretched by `factor`
    truncate: bool = True  # the pairs between which frequencies are interpolated have whole numbers


@dataclass(frozen=True)
class LongRope(ScaledRope):
    """LongRoPE (Ding et al., arXiv 2402.13753) in rows within the original context.

    Longer documents have other factors, at their first positions, too: an activation would depend on what follows it.
    """

    short_factors: tuple[float, ...] = ()  # which stretch each pair of dimensions


@dataclass(frozen=True)
class ProportionalRope(Rope):
    """One whose slowest pairs of dimensions do not rotate. Frequencies are those of a head that rotates as a whole."""

    rotating: float = 1.0  # share of the pairs


class Norm(StrEnum):
    """How a norm scales its normalised input. `rms` and `rms_wide` differ in bfloat16 only."""

    rms = "rms"  # by its weight, in the activations' dtype
    rms_wide = "rms_wide"  # by its weight, in float32
    rms_plus_one = "rms_plus_one"  # by 1 + its weight, in float32
    layer = "layer"  # LayerNorm: around the mean, by its weight, plus its bias, in float32


class Activation(StrEnum):
    """The MLP's nonlinearity."""

    silu = "silu"
    gelu = "gelu"
    gelu_tanh = "gelu_tanh"
    relu = "relu"


@dataclass(frozen=True)
class LocalAttention:
    """Layers whose positions attend to the latest `window` positions only, their own included."""

    pattern: str  # a letter per layer: L local, G global
    window: int
    rope: Rope | None  # of the local layers


class RotaryPairs(StrEnum):
    """Which dimensions rotate together, in the weights and in queries and keys."""

    halves = "halves"  # h and h + half
    adjacent = "adjacent"  # 2h and 2h + 1
    to_halves = "to_halves"  # 2h and 2h + 1 in the weights, h and h + half in queries and keys


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434). The keys and values of all heads are projected from
    one normed vector of each position; only the last `rotary_dim` dimensions of a head rotate, and there all keys of a
    position are the same."""

    kv_rank: int  # of that vector
    q_rank: int | None  # of the one from which queries are projected; None: from the stream
    value_dim: int  # of a head
    pairs: RotaryPairs
    norm_eps: float = 1e-6  # of these vectors' norms


@dataclass(frozen=True)
class DeltaNet:
    """Layers with a gated DeltaNet (Yang et al., arXiv 2412.06464) in place of attention: each value head has a state
    of [key dim, value dim], which decays, and into which a position writes what its key does not return yet."""

    pattern: str  # a letter per layer: D DeltaNet, A attention
    num_heads: int  # of queries and keys
    values_per_key: int  # value heads of each of them
    key_dim: int  # of a head
    value_dim: int  # of a value head
    num_taps: int  # of the causal convolutions of queries, keys and values


@dataclass(frozen=True)
class GlobalHeads:
    """The heads of global layers, where those of local layers differ from them."""

    head_dim: int
    num_kv_heads: int
    keys_are_values: bool  # values are the projected keys, before these are normed and rotate


@dataclass(frozen=True)
class SharedKeys:
    """The last layers have no keys and values: they attend to those of the latest layer that has, and is local or
    global as they are."""

    num_layers: int
    d_mlp: int  # of their MLPs


class LayerBlocks(NamedTuple):
    """Which blocks a layer has. Layers that have the same have weights of the same shapes."""

    is_delta: bool  # a gated DeltaNet; else attention
    is_sparse: bool  # a mixture of experts; else one MLP
    has_both: bool = False  # an MLP beside the mixture
    has_global_heads: bool = False
    keys_are_values: bool = False
    keys_of: int | None = None  # the layer whose keys and values it attends to; None: it has its own


class LayerKind(NamedTuple):
    """What a layer does differently from others with weights of the same shapes. In a scan, what differs is data."""

    is_local: bool | Bool[Array, ""]
    is_rotated: bool | Bool[Array, ""]  # its queries and keys


@dataclass(frozen=True)
class Experts:
    """Sparse layers: a router chooses some of the experts for each token, and mixes what they return."""

    pattern: str  # a letter per layer: S sparse, D dense
    num_experts: int
    per_token: int
    d_expert: int
    sums_to_one: bool  # the weights of a token's experts; else they are their shares of the softmax over all experts
    d_shared: int = 0  # of the expert that every token has; 0: there is none
    rounds_weights: bool = True  # to the activations' dtype; else they stay float32


@dataclass(frozen=True)
class BoundedExperts(Experts):
    """Experts whose neurons are (up + 1) * gate * sigmoid(alpha * gate), with bounded gates and ups. Those with the
    largest logits are chosen, and the softmax is over them alone."""

    alpha: float = 1.702
    limit: float = 7.0  # of gate, and of up on both sides


@dataclass(frozen=True)
class GroupedExperts(Experts):
    """DeepSeek's: experts are divided into equal groups, and a token has experts of the groups that have the largest
    share, or sum of two scores. Logits are float32."""

    num_groups: int = 1
    groups_per_token: int = 1
    scaling: float = 1.0  # of the weights
    sigmoid: bool = False  # scores are sigmoids of the logits, and experts are chosen by their sum with a correction


@dataclass(frozen=True)
class ExpertsBesideMlp(Experts):
    """Gemma 4's: an MLP and experts read the same stream, each through norms of its own, and are added."""


@dataclass(frozen=True)
class Architecture:
    """A transformer. The defaults are those of a LLaMA; its weights determine which norms, biases and gates it has."""

    num_layers: int
    vocab_size: int
    max_positions: int
    d_model: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    d_mlp: int
    norm_eps: float
    rope: Rope | None
    norm: Norm = Norm.rms
    activation: Activation = Activation.silu
    causal: bool = True
    parallel: bool = False  # attention and MLP read the same residual stream
    gated: bool = True  # the MLP multiplies its activated gate by a linear projection
    rotary_dim: int | None = None  # dimensions of a head that rotate; None: all
    attention_scale: float | None = None  # of the scores; None: 1 / sqrt(head_dim)
    softcap: float | None = None  # of the scaled scores: softcap * tanh(scores / softcap)
    local: LocalAttention | None = None  # None: all layers are global
    sinks: bool = False  # each head has a score for a key without a value, which all its queries see
    embed_scale: float = 1.0
    num_token_types: int = 0
    experts: Experts | None = None  # None: all layers are dense
    rotation: str | None = None  # a letter per layer: R queries and keys rotate, N they do not; None: all by `rope`
    latent: LatentAttention | None = None
    num_ignored_layers: int = 0  # after the last: they predict further tokens, and are not read
    delta: DeltaNet | None = None  # None: all layers have attention
    global_heads: GlobalHeads | None = None  # None: all layers have the same
    shared_keys: SharedKeys | None = None  # None: all layers have keys and values
    norms_values: bool = False  # without a weight
    layer_inputs: int = 0  # dims of the vectors that a token has for each layer, which adds it; 0: there are none

    @property
    def value_dim(self) -> int:
        """Of a head's values, and of `attn_z`."""
        return self.latent.value_dim if self.latent else self.head_dim

    @property
    def max_row(self) -> int:
        """The positions that a row may have: no more than LongRoPE's original context."""
        return min([self.max_positions, *(rope.original_max_positions for rope in self.long_ropes)])

    @property
    def long_ropes(self) -> list[LongRope]:
        ropes = [self.rope, self.local.rope if self.local else None]
        return [rope for rope in ropes if isinstance(rope, LongRope)]

    def is_local(self, layer: int) -> bool:
        return self.local is not None and self.local.pattern[layer] == "L"

    def is_rotated(self, layer: int) -> bool:
        return self.rope is not None and (self.rotation is None or self.rotation[layer] == "R")

    def kind(self, layer: int) -> LayerKind:
        return LayerKind(self.is_local(layer), self.is_rotated(layer))

    def blocks(self, layer: int) -> LayerBlocks:
        is_delta = self.delta is not None and self.delta.pattern[layer] == "D"
        is_sparse = self.experts is not None and self.experts.pattern[layer] == "S"
        has_global_heads = self.global_heads is not None and not self.is_local(layer)
        return LayerBlocks(
            is_delta,
            is_sparse,
            has_both=is_sparse and isinstance(self.experts, ExpertsBesideMlp),
            has_global_heads=has_global_heads,
            keys_are_values=has_global_heads and self.global_heads.keys_are_values,
            keys_of=self.keys_of(layer),
        )

    def keys_of(self, layer: int) -> int | None:
        """The layer whose keys and values a layer attends to; None: it has its own."""
        first = self.num_layers - (self.shared_keys.num_layers if self.shared_keys else 0)
        if layer < first:
            return None
        return first - 1 if self.local is None else self.local.pattern.rindex(self.local.pattern[layer], 0, first)

    def with_sizes_of(self, layer: int) -> "Architecture":
        """One whose heads and MLP have the sizes of the layer's."""
        arch, blocks = self, self.blocks(layer)
        if blocks.has_global_heads:
            arch = replace(arch, head_dim=self.global_heads.head_dim, num_kv_heads=self.global_heads.num_kv_heads)
        return arch if blocks.keys_of is None else replace(arch, d_mlp=self.shared_keys.d_mlp)

    @property
    def all_sizes(self) -> "list[Architecture]":
        """`with_sizes_of` layers, of those that are alike one."""
        layers = {self.blocks(layer)._replace(is_sparse=False): layer for layer in range(self.num_layers)}
        return [self.with_sizes_of(layer) for layer in layers.values()]

    def axis_size(self, axis: Axis) -> int:
        experts = self.experts or Experts("", 0, 0, 0, False)
        latent = self.latent or LatentAttention(0, 0, 0, RotaryPairs.halves)
        delta = self.delta or DeltaNet("", 0, 0, 0, 0, 0)
        sizes = {
            Axis.vocab: self.vocab_size,
            Axis.d_model: self.d_model,
            Axis.heads: self.num_heads,
            Axis.kv_heads: self.num_kv_heads,
            Axis.head_dim: self.head_dim,
            Axis.value_dim: self.value_dim,
            Axis.q_rank: latent.q_rank or 0,
            Axis.kv_rank: latent.kv_rank,
            Axis.rotary: self.rotary_dim or 0,
            Axis.key_value: self.head_dim - (self.rotary_dim or 0) + self.value_dim,
            Axis.d_mlp: self.d_mlp,
            Axis.positions: self.max_positions,
            Axis.token_types: self.num_token_types,
            Axis.qkv: 3,
            Axis.experts: experts.num_experts,
            Axis.d_expert: experts.d_expert,
            Axis.d_shared: experts.d_shared,
            Axis.delta_heads: delta.num_heads,
            Axis.delta_values: delta.values_per_key,
            Axis.delta_key_dim: delta.key_dim,
            Axis.delta_value_dim: delta.value_dim,
            Axis.delta_taps: delta.num_taps,
            Axis.layers: self.num_layers,
            Axis.layer_input: self.layer_inputs,
            Axis.one: 1,
        }
        return sizes[axis]


@dataclass(frozen=True)
class Interleaved:
    """Weights that share a tensor: the first item of each one's first axis, then the second of each."""

    weights: tuple[str, ...]
    axes: str | None = None  # of the tensor without the other weights, grouped as in the file


TableEntry = str | list[str] | tuple[str | list[str], str] | Interleaved
KeyTable = dict[str, TableEntry]
"""HF key without its prefix -> our key, a name in `weight_specs.WEIGHTS`. `*` stands for the layer's number.

The tensor in the file has the axes of our weight, [outputs, inputs]: `weights["attention"]["q"]` is [N, H, D], and HF's
tensor [N * H, D]. Where a file has other axes, they follow our key, grouped as in the file: GPT-2's matrices are
[inputs, outputs], so `("mlp.up", "D F")`. A norm may be over other axes than usual: `("attention.q_norm", "NH")`.
A list has the weights whose rows are in one tensor, one weight after the other: Phi-3's `["mlp.gate", "mlp.up"]`.
A list with axes has weights with these axes, whose numbers alternate along the last one. `Interleaved` has weights that
take turns head by head, or expert by expert.
A `#` stands for the expert's number: each of those tensors lacks the axis E.

Ours have outputs first, inputs last. Measured, a matrix product with [out, in] is as fast as with [in, out].
"""


def our_keys(entry: TableEntry) -> list[str]:
    """The weights of a table's entry, without the axes of the tensor in the file."""
    if isinstance(entry, Interleaved):
        return [*entry.weights]
    weights = entry[0] if isinstance(entry, tuple) else entry
    return [weights] if isinstance(weights, str) else weights
