"""The description of a transformer, which each family reads from config.json.

Shape letters in this package, which also name the axes of weights:

    all models         B rows, T positions, S key positions, D model dim, N heads, K key-value heads, G = N / K,
                       H head dim, W head dim of values (H, except in latent attention), F MLP dim, V vocabulary,
                       P learned positions, Y token types, C = 3 for q, k and v in one tensor, L layers of a stack,
                       p dims of per-layer inputs, I = 1
    experts            E experts, A experts per token, M MLP dim of an expert, U MLP dim of the shared expert
    latent attention   Q rank of queries, Z rank of keys and values, R rotary dims of a head, X = H - R + W
    DeltaNet           J key heads, O value heads per key head, k and v dims of a key head and a value head,
                       c convolution taps
    short convolution  G channels, c taps
"""

from dataclasses import dataclass, fields, is_dataclass, replace
from enum import StrEnum
from typing import NamedTuple

DELTA_CHUNK = 64  # positions that a DeltaNet processes at once


class RopeKind(StrEnum):
    """How rotary frequencies are scaled for longer contexts. The names are those of config.json."""

    default = "default"
    linear = "linear"
    llama3 = "llama3"
    dynamic = "dynamic"
    yarn = "yarn"  # Peng et al., arXiv 2309.00071
    longrope = "longrope"
    proportional = "proportional"


@dataclass(frozen=True)
class Rope:
    """Rotary position embeddings (Su et al., arXiv 2104.09864). Dimensions h and h + half of a head rotate together.

    LongRoPE (Ding et al., arXiv 2402.13753) has other factors for windows longer than the original context, at all of
    their positions, as transformers has for a longer text: so the activations of a token depend on its window's length.
    """

    theta: float
    kind: RopeKind = RopeKind.default
    factor: float = 1.0  # all kinds except default
    original_max_positions: int = 0  # llama3, yarn and longrope
    attention_factor: float = 1.0  # yarn and longrope: multiplies cosines and sines
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 1.0  # llama3
    beta_fast: float = 32.0  # yarn: pairs with more rotations in the original context keep their frequency
    beta_slow: float = 1.0  # yarn: the frequency of pairs with fewer rotations is divided by `factor`
    truncate: bool = True  # yarn: rounds the ends of the interpolated range outwards to whole pairs
    short_factors: tuple[float, ...] = ()  # longrope: divide the frequency of each pair of dimensions
    long_factors: tuple[float, ...] = ()  # longrope: in windows longer than the original context
    rotating: float = 1.0  # proportional: share of the pairs that rotate, those with the highest frequencies


class Norm(StrEnum):
    """How a norm scales its normalised input. `rms` and `rms_wide` differ in bfloat16 only."""

    rms = "rms"  # by its weight, in the activations' dtype
    rms_wide = "rms_wide"  # by its weight, in float32
    rms_plus_one = "rms_plus_one"  # by 1 + its weight, in float32
    layer = "layer"  # LayerNorm: by its weight, plus its bias if it has one, in float32
    layer_plain = "layer_plain"  # LayerNorm without weights, before attention, the MLP and the head


class Activation(StrEnum):
    """The MLP's nonlinearity."""

    silu = "silu"
    gelu = "gelu"
    gelu_tanh = "gelu_tanh"
    relu = "relu"
    relu2 = "relu2"  # squared


@dataclass(frozen=True)
class LocalAttention:
    """Sliding-window attention: local layers attend to the last `window` positions, including the current one. With
    `chunked`, they attend to those in the same chunk of `window` positions of the document."""

    pattern: str  # a letter per layer: L local, G global
    window: int
    rope: Rope | None  # for the local layers
    chunked: bool = False


@dataclass(frozen=True)
class QueryScaling:
    """Queries are multiplied by 1 + beta * log(1 + floor((position + shift) / period)), for long contexts."""

    beta: float
    period: int
    shift: int = 0
    of_rotated: bool = True  # in layers with rotary embeddings (Ministral 3); False: in the others (Llama 4)


