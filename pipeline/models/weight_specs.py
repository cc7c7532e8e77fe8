"""Two tables: the sites that only some layers have, and every weight that a transformer may have, with its logical axes
and the part of the model that it belongs to.

They determine the leaves of a capture (`leaves.py`), their division over a mesh (`partition.py`), and what int8 rounds.
A family's `KEY_TABLE` says which of the weights it has.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial

from pipeline.core.sites import Site
from pipeline.models.architecture import Architecture, Part

_SITE_PARTS: Mapping[Site, Collection[Part]] = {
    **dict.fromkeys((Site.attn_in, Site.attn_out), (Part.attention, Part.delta, Part.conv)),
    **dict.fromkeys((Site.q, Site.attn_entropy, Site.attn_pattern, Site.attn_z, Site.head_out), (Part.attention,)),
    **dict.fromkeys((Site.k, Site.v), (Part.keys,)),
    **dict.fromkeys((Site.mlp_in, Site.mlp_out), (Part.dense, Part.sparse)),
    **dict.fromkeys((Site.mlp_pre, Site.mlp_pre_linear, Site.mlp_post), (Part.dense,)),
    **dict.fromkeys((Site.router_logits, Site.router_weights, Site.router_indices, Site.expert_out), (Part.sparse,)),
}
"""A layer has a site if it has one of these parts; other sites inside layers belong to all layers."""


def has_site(arch: Architecture, layer: int, site: Site) -> bool:
    """Whether a layer has a site. True for sites outside layers."""
    return not arch.kind(layer).parts.isdisjoint(_SITE_PARTS.get(site, (Part.layer,)))


class WeightKind(StrEnum):
    """What a weight is used for. Only matrices of layers are divided over a mesh by `tensor`'s heads, neurons and
    experts, and only they may be int8.

    Routers, taps of convolutions and the weights that control a DeltaNet's state are `control`: they are small, and
    rounding them would send tokens to different experts and change the decay of states."""

    embedding = "embedding"
    norm = "norm"
    matrix = "matrix"
    control = "control"


TENSOR_AXES: Mapping[str, str] = {
    "N": "attention heads",
    "K": "key-value heads",
    "F": "MLP neurons",
    "E": "experts",
    "U": "neurons of the shared expert",
    "J": "key heads or groups of recurrent layers",
    "G": "channels of short convolutions",
}
"""The logical axes of matrices and biases that are divided along `tensor`, and their names in messages."""


@dataclass(frozen=True)
class WeightSpec:
    """One weight. `axes` are shape letters; in a matrix, outputs and inputs are separated by a space."""

    kind: WeightKind
    axes: str
    part: Part
    is_bias: bool = False
    is_wide: bool = False  # always float32

    @property
    def logical_axes(self) -> str:
        return self.axes.replace(" ", "")

    @property
    def num_inputs(self) -> int:
        """The number of last axes that a matrix product sums over; 0 unless this is a layer's matrix."""
        return len(self.axes.partition(" ")[2]) if self.kind is WeightKind.matrix else 0

    @property
    def is_scale(self) -> bool:
        """Whether this is a norm's weight, whose values are near 1."""
        return self.kind is WeightKind.norm and not self.is_bias


_embedding, _norm = partial(WeightSpec, WeightKind.embedding), partial(WeightSpec, WeightKind.norm)
_matrix, _control = partial(WeightSpec, WeightKind.matrix), partial(WeightSpec, WeightKind.control)

