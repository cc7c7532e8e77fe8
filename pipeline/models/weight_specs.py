"""Two tables: the steps of a layer, and every weight that a transformer may have, with its logical axes and the steps
that use it.

They determine the leaves of a capture (`leaves.py`), their division over a mesh (`partition.py`), what int8 rounds, and
how far a layer is computed (`runs.py`). A family's `KEY_TABLE` says which of the weights it has.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache, partial

from pipeline.core.sites import Site
from pipeline.models.architecture import Architecture, Axis, LayerBlocks


class Step(StrEnum):
    """A step of the forward pass. All except the first and the last three belong to a layer."""

    embed = "embed"
    attn_in = "attn_in"
    q = "q"
    k = "k"
    v = "v"
    keys_as_values = "keys_as_values"
    scores = "scores"  # attention scores, only for `attn_entropy` and `attn_pattern`
    z = "z"  # attention
    heads = "heads"  # each head's output, projected
    o = "o"
    delta = "delta"  # a gated DeltaNet, including its output projection
    mlp_in = "mlp_in"
    gate = "gate"
    up = "up"
    neurons = "neurons"
    down = "down"
    router = "router"
    experts = "experts"
    shared = "shared"
    mix = "mix"  # the weighted sum of the experts' outputs
    layer_out = "layer_out"  # per-layer input and scale, after the MLP
    layer_inputs = "layer_inputs"  # per-layer inputs of all layers
    final_norm = "final_norm"
    head = "head"


@dataclass(frozen=True)
class LayerStep:
    """The sites that a step of a layer computes, and the steps whose outputs it reads, if the layer has them."""

    sites: frozenset[Site]
    reads: tuple[Step, ...] = ()


_ATTN_IN: Mapping[Step, LayerStep] = {Step.attn_in: LayerStep(frozenset({Site.attn_in}))}
_MIXED = frozenset({Site.attn_out, Site.resid_mid})
_ATTENTION: Mapping[Step, LayerStep] = {
    Step.q: LayerStep(frozenset({Site.q}), reads=(Step.attn_in,)),
    Step.k: LayerStep(frozenset({Site.k}), reads=(Step.attn_in,)),
    Step.v: LayerStep(frozenset({Site.v}), reads=(Step.attn_in,)),
    Step.scores: LayerStep(frozenset({Site.attn_entropy, Site.attn_pattern}), reads=(Step.q, Step.k)),
    Step.z: LayerStep(frozenset({Site.attn_z}), reads=(Step.q, Step.k, Step.v)),
    Step.heads: LayerStep(frozenset({Site.head_out}), reads=(Step.z,)),
    Step.o: LayerStep(_MIXED, reads=(Step.z,)),
    Step.mlp_in: LayerStep(frozenset({Site.mlp_in}), reads=(Step.o,)),
}
_KEYS_AS_VALUES: Mapping[Step, LayerStep] = {
    Step.keys_as_values: LayerStep(frozenset({Site.v}), reads=(Step.k,)),
}
_DELTA: Mapping[Step, LayerStep] = {
    Step.delta: LayerStep(_MIXED, reads=(Step.attn_in,)),
    Step.mlp_in: LayerStep(frozenset({Site.mlp_in}), reads=(Step.delta,)),
}
_DENSE: Mapping[Step, LayerStep] = {
    Step.gate: LayerStep(frozenset({Site.mlp_pre}), reads=(Step.mlp_in,)),
    Step.up: LayerStep(frozenset({Site.mlp_pre_linear}), reads=(Step.mlp_in,)),
    Step.neurons: LayerStep(frozenset({Site.mlp_post}), reads=(Step.gate, Step.up)),
    Step.down: LayerStep(frozenset({Site.mlp_out}), reads=(Step.neurons,)),
}
_ROUTED = frozenset({Site.router_logits, Site.router_weights, Site.router_indices})
_SPARSE: Mapping[Step, LayerStep] = {
    Step.router: LayerStep(_ROUTED, reads=(Step.mlp_in,)),
    Step.experts: LayerStep(frozenset({Site.expert_out}), reads=(Step.mlp_in, Step.router)),
    Step.shared: LayerStep(frozenset(), reads=(Step.mlp_in,)),
    Step.mix: LayerStep(frozenset({Site.mlp_out}), reads=(Step.experts, Step.shared, Step.down)),
}
_LAYER_OUT: Mapping[Step, LayerStep] = {Step.layer_out: LayerStep(frozenset())}


@cache
def layer_steps(blocks: LayerBlocks) -> Mapping[Step, LayerStep]:
    """The steps of a sequential layer whose MLP, if dense, is gated."""
    steps = _ATTN_IN | (_DELTA if blocks.is_delta else _ATTENTION)
    steps |= _SPARSE if blocks.is_sparse else _DENSE
    if blocks.has_both:
        steps |= _DENSE | {Step.down: LayerStep(frozenset(), reads=(Step.neurons,))}
    if blocks.keys_are_values:
        steps |= _KEYS_AS_VALUES
    missing = {Step.v} if blocks.keys_are_values else set()
    if blocks.keys_of is not None:
        missing = {Step.k, Step.v, Step.keys_as_values}
    return {step: spec for step, spec in (steps | _LAYER_OUT).items() if step not in missing}


LAYER_SITES = tuple(
    {
        site: None
        for blocks in (LayerBlocks(False, False), LayerBlocks(True, True))
        for step in layer_steps(blocks).values()
        for site in sorted(step.sites)
    }
)
"""The sites inside layers. A layer may lack some of them."""


def has_site(arch: Architecture, layer: int, site: Site) -> bool:
    """Whether a layer has a site. True for sites that are not in `LAYER_SITES`."""
    steps = layer_steps(arch.blocks(layer)).values()
    return site not in LAYER_SITES or any(site in step.sites for step in steps)


def why_missing(arch: Architecture, layer: int, site: Site) -> str:
    """Why `has_site` is false, as a clause for messages."""
    blocks = arch.blocks(layer)
    if site in (Site.k, Site.v) and blocks.keys_of is not None:
        return f"it attends to the keys and values of layer {blocks.keys_of}"
    if any(site in step.sites for step in _ATTENTION.values()):
        return "it has a gated DeltaNet in place of attention"
    return f"its MLP is {'a mixture of experts' if blocks.is_sparse else 'dense'}"


def required_steps(sites: Collection[Site], arch: Architecture, blocks: LayerBlocks) -> frozenset[Step]:
    """The steps of a layer that its `sites` require."""
    steps = layer_steps(blocks)

    def with_inputs(step: Step) -> set[Step]:
        reads = tuple(read for read in steps[step].reads if read in steps)
        if step is Step.mlp_in and arch.parallel:
            reads = ()  # the layer's input
        if step is Step.gate and not arch.gated:
            reads = (Step.up,)  # whose output is then the pre-activation
        return {step}.union(*map(with_inputs, reads))

    return frozenset().union(*(with_inputs(step) for step, spec in steps.items() if spec.sites & set(sites)))


class Kind(StrEnum):
    """What a weight is used for. Only matrices of layers are divided over a mesh by `tensor`'s heads, neurons and
    experts, and only they may be int8.

    Routers and the weights that control a DeltaNet's state are `control`: they are small, and rounding them would send
    tokens to different experts and change the decay of states."""

    embedding = "embedding"
    norm = "norm"
    matrix = "matrix"
    control = "control"


TENSOR_AXES: Mapping[Axis, str] = {
    Axis.heads: "attention heads",
    Axis.kv_heads: "key-value heads",
    Axis.d_mlp: "MLP neurons",
    Axis.experts: "experts",
    Axis.d_shared: "neurons of the shared expert",
    Axis.delta_heads: "key heads of DeltaNet",
}
"""The logical axes of matrices and biases that are divided along `tensor`, and their names in messages."""


@dataclass(frozen=True)
class WeightSpec:
    """One weight. `axes` are shape letters; in a matrix, outputs and inputs are separated by a space."""

    kind: Kind
    axes: str
    steps: frozenset[Step]  # the steps that use it
    is_bias: bool = False
    is_wide: bool = False  # always float32

    @property
    def logical_axes(self) -> tuple[Axis, ...]:
        return tuple(map(Axis, self.axes.replace(" ", "")))

    @property
    def num_inputs(self) -> int:
        """The number of last axes that a matrix product sums over; 0 unless this is a layer's matrix."""
        return len(self.axes.partition(" ")[2]) if self.kind is Kind.matrix else 0

    @property
    def is_divided(self) -> bool:
        """Whether `tensor` divides it: a matrix with one of `TENSOR_AXES`."""
        return self.kind is Kind.matrix and any(axis in TENSOR_AXES for axis in self.logical_axes)

    @property
    def is_scale(self) -> bool:
        """Whether this is a norm's weight, whose values are near 1."""
        return self.kind is Kind.norm and not self.is_bias