class RotaryPairs(StrEnum):
    """Which dimensions rotate together, in the weights and in queries and keys."""

    halves = "halves"  # h and h + half
    adjacent = "adjacent"  # 2h and 2h + 1
    to_halves = "to_halves"  # 2h and 2h + 1 in the weights, h and h + half in queries and keys


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434). The keys and values of all heads are projected from
    one normalised latent vector per position. Only the last `rotary_dim` dimensions of a head rotate, and all heads
    share these dimensions of the key."""

    kv_rank: int  # size of that latent vector
    q_rank: int | None  # size of the queries' latent vector; None: queries are projected from the stream
    value_dim: int  # per head
    pairs: RotaryPairs
    norm_eps: float = 1e-6  # for the norms of the latent vectors


@dataclass(frozen=True)
class DeltaNet:
    """Layers with a gated DeltaNet (Yang et al., arXiv 2412.06464) in place of attention. Each value head has a
    decaying state of [key dim, value dim]; a position adds the difference between its value and the state's prediction
    for its key. In Mamba 2, it adds its value; a key head is a group there, and the key dim the state's size."""

    pattern: str  # a letter per layer: D DeltaNet, A attention
    num_heads: int  # query and key heads
    values_per_key: int  # value heads per key head
    key_dim: int  # per key head
    value_dim: int  # per value head
    num_taps: int  # of the causal convolutions over queries, keys and values
    is_mamba: bool = False
    min_time: float = 0.0  # Mamba 2: of a position's time step


@dataclass(frozen=True)
class ShortConv:
    """Layers with a gated short convolution over the positions in place of attention (LFM2, arXiv 2511.23404). It has a
    channel per feature of the residual stream."""

    pattern: str  # a letter per layer: C convolution, A attention
    num_taps: int


@dataclass(frozen=True)
class GlobalHeads:
    """The heads of global layers, if they differ from those of local layers."""

    head_dim: int
    num_kv_heads: int
    keys_are_values: bool  # values are the projected keys, before their norm and rotation


@dataclass(frozen=True)
class SharedKeys:
    """The last layers compute no keys and values. Each attends to those of the last layer of its kind, local or global,
    that computes them."""

    num_layers: int
    d_mlp: int  # in these layers


class Part(StrEnum):
    """A part of a model, which has weights (`weight_specs.WEIGHTS`). The first four belong to no layer."""

    embed = "embed"
    layer_inputs = "layer_inputs"  # per-layer inputs of all layers
    final_norm = "final_norm"
    head = "head"
    layer = "layer"  # in every layer
    attention = "attention"
    keys = "keys"  # and values, unless the layer attends to those of another
    values = "values"  # projections, unless the keys are also the values
    delta = "delta"  # a gated DeltaNet in place of attention
    conv = "conv"  # a gated short convolution in place of attention
    dense = "dense"  # an MLP
    sparse = "sparse"  # a mixture of experts


class LayerKind(NamedTuple):
    """How layers may differ. Layers of the same kind have weights of the same shapes and compute the same."""

    parts: frozenset[Part]
    is_local: bool
    is_rotated: bool  # queries and keys
    has_global_heads: bool
    keys_of: int | None  # the layer whose keys and values it attends to; None: its own


class Router(StrEnum):
    """How a router chooses a token's experts and weights their outputs."""

    softmax = "softmax"  # the largest shares of a softmax over all experts
    top_softmax = "top_softmax"  # the largest logits, weighted by a softmax over these
    groups = "groups"  # DeepSeek-V2: shares as in `softmax`, from the groups of experts with the largest shares
    sigmoid = "sigmoid"  # the largest logits, weighted by their sigmoids
    sigmoid_groups = "sigmoid_groups"  # DeepSeek-V3: sigmoids, from the groups with the largest sums of two; the choice
    # adds corrections to the sigmoids


@dataclass(frozen=True)
class Experts:
    """Sparse layers: a router chooses some of the experts for each token, and their outputs are mixed."""

    pattern: str  # a letter per layer: S sparse, D dense
    num_experts: int
    per_token: int
    d_expert: int
    sums_to_one: bool  # normalises the weights of a token's experts; else they come from the softmax over all experts
    router: Router = Router.softmax
    d_shared: int = 0  # MLP dim of the expert that every token uses; 0: no such expert
    rounds_weights: bool = True  # rounds the experts' weights to the activations' dtype; else they stay float32
    num_groups: int = 1  # of equal size
    groups_per_token: int = 1
    scaling: float = 1.0  # of the weights, for experts in groups
    limit: float | None = None  # neurons are (up + 1) * gate * sigmoid(alpha * gate), with gate <= limit, |up| <= limit
    alpha: float = 1.702
    scales_inputs: bool = False  # multiplies an expert's input by its weight, not its output
    beside_mlp: bool = False  # an MLP reads the same stream through its own norm, and the outputs are added (Gemma 4)


