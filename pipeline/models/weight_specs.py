"""Every weight that a transformer may have, described once: its logical axes, and the steps that use it.

From these two tables follow the leaves of a capture (`leaves.py`), their division over a mesh (`partition.py`), what
int8 rounds, and how far a layer is computed (`runs.py`). A family's `KEY_TABLE` says which of the weights it has.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from pipeline.core.sites import Site
from pipeline.models.architecture import Architecture, Axis


class Step(StrEnum):
    """A step of the forward pass. All but the first and the last two belong to a layer."""

    embed = "embed"
    attn_in = "attn_in"
    q = "q"
    k = "k"
    v = "v"
    z = "z"  # attention proper
    o = "o"
    mlp_in = "mlp_in"
    gate = "gate"
    up = "up"
    neurons = "neurons"
    down = "down"
    final_norm = "final_norm"
    head = "head"


@dataclass(frozen=True)
class LayerStep:
    """The sites that a step of a layer computes, and the steps whose outputs it reads."""

    sites: frozenset[Site]
    reads: tuple[Step, ...] = ()


LAYER_STEPS: Mapping[Step, LayerStep] = {
    Step.attn_in: LayerStep(frozenset({Site.attn_in})),
    Step.q: LayerStep(frozenset({Site.q}), reads=(Step.attn_in,)),
    Step.k: LayerStep(frozenset({Site.k}), reads=(Step.attn_in,)),
    Step.v: LayerStep(frozenset({Site.v}), reads=(Step.attn_in,)),
    Step.z: LayerStep(frozenset({Site.attn_z}), reads=(Step.q, Step.k, Step.v)),
    Step.o: LayerStep(frozenset({Site.attn_out, Site.resid_mid}), reads=(Step.z,)),
    Step.mlp_in: LayerStep(frozenset({Site.mlp_in}), reads=(Step.o,)),
    Step.gate: LayerStep(frozenset({Site.mlp_pre}), reads=(Step.mlp_in,)),
    Step.up: LayerStep(frozenset({Site.mlp_pre_linear}), reads=(Step.mlp_in,)),
    Step.neurons: LayerStep(frozenset({Site.mlp_post}), reads=(Step.gate, Step.up)),
    Step.down: LayerStep(frozenset({Site.mlp_out}), reads=(Step.neurons,)),
}
"""The steps of a sequential layer with a gated MLP."""


def required_steps(sites: Collection[Site], arch: Architecture) -> frozenset[Step]:
    """The steps of a layer that its `sites` require."""

    def with_inputs(step: Step) -> set[Step]:
        reads = LAYER_STEPS[step].reads
        if step is Step.mlp_in and arch.parallel:
            reads = ()  # the layer's input
        if step is Step.gate and not arch.gated:
            reads = (Step.up,)  # whose output is then the pre-activation
        return {step}.union(*map(with_inputs, reads))

    return frozenset().union(*(with_inputs(step) for step, spec in LAYER_STEPS.items() if spec.sites & set(sites)))


class Kind(StrEnum):
    """What a weight is for: matrices of layers are divided over a mesh and may be int8, the others are neither."""

    embedding = "embedding"
    norm = "norm"
    matrix = "matrix"


@dataclass(frozen=True)
class WeightSpec:
    """One weight. `axes` are shape letters: outputs and, of a layer's matrix, after a space its inputs."""

    kind: Kind
    axes: str
    steps: frozenset[Step]  # which use it
    is_bias: bool = False

    @property
    def logical_axes(self) -> tuple[Axis, ...]:
        return tuple(map(Axis, self.axes.replace(" ", "")))

    @property
    def num_inputs(self) -> int:
        """How many of the last axes a matrix product sums over; 0 for everything but a layer's matrix."""
        return len(self.axes.partition(" ")[2]) if self.kind is Kind.matrix else 0

    @property
    def is_scale(self) -> bool:
        """Whether this is the weight of a norm, which is near 1."""
        return self.kind is Kind.norm and not self.is_bias


def _embedding(axes: str, step: Step) -> WeightSpec:
    return WeightSpec(Kind.embedding, axes, frozenset({step}))


def _norm(axes: str, *steps: Step) -> WeightSpec:
    return WeightSpec(Kind.norm, axes, frozenset(steps))


def _matrix(axes: str, *steps: Step) -> WeightSpec:
    return WeightSpec(Kind.matrix, axes, frozenset(steps))


WEIGHTS: Mapping[str, WeightSpec] = {
    "embed": _embedding("V D", Step.embed),
    "position_embed": _embedding("P D", Step.embed),
    "type_embed": _embedding("Y D", Step.embed),
    "embed_norm": _norm("D", Step.embed),
    "attention.norm": _norm("D", Step.attn_in),
    "attention.qkv": _matrix("NCH D", Step.q, Step.k, Step.v),
    "attention.q": _matrix("NH D", Step.q),
    "attention.q_norm": _norm("H", Step.q),
    "attention.k": _matrix("KH D", Step.k),
    "attention.k_norm": _norm("H", Step.k),
    "attention.v": _matrix("KH D", Step.v),
    "attention.o": _matrix("D NH", Step.o),
    "attention.post_norm": _norm("D", Step.o),
    "attention.sum_norm": _norm("D", Step.o),
    "mlp.norm": _norm("D", Step.mlp_in),
    "mlp.gate": _matrix("F D", Step.gate),
    "mlp.up": _matrix("F D", Step.up),
    "mlp.down": _matrix("D F", Step.down),
    "mlp.post_norm": _norm("D", Step.down),
    "mlp.sum_norm": _norm("D", Step.down),
    "final_norm": _norm("D", Step.final_norm),
    "head": _embedding("V D", Step.head),
}
"""By our key: `block.name` inside of a layer. Each matrix and norm may have a bias: `weight_spec` derives its row."""

_BIAS = "_bias"


def weight_spec(key: str) -> WeightSpec:
    """The description of a weight or of its bias, which has the weight's outputs. Raises KeyError for another name."""
    spec = WEIGHTS[key.removesuffix(_BIAS)]
    return replace(spec, axes=spec.axes.partition(" ")[0], is_bias=True) if key.endswith(_BIAS) else spec


def is_post_norm(keys: Collection[str]) -> bool:
    """Whether a model with these weights norms the residual stream itself, after each addition (BERT)."""
    return "attention.sum_norm" in keys