def _spec(kind: Kind, axes: str, *steps: Step) -> WeightSpec:
    return WeightSpec(kind, axes, frozenset(steps))


_embedding, _norm = partial(_spec, Kind.embedding), partial(_spec, Kind.norm)
_matrix, _control = partial(_spec, Kind.matrix), partial(_spec, Kind.control)

WEIGHTS: Mapping[str, WeightSpec] = {
    "embed": _embedding("V D", Step.embed),
    "position_embed": _embedding("P D", Step.embed),
    "type_embed": _embedding("Y D", Step.embed),
    "embed_norm": _norm("D", Step.embed),
    "layer_embed": _embedding("V Lp", Step.layer_inputs),
    "layer_projection": _embedding("Lp D", Step.layer_inputs),
    "layer_projection_norm": _norm("p", Step.layer_inputs),
    "attention.norm": _norm("D", Step.attn_in),
    "attention.qkv": _matrix("NCH D", Step.q, Step.k, Step.v),
    "attention.q": _matrix("NH D", Step.q),
    "attention.q_norm": _norm("H", Step.q),
    "attention.k": _matrix("KH D", Step.k),
    "attention.k_norm": _norm("H", Step.k),
    "attention.v": _matrix("KW D", Step.v),
    "attention.q_down": _matrix("Q D", Step.q),
    "attention.q_down_norm": _norm("Q", Step.q),
    "attention.q_up": _matrix("NH Q", Step.q),
    "attention.kv_down": _matrix("Z D", Step.k, Step.v),
    "attention.kv_down_norm": _norm("Z", Step.k, Step.v),
    "attention.kv_up": _matrix("NX Z", Step.k, Step.v),
    "attention.k_rotary": _matrix("R D", Step.k),
    "attention.sinks": _matrix("N", Step.scores, Step.z),  # not a product's operand, but divided like the heads
    "attention.gate": _matrix("NW D", Step.z),  # multiplies the heads' outputs
    "attention.o": _matrix("D NW", Step.heads, Step.o),
    "attention.post_norm": _norm("D", Step.o),
    "attention.sum_norm": _norm("D", Step.o),
    "delta.q": _matrix("Jk D", Step.delta),
    "delta.k": _matrix("Jk D", Step.delta),
    "delta.v": _matrix("JOv D", Step.delta),
    "delta.q_taps": _control("Jk I c", Step.delta),
    "delta.k_taps": _control("Jk I c", Step.delta),
    "delta.v_taps": _control("JOv I c", Step.delta),
    "delta.write": _control("JO D", Step.delta),
    "delta.decay": _control("JO D", Step.delta),
    "delta.decay_offset": replace(_control("JO", Step.delta), is_wide=True),
    "delta.decay_log_rate": replace(_control("JO", Step.delta), is_wide=True),
    "delta.z": _matrix("JOv D", Step.delta),
    "delta.z_norm": _norm("v", Step.delta),
    "delta.o": _matrix("D JOv", Step.delta),
    "mlp.norm": _norm("D", Step.mlp_in),
    "mlp.gate": _matrix("F D", Step.gate),
    "mlp.up": _matrix("F D", Step.up),
    "mlp.down": _matrix("D F", Step.down),
    "mlp.router": _control("E D", Step.router),
    "mlp.router_correction": replace(_control("E", Step.router), is_wide=True),
    "mlp.experts_gate": _matrix("EM D", Step.experts),
    "mlp.experts_up": _matrix("EM D", Step.experts),
    "mlp.experts_down": _matrix("ED M", Step.experts),
    "mlp.shared_router": _control("I D", Step.shared),
    "mlp.shared_gate": _matrix("U D", Step.shared),
    "mlp.shared_up": _matrix("U D", Step.shared),
    "mlp.shared_down": _matrix("D U", Step.shared),
    "mlp.router_scale": _norm("D", Step.router),
    "mlp.router_expert_scale": _norm("E", Step.router),
    "mlp.mixture_norm": _norm("D", Step.experts),
    "mlp.mixture_post_norm": _norm("D", Step.mix),
    "mlp.dense_post_norm": _norm("D", Step.down),
    "mlp.post_norm": _norm("D", Step.down, Step.mix),
    "mlp.sum_norm": _norm("D", Step.down, Step.mix),
    "mlp.input_gate": _matrix("p D", Step.layer_out),
    "mlp.input_out": _matrix("D p", Step.layer_out),
    "mlp.input_norm": _norm("D", Step.layer_out),
    "mlp.layer_scale": _norm("I", Step.layer_out),
    "final_norm": _norm("D", Step.final_norm),
    "head": _embedding("V D", Step.head),
}
"""By our key: `block.name` inside a layer. Matrices and norms may have biases, which `weight_spec` derives."""

_BIAS = "_bias"


def weight_spec(key: str) -> WeightSpec:
    """The description of a weight or of a bias, which has the weight's output axes. Raises KeyError for unknown
    names."""
    spec = WEIGHTS[key.removesuffix(_BIAS)]
    return replace(spec, axes=spec.axes.partition(" ")[0], is_bias=True) if key.endswith(_BIAS) else spec


def is_post_norm(keys: Collection[str]) -> bool:
    """Whether a model with these weights normalises the residual stream after each addition, as BERT does."""
    return "attention.sum_norm" in keys