@dataclass(frozen=True)
class Architecture:
    """A transformer. The defaults describe a LLaMA. A model has the norms, biases and gates that its weights
    contain."""

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
    parallel: bool = False  # attention and MLP read the same stream, through one norm unless the MLP has its own
    gated: bool = True  # the MLP multiplies its activated gate by a linear projection
    rotary_dim: int | None = None  # dimensions of a head that rotate; None: all
    rotary_pairs: RotaryPairs = RotaryPairs.halves
    attention_scale: float | None = None  # multiplies the scores; None: 1 / sqrt(head_dim)
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)
    clip_qkv: float | None = None  # bounds queries and keys, before they rotate, and values
    local: LocalAttention | None = None  # None: all layers are global
    sinks: bool = False  # each head has a learned score for a key without a value, which all its queries see
    embed_scale: float = 1.0
    position_offset: int = 0  # number of the first row of learned positions that is used
    uncounted_token: int | None = None  # has the row before the first one, and does not move later tokens' positions
    residual_scale: float = 1.0  # multiplies what attention and the MLP add to the stream
    num_token_types: int = 0
    experts: Experts | None = None  # None: all layers are dense
    rotation: str | None = None  # a letter per layer: R with rotary embeddings, N without; None: R if `rope` is set
    latent: LatentAttention | None = None
    num_ignored_layers: int = 0  # multi-token prediction layers after the last layer, which are not read
    delta: DeltaNet | None = None  # None: no layer has one
    conv: ShortConv | None = None  # None: no layer has one
    global_heads: GlobalHeads | None = None  # None: the same heads in all layers
    shared_keys: SharedKeys | None = None  # None: all layers compute keys and values
    query_scaling: QueryScaling | None = None
    norms_values: bool = False  # RMSNorm of the values, without a weight
    norms_rotated: bool = False  # RMSNorm of queries and keys after rotation, without a weight
    layer_inputs: int = 0  # dims of per-layer inputs (per-layer embeddings of a token); 0: none
    blocks: str | None = None  # a letter per layer: M only attention or what is in its place, F only an MLP; None: both

    @property
    def value_dim(self) -> int:
        """The size per head of values and of `attn_z`."""
        return self.latent.value_dim if self.latent else self.head_dim

    @property
    def max_generated(self) -> int:
        """The most positions of a row in generation; with LongRoPE, the original context: a longer text would change
        the factors of the keys in the cache."""
        return min([self.max_positions, *(rope.original_max_positions for rope in self.long_ropes)])

    @property
    def long_ropes(self) -> list[Rope]:
        ropes = [self.rope, self.local.rope if self.local else None]
        return [rope for rope in ropes if rope is not None and rope.kind is RopeKind.longrope]

    def is_local(self, layer: int) -> bool:
        return self.local is not None and self.local.pattern[layer] == "L"

    def is_rotated(self, layer: int) -> bool:
        return self.rope is not None and (self.rotation is None or self.rotation[layer] == "R")

    def kind(self, layer: int) -> LayerKind:
        is_sparse = self.experts is not None and self.experts.pattern[layer] == "S"
        has_global_heads = self.global_heads is not None and not self.is_local(layer)
        keys_of = self.keys_of(layer)
        parts, block = {Part.layer}, self.blocks[layer] if self.blocks else None
        if block != "F":
            parts.add(self._mixer(layer))
        if block != "M":
            parts.add(Part.sparse if is_sparse else Part.dense)
        if is_sparse and self.experts.beside_mlp:
            parts.add(Part.dense)
        if Part.attention in parts and keys_of is None:
            keys_are_values = has_global_heads and self.global_heads.keys_are_values
            parts |= {Part.keys} if keys_are_values else {Part.keys, Part.values}
        return LayerKind(frozenset(parts), self.is_local(layer), self.is_rotated(layer), has_global_heads, keys_of)

    def _mixer(self, layer: int) -> Part:
        """What mixes positions: attention, or what is in its place."""
        if self.delta is not None and self.delta.pattern[layer] == "D":
            return Part.delta
        return Part.conv if self.conv is not None and self.conv.pattern[layer] == "C" else Part.attention

    def keys_of(self, layer: int) -> int | None:
        """The layer whose keys and values a layer attends to; None: its own."""
        first = self.num_layers - (self.shared_keys.num_layers if self.shared_keys else 0)
        if layer < first:
            return None
        return first - 1 if self.local is None else self.local.pattern.rindex(self.local.pattern[layer], 0, first)

    def with_sizes_of(self, layer: int) -> "Architecture":
        """A copy whose heads and MLP have the layer's sizes."""
        arch, kind = self, self.kind(layer)
        if kind.has_global_heads:
            arch = replace(arch, head_dim=self.global_heads.head_dim, num_kv_heads=self.global_heads.num_kv_heads)
        return arch if kind.keys_of is None else replace(arch, d_mlp=self.shared_keys.d_mlp)

    @property
    def all_sizes(self) -> "list[Architecture]":
        """`with_sizes_of` of one layer per kind."""
        layers = {self.kind(layer): layer for layer in range(self.num_layers)}
        return [self.with_sizes_of(layer) for layer in layers.values()]

    def axis_size(self, axis: str) -> int:
        """The size of an axis, by its letter. Axes that the model lacks have size 0."""
        experts = self.experts or Experts("", 0, 0, 0, False)
        latent = self.latent or LatentAttention(0, 0, 0, RotaryPairs.halves)
        delta = self.delta or DeltaNet("", 0, 0, 0, 0, 0)
        num_rotary, num_positions = self.rotary_dim or 0, self.max_positions + self.position_offset
        sizes = {
            **{"V": self.vocab_size, "D": self.d_model, "P": num_positions, "Y": self.num_token_types},
            **{"N": self.num_heads, "K": self.num_kv_heads, "H": self.head_dim, "W": self.value_dim, "C": 3},
            **{"Q": latent.q_rank or 0, "Z": latent.kv_rank, "R": num_rotary},
            **{"X": self.head_dim - num_rotary + self.value_dim, "F": self.d_mlp},
            **{"E": experts.num_experts, "M": experts.d_expert, "U": experts.d_shared},
            **{"J": delta.num_heads, "O": delta.values_per_key, "k": delta.key_dim, "v": delta.value_dim},
            **{
                "c": self.conv.num_taps if self.conv else delta.num_taps,
                "G": self.d_model,
                "L": self.num_layers,
                "p": self.layer_inputs,
                "I": 1,
            },
        }
        return sizes[axis]


