"""Which arrays a capture needs, and what they cost: known from config.json alone."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import jax
from jaxtyping import PyTree

from pipeline.models.architecture import Architecture, KeyTable
from pipeline.models.runs import LayerRun, layer_runs
from pipeline.sites import ActivationKey, Site


@dataclass(frozen=True)
class Leaf:
    """One array of the parameters: a tensor of the checkpoint, or the same tensor of several layers, stacked."""

    key: str  # ours
    tensors: tuple[str, ...]  # HF keys without prefix
    hf_shape: tuple[int, ...]  # of each of the tensors
    layer_shape: tuple[int, ...]  # ours, of one layer

    @property
    def is_stacked(self) -> bool:
        return len(self.tensors) > 1

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.tensors), *self.layer_shape) if self.is_stacked else self.layer_shape

    @property
    def size(self) -> int:
        return math.prod(self.shape)


LeafTree = PyTree[Leaf]
"""`decoder.Params` with a Leaf in place of each array."""


_QKV = frozenset({"q", "k", "v"})
_SITE_STEPS = {
    Site.q: frozenset({"q"}),
    Site.k: frozenset({"k"}),
    Site.v: frozenset({"v"}),
    Site.attn_z: _QKV,
    Site.attn_out: _QKV | {"o"},
    Site.resid_mid: _QKV | {"o"},
    Site.mlp_post: _QKV | {"o", "up"},
    Site.mlp_out: _QKV | {"o", "up", "down"},
}
"""The matrix products of a layer that a site inside of it needs."""

_WEIGHT_STEPS = {
    "attention.norm": _QKV,
    "attention.q": frozenset({"q"}),
    "attention.k": frozenset({"k"}),
    "attention.v": frozenset({"v"}),
    "attention.o": frozenset({"o"}),
    "mlp.norm": frozenset({"up"}),
    "mlp.gate": frozenset({"up"}),
    "mlp.up": frozenset({"up"}),
    "mlp.down": frozenset({"down"}),
}
"""The matrix products that a weight (and its bias) takes part in."""


def _is_needed(ours: str, run: LayerRun) -> bool:
    steps = _WEIGHT_STEPS[ours.removesuffix("_bias")]
    return not run.ends_at or any(steps & _SITE_STEPS[site] for site in run.ends_at)


def needed_leaves(arch: Architecture, table: KeyTable, keys: Sequence[ActivationKey]) -> LeafTree:
    """The parameters that `keys` need, not yet read."""

    def leaf(hf_key: str, layers: Iterable[int] = (0,)) -> Leaf:
        ours, axes = table[hf_key]
        groups = [[arch.axis(letter) for letter in group] for group in axes.split()]
        return Leaf(
            key=ours,
            tensors=tuple(hf_key.replace("*", str(layer)) for layer in layers),
            hf_shape=tuple(math.prod(group) for group in groups),
            layer_shape=tuple(size for group in groups for size in group),
        )

    def layer(run: LayerRun) -> dict[str, dict[str, Leaf]]:
        blocks: dict[str, dict[str, Leaf]] = {}
        for hf_key, (ours, _) in table.items():
            block, _, name = ours.partition(".")
            if name and _is_needed(ours, run):
                blocks.setdefault(block, {})[name] = leaf(hf_key, range(run.first, run.stop))
        return blocks

    hf_key_of = {ours: hf for hf, (ours, _) in table.items()}
    leaves = {
        "embed": leaf(hf_key_of["embed"]),
        "runs": tuple(layer(run) for run in layer_runs(keys, arch.num_layers)),
    }
    if any(key.site is Site.final_norm for key in keys):
        leaves["final_norm"] = leaf(hf_key_of["final_norm"])
    return leaves


def num_params(leaves: LeafTree) -> int:
    """How many numbers the leaves hold."""
    return sum(leaf.size for leaf in jax.tree.leaves(leaves))


def flops_per_token(arch: Architecture, leaves: LeafTree, length: int) -> int:
    """Floating-point operations of the forward pass per token slot, in rows of `length`.

    Two per weight of a matrix product, and attention over all of the row's positions (causal masking and packing are
    not subtracted, as is the custom: PaLM, arXiv 2204.02311, appendix B). Norms, softmax and rotations are left out.
    """
    in_layers = jax.tree.leaves(leaves["runs"])
    matrices = sum(leaf.size for leaf in in_layers if len(leaf.hf_shape) == 2)
    num_attentions = sum(
        len(run["attention"]["v"].tensors) for run in leaves["runs"] if run["attention"].keys() >= {"q", "k", "v"}
    )
    return 2 * matrices + num_attentions * 4 * length * arch.num_heads * arch.head_dim