WEIGHTS: Mapping[str, WeightSpec] = {
    "embed": _embedding("V D", Part.embed),
    "position_embed": _embedding("P D", Part.embed),
    "type_embed": _embedding("Y D", Part.embed),
    "embed_norm": _norm("D", Part.embed),
    "layer_embed": _embedding("V Lp", Part.layer_inputs),
    "layer_projection": _embedding("Lp D", Part.layer_inputs),
    "layer_projection_norm": _norm("p", Part.layer_inputs),
    "attention.norm": _norm("D", Part.layer),
    "attention.qkv": _matrix("NCH D", Part.attention),
    "attention.q": _matrix("NH D", Part.attention),
    "attention.q_norm": _norm("H", Part.attention),
    "attention.k": _matrix("KH D", Part.keys),
    "attention.k_norm": _norm("H", Part.keys),
    "attention.v": _matrix("KW D", Part.values),
    "attention.q_down": _matrix("Q D", Part.attention),
    "attention.q_down_norm": _norm("Q", Part.attention),
    "attention.q_up": _matrix("NH Q", Part.attention),
    "attention.kv_down": _matrix("Z D", Part.keys),
    "attention.kv_down_norm": _norm("Z", Part.keys),
    "attention.kv_up": _matrix("NX Z", Part.keys),
    "attention.k_rotary": _matrix("R D", Part.keys),
    "attention.sinks": _matrix("N", Part.attention),  # not a product's operand, but divided like the heads
    "attention.gate": _matrix("NW D", Part.attention),  # multiplies the heads' outputs
    "attention.o": _matrix("D NW", Part.attention),
    "attention.post_norm": _norm("D", Part.attention),
    "attention.sum_norm": _norm("D", Part.attention),
    "delta.q": _matrix("Jk D", Part.delta),
    "delta.k": _matrix("Jk D", Part.delta),
    "delta.v": _matrix("JOv D", Part.delta),
    "delta.q_taps": _control("Jk I c", Part.delta),
    "delta.k_taps": _control("Jk I c", Part.delta),
    "delta.v_taps": _control("JOv I c", Part.delta),
    "delta.write": _control("JO D", Part.delta),
    "delta.decay": _control("JO D", Part.delta),
    "delta.decay_offset": replace(_control("JO", Part.delta), is_wide=True),
    "delta.decay_log_rate": replace(_control("JO", Part.delta), is_wide=True),
    "delta.skip": replace(_control("JO", Part.delta), is_wide=True),
    "delta.z": _matrix("JOv D", Part.delta),
    "delta.z_norm": _norm("v", Part.delta),
    "delta.o": _matrix("D JOv", Part.delta),
    "conv.in_gate": _matrix("G D", Part.conv),  # multiplies the convolution's inputs
    "conv.in": _matrix("G D", Part.conv),
    "conv.taps": _control("G I c", Part.conv),
    "conv.out_gate": _matrix("G D", Part.conv),  # multiplies the convolution's outputs
    "conv.o": _matrix("D G", Part.conv),
    "mlp.norm": _norm("D", Part.layer),
    "mlp.gate": _matrix("F D", Part.dense),
    "mlp.up": _matrix("F D", Part.dense),
    "mlp.down": _matrix("D F", Part.dense),
    "mlp.router": _control("E D", Part.sparse),
    "mlp.router_correction": replace(_control("E", Part.sparse), is_wide=True),
    "mlp.experts_gate": _matrix("EM D", Part.sparse),
    "mlp.experts_up": _matrix("EM D", Part.sparse),
    "mlp.experts_down": _matrix("ED M", Part.sparse),
    "mlp.shared_router": _control("I D", Part.sparse),
    "mlp.shared_gate": _matrix("U D", Part.sparse),
    "mlp.shared_up": _matrix("U D", Part.sparse),
    "mlp.shared_down": _matrix("D U", Part.sparse),
    "mlp.router_scale": _norm("D", Part.sparse),
    "mlp.router_expert_scale": _norm("E", Part.sparse),
    "mlp.mixture_norm": _norm("D", Part.sparse),
    "mlp.mixture_post_norm": _norm("D", Part.sparse),
    "mlp.dense_post_norm": _norm("D", Part.dense),
    "mlp.post_norm": _norm("D", Part.layer),
    "mlp.sum_norm": _norm("D", Part.layer),
    "mlp.input_gate": _matrix("p D", Part.layer),
    "mlp.input_out": _matrix("D p", Part.layer),
    "mlp.input_norm": _norm("D", Part.layer),
    "mlp.layer_scale": _norm("I", Part.layer),
    "final_norm": _norm("D", Part.final_norm),
    "head": _embedding("V D", Part.head),
}
"""By our key: `block.name` inside a layer. Matrices and norms may have biases, which `weight_spec` derives."""

_BIAS = "_bias"


def weight_spec(key: str) -> WeightSpec:
    """The description of a weight or of a bias, which has the weight's output axes. Raises KeyError for unknown
    names."""
    spec = WEIGHTS[key.removesuffix(_BIAS)]
    return replace(spec, axes=spec.axes.partition(" ")[0], is_bias=True) if key.endswith(_BIAS) else spec