def without_defaults(value: object) -> object:
    """The fields of a dataclass that differ from their defaults, by name, as plain JSON. So a new field does not change
    the identity of models without it."""
    if is_dataclass(value):
        values = {field.name: (getattr(value, field.name), field.default) for field in fields(value)}
        return {name: without_defaults(inner) for name, (inner, default) in values.items() if inner != default}
    return list(value) if isinstance(value, tuple) else value


@dataclass(frozen=True)
class FileTensor:
    """A tensor of the file that does not simply contain one of our weights, such as [N, H, D], as [N * H, D]."""

    weights: tuple[str, ...]  # all weights in the tensor; they are concatenated along its first axis
    axes: str | None = None  # the file's axes of one weight, grouped as in the file; None: those of our weight
    by: str = ""  # an axis: after each of its items' parts of a weight follow those of the next weight


TableEntry = str | FileTensor
KeyTable = dict[str, TableEntry]
"""HF key without its prefix -> our key, a name in `weight_specs.WEIGHTS`. `*` stands for the layer's number, `#` for
the expert's number; tensors with `#` lack the axis E.

| entry | the tensor in the file |
|---|---|
| `"attention.q"` | our weight [N, H, D], stored as [N * H, D]: outputs first, inputs last |
| `FileTensor(("mlp.up",), "D F")` | our weight with different axes: GPT-2's matrices are [inputs, outputs] |
| `FileTensor(("mlp.gate", "mlp.up"))` | several weights, concatenated along the first axis (Phi-3) |
| `FileTensor(("attention.q", "attention.gate"), by="N")` | several weights, which alternate by head |
| `FileTensor(())` | none of our weights; it is not read (the indexer of DeepSeek V3.2) |

Matrix products with weights [outputs, inputs] measured as fast as with [inputs, outputs].
"""


def our_keys(entry: TableEntry) -> tuple[str, ...]:
    """The weights of a table entry."""
    return (entry,) if isinstance(entry, str) else entry.weights


def biases(table: KeyTable, *weights: str) -> KeyTable:
    """The biases of a table's tensors, or only of those whose first weight is named. Their axes are those of ours."""
    chosen = {key: entry for key, entry in table.items() if not weights or our_keys(entry)[0] in weights}
    return {
        f"{key.removesuffix('.weight')}.bias": (
            f"{entry}_bias"
            if isinstance(entry, str)
            else replace(entry, weights=tuple(f"{weight}_bias" for weight in entry.weights), axes=None)
        )
        for key, entry in chosen.items()
    }
