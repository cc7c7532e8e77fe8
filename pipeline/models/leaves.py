"""Which arrays a capture needs, and what they cost: known from config.json alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from pipeline.core.sites import ActivationKey, Site
from pipeline.models.architecture import Architecture, KeyTable
from pipeline.models.runs import LayerRun, layer_runs


@dataclass(frozen=True)
class Leaf:
    """One array of the parameters: a tensor of the checkpoint, or the same tensor of several layers, stacked."""

    key: str  # ours
    tensors: tuple[str, ...]  # HF keys without prefix
    hf_shape: tuple[int, ...]  # of each of the tensors
    axes: tuple[int, ...]  # the same with HF's axes taken apart
    order: tuple[int, ...]  # of `axes` in ours
    num_inputs: int  # of a layer's matrix: how many of our last axes its product sums over; 0 for everything else

    @property
    def is_stacked(self) -> bool:
        return len(self.tensors) > 1

    @property
    def layer_shape(self) -> tuple[int, ...]:
        """Ours, of one layer."""
        return tuple(self.axes[axis] for axis in self.order)

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.tensors), *self.layer_shape) if self.is_stacked else self.layer_shape

    @property
    def size(self) -> int:
        return math.prod(self.shape)


LeafTree = PyTree[Leaf]
"""`decoder.Params` with a Leaf in place of each array."""

_QKV = frozenset({"q", "k", "v"})
_ATTENTION = _QKV | {"z", "o"}
_SITE_STEPS = {
    Site.q: frozenset({"q"}),
    Site.k: frozenset({"k"}),
    Site.v: frozenset({"v"}),
    Site.attn_z: _QKV | {"z"},
    Site.attn_out: _ATTENTION,
    Site.resid_mid: _ATTENTION,
    Site.mlp_post: _ATTENTION | {"up"},
    Site.mlp_out: _ATTENTION | {"up", "down"},
}
"""The steps of a layer that a site inside of it needs: products with weights, and `z`, attention proper."""

_WEIGHT_STEPS = {
    "attention.norm": _QKV,
    "attention.qkv": _QKV,
    "attention.q": frozenset({"q"}),
    "attention.q_norm": frozenset({"q"}),
    "attention.k": frozenset({"k"}),
    "attention.k_norm": frozenset({"k"}),
    "attention.v": frozenset({"v"}),
    "attention.o": frozenset({"o"}),
    "attention.post_norm": frozenset({"o"}),
    "attention.sum_norm": frozenset({"o"}),
    "mlp.norm": frozenset({"up"}),
    "mlp.gate": frozenset({"up"}),
    "mlp.up": frozenset({"up"}),
    "mlp.down": frozenset({"down"}),
    "mlp.post_norm": frozenset({"down"}),
    "mlp.sum_norm": frozenset({"down"}),
}
"""The steps that a weight (and its bias) takes part in: every name that a family's table may use inside of a layer."""


def _steps(run: LayerRun, arch: Architecture) -> frozenset[str]:
    """The steps of each of the run's layers."""
    if not run.ends_at:
        return _SITE_STEPS[Site.mlp_out]
    needed = [_SITE_STEPS[site] for site in run.ends_at]
    if arch.parallel:  # the MLP does without attention
        needed = [steps - _ATTENTION if "up" in steps else steps for steps in needed]
    return frozenset().union(*needed)


def needed_leaves(arch: Architecture, table: KeyTable, keys: Sequence[ActivationKey]) -> LeafTree:
    """The parameters that `keys` need, not yet read."""

    def layer(run: LayerRun) -> dict[str, dict[str, Leaf]]:
        steps = _steps(run, arch)
        blocks: dict[str, dict[str, Leaf]] = {}
        for hf_key, (ours, _) in table.items():
            block, _, name = ours.partition(".")
            if name and steps & _WEIGHT_STEPS[ours.removesuffix("_bias")]:
                blocks.setdefault(block, {})[name] = _leaf(arch, table, hf_key, range(run.first, run.stop))
        return blocks

    wants_final_norm = any(key.site is Site.final_norm for key in keys)
    leaves = {
        ours: _leaf(arch, table, hf_key)
        for hf_key, (ours, _) in table.items()
        if "." not in ours and (wants_final_norm or not ours.startswith("final_norm"))
    }
    return leaves | {"runs": tuple(layer(run) for run in layer_runs(keys, arch.num_layers))}


def _leaf(arch: Architecture, table: KeyTable, hf_key: str, layers: Sequence[int] = (0,)) -> Leaf:
    ours, axes = table[hf_key]
    groups, _, order = axes.partition(" -> ")
    letters = groups.replace(" ", "")
    first = (order or letters)[0]
    inputs = "".join(group for group in groups.split() if first not in group) if "." in ours else ""
    return Leaf(
        key=ours,
        tensors=tuple(hf_key.replace("*", str(layer)) for layer in layers),
        hf_shape=tuple(math.prod(map(arch.axis, group)) for group in groups.split()),
        axes=tuple(map(arch.axis, letters)),
        order=tuple(letters.index(letter) for letter in order or letters),
        num_inputs=len(inputs),
    )


def num_params(leaves: LeafTree) -> int:
    """How many numbers the leaves hold."""
    return sum(leaf.size for leaf in jax.tree.leaves(leaves))


def weight_bytes(leaves: LeafTree, dtype: str, with_int8: bool) -> tuple[int, int]:
    """Bytes of the layers' matrices, in int8 if so, and of all other leaves."""
    itemsize = jnp.dtype(dtype).itemsize
    matrices = others = 0
    for leaf in jax.tree.leaves(leaves):
        if leaf.num_inputs == 0:
            others += leaf.size * itemsize
        elif with_int8:
            matrices += leaf.size + 4 * math.prod(leaf.shape[: -leaf.num_inputs])  # with the float32 scales
        else:
            matrices += leaf.size * itemsize
    return matrices, others


def flops_per_token(arch: Architecture, table: KeyTable, keys: Sequence[ActivationKey], length: int) -> int:
    """Floating-point operations of the forward pass per token slot, in rows of `length`.

    Two per weight of a matrix product, and attention over all of the row's positions (causal masking, windows and
    packing are not subtracted, as is the custom: PaLM, arXiv 2204.02311, appendix B). Norms, softmax and rotations are
    left out.
    """
    in_layers = jax.tree.leaves(needed_leaves(arch, table, keys)["runs"])
    matrices = sum(leaf.size for leaf in in_layers if leaf.num_inputs)
    num_attentions = sum(len(run) for run in layer_runs(keys, arch.num_layers) if "z" in _steps(run, arch))
    return 2 * matrices + num_attentions * 4 * length * arch.num_heads * arch.head_dim
