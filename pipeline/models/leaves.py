"""The arrays that a capture needs, and their floating-point operations, computed from config.json alone.

Letters: L layers of a stack, E experts.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import jax
import numpy as np
from jaxtyping import PyTree

from pipeline.core.sites import FINAL_NORM, ActivationKey, Site
from pipeline.models.architecture import (
    DELTA_CHUNK,
    Architecture,
    DeltaNet,
    FileTensor,
    KeyTable,
    Part,
    TableEntry,
    our_keys,
)
from pipeline.models.quantised_weights import grouped_shape
from pipeline.models.runs import layer_runs
from pipeline.models.weight_specs import WeightKind, WeightSpec, weight_spec

_BEFORE_MLP = frozenset(takewhile(lambda site: site is not Site.mlp_in, Site))


@dataclass(frozen=True)
class Leaf:
    """One array of the parameters: a tensor of the checkpoint, or the tensors of several layers or experts, stacked."""

    key: str  # our key
    spec: WeightSpec
    tensors: tuple[str, ...]  # HF keys without prefix, ordered by layer, then by expert
    num_layers: int  # L
    num_experts: int | None  # E if each expert has its own tensor
    hf_shape: tuple[int, ...]  # of each tensor
    num_outer: int  # the number of first `axes` for each of whose items the weights of a tensor alternate; 0: none
    part: range  # this weight's part of such an item, or if there are none, of the first HF axis
    item_size: int  # of all weights
    axes: tuple[int, ...]  # the sizes of this weight's axes, in the file's order
    order: tuple[int, ...]  # the permutation from `axes` to our axes
    quantised: str | None = None  # of a matrix: int8 or int4; None: it is not

    @property
    def item_rows(self) -> int:
        """The rows of the first HF axis that are read for an item of the first of `axes`."""
        return (self.hf_shape[0] if self.num_outer else len(self.part)) // self.axes[0]

    @property
    def num_inputs(self) -> int:
        """The number of last axes that a layer's matrix product sums over; 0 for other weights."""
        return self.spec.num_inputs

    @property
    def is_matrix(self) -> bool:
        """Whether this is a matrix of layers; only those may be quantised, or divided by fsdp."""
        return self.num_inputs > 0

    @property
    def is_grouped(self) -> bool:
        return self.quantised == "int4"

    def dtype(self, dtype: str) -> np.dtype:
        """The leaf's dtype in a model of this dtype."""
        return np.dtype("float32" if self.spec.is_wide else self.quantised or dtype)

    @property
    def is_stacked(self) -> bool:
        """Whether the first axis is L."""
        return self.num_layers > 1

    @property
    def stack_shape(self) -> tuple[int, ...]:
        """The axes along which tensors are stacked: [L, E], one of the two, or none."""
        experts = () if self.num_experts is None else (self.num_experts,)
        return (self.num_layers, *experts) if self.is_stacked else experts

    @property
    def shape(self) -> tuple[int, ...]:
        shape = (*self.stack_shape, *(self.axes[axis] for axis in self.order))
        return grouped_shape(shape) if self.is_grouped else shape

    @property
    def inputs_per_scale(self) -> int:
        """The number of last axes of `shape` whose values share a scale, if the leaf is quantised."""
        return 1 if self.is_grouped else self.num_inputs

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """The shape of the scales of a quantised leaf."""
        return self.shape[: -self.inputs_per_scale]

    @property
    def layer_shape(self) -> tuple[int, ...]:
        """The shape of one layer's weight."""
        return self.shape[self.is_stacked :]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


LeafTree = PyTree[Leaf]
"""`decoder.Params` with a Leaf in place of each array."""


def needed_leaves(arch: Architecture, table: KeyTable, keys: Sequence[ActivationKey]) -> LeafTree:
    """Describes the parameters that `keys` need. Raises KeyError for a weight that is not in `WEIGHTS`."""
    stacks = [stack for run in layer_runs(keys, arch) for stack in run.stacks]
    trunk_parts = {Part.embed} | ({Part.layer_inputs} if stacks else set())
    trunk_parts |= {Part.final_norm} if FINAL_NORM in keys else set()
    trunk: dict[str, Leaf] = {}
    layers: list[dict[str, dict[str, Leaf]]] = [{} for _ in stacks]
    for hf_key, entry in table.items():
        for key in our_keys(entry):
            part = weight_spec(key).part
            if part in trunk_parts:
                trunk[key] = make_leaf(arch, key, hf_key, entry=entry)
            for stack, layer in zip(stacks, layers, strict=True):
                if part in arch.kind(stack[0]).parts:
                    block, _, name = key.partition(".")
                    sizes = arch.with_sizes_of(stack[0])
                    layer.setdefault(block, {})[name] = make_leaf(sizes, key, hf_key, stack, entry)
    return trunk | {"runs": tuple(layers)}


def make_leaf(
    arch: Architecture, key: str, hf_key: str, layers: Sequence[int] = (0,), entry: TableEntry | None = None
) -> Leaf:
    """The leaf of one weight of these layers. `entry`, from the `KeyTable`, contains the file's axes if they differ
    from those of the weight's `WeightSpec`, and all weights in the tensor if there are several."""
    spec, tensor = weight_spec(key), FileTensor((key,)) if entry is None or isinstance(entry, str) else entry
    experts = arch.axis_size("E") if "#" in hf_key else None

    def file_axes(weight: str) -> str:
        axes = tensor.axes or weight_spec(weight).axes
        return axes if experts is None else axes.replace("E", "")

    groups = file_axes(key).split()
    letters = "".join(groups)
    is_norm = spec.kind is WeightKind.norm  # which may be over other axes
    our_letters = letters if is_norm else spec.axes.replace(" ", "")
    layer_keys = (hf_key.replace("*", str(layer)) for layer in layers)
    sizes = [_size(arch, _part_letters(file_axes(weight), tensor.by)) for weight in tensor.weights]
    first = sum(sizes[: tensor.weights.index(key)])
    part = range(first, first + sizes[tensor.weights.index(key)])
    hf_shape = [_size(arch, group) for group in groups]
    divided = _part_group(groups, tensor.by)
    hf_shape[divided] = hf_shape[divided] // len(part) * sum(sizes)
    return Leaf(
        key=key,
        spec=spec,
        tensors=tuple(name.replace("#", str(expert)) for name in layer_keys for expert in range(experts or 1)),
        num_layers=len(layers),
        num_experts=experts,
        hf_shape=tuple(hf_shape),
        num_outer=letters.index(tensor.by) + 1 if tensor.by else 0,
        part=part,
        item_size=sum(sizes),
        axes=tuple(map(arch.axis_size, letters)),
        order=tuple(letters.index(letter) for letter in our_letters if letter in letters),
    )


def _part_letters(axes: str, by: str) -> str:
    """The axes of a weight's part of an item of `by`: of the group, those after `by`, or else the next group."""
    groups = axes[axes.index(by) + 1 :].split() if by else axes.split()
    return groups[0] if groups else ""


def _part_group(groups: list[str], by: str) -> int:
    """The number of the group of HF axes that contains these parts."""
    if not by:
        return 0
    number = next(number for number, group in enumerate(groups) if by in group)
    return number + (groups[number].endswith(by) and number + 1 < len(groups))


def _size(arch: Architecture, letters: str) -> int:
    return math.prod(map(arch.axis_size, letters))


def quantised_leaves(leaves: LeafTree, dtype: str | None) -> LeafTree:
    """The leaves with matrices of this dtype: int8, int4, or None for the model's."""
    return jax.tree.map(lambda leaf: replace(leaf, quantised=dtype if leaf.is_matrix else None), leaves)


def num_params(leaves: LeafTree) -> int:
    """The number of parameters in the leaves."""
    return sum(leaf.size for leaf in jax.tree.leaves(leaves))


def flops_per_token(
    arch: Architecture,
    table: KeyTable,
    keys: Sequence[ActivationKey],
    length: int,
    attention_shares: Mapping[int | None, float] | None = None,
) -> float:
    """Floating-point operations of the forward pass per token slot, in rows of `length`.

    Counts two per weight of a matrix product (of the experts, only those of one token), the chunks of DeltaNets, and
    attention over the positions that causal masks and windows allow in a row of one document, which is half of PaLM's
    count (arXiv 2204.02311, appendix B). `attention_shares` is the share of that attention that is computed in packed
    rows, by a layer's window (None: no window). Norms, softmax, rotations, routers and the scores of `attn_pattern` are
    not counted. In the last layer attention counts as a whole, and the MLP if a captured activation depends on it.
    """
    runs = layer_runs(keys, arch)
    layers = range(runs[-1].stop if runs else 0)
    stacks = needed_leaves(arch, table, keys)["runs"]
    if runs and not _reads_mlp(keys, layers[-1]):
        stacks[-1].pop("mlp", None)
    matrices = sum(_used_size(arch, leaf) for leaf in jax.tree.leaves(stacks) if leaf.is_matrix)
    attention, deltas, captured = 0, 0, {*keys}
    for layer in layers:
        sizes = arch.with_sizes_of(layer)
        window = arch.local.window if arch.is_local(layer) else None
        in_chunks = window is not None and arch.local.chunked  # a chunk is like a row of its length
        row = (None, min(window, length)) if in_chunks else (window, length)
        mean_keys = _mean_keys(arch, *row) * (1 if attention_shares is None else attention_shares[window])
        if Part.delta in arch.kind(layer).parts:
            deltas += _delta_flops(arch.delta)
        elif Part.attention in arch.kind(layer).parts:
            attention += 2 * mean_keys * (sizes.head_dim + sizes.value_dim)
        if ActivationKey(layer, Site.attn_entropy) in captured:  # computes the scores again
            attention += 2 * mean_keys * sizes.head_dim
        if ActivationKey(layer, Site.head_out) in captured:  # a second output projection
            attention += 2 * sizes.value_dim * arch.d_model
    if runs:
        matrices += arch.num_layers * arch.layer_inputs * arch.d_model
    return 2 * matrices + attention * arch.num_heads + deltas


def _reads_mlp(keys: Sequence[ActivationKey], last: int) -> bool:
    """Whether an activation depends on the MLP of the last layer that `keys` need."""
    return any(
        key == FINAL_NORM or key.layer > last or (key.layer == last and key.site not in _BEFORE_MLP) for key in keys
    )


def _delta_flops(delta: DeltaNet) -> int:
    """FLOPs per token of the matrix products in `delta_net.chunkwise`, without inverting its triangular system."""
    scores = 2 * DELTA_CHUNK * delta.key_dim  # queries times the keys of the chunk
    macs_per_value_head = (DELTA_CHUNK + 2 * delta.key_dim) * delta.value_dim
    if not delta.is_mamba:
        scores *= 2  # keys, too
        macs_per_value_head += DELTA_CHUNK * (delta.key_dim + delta.value_dim) + delta.key_dim * delta.value_dim
    return delta.num_heads * (scores + delta.values_per_key * 2 * macs_per_value_head)


def _used_size(arch: Architecture, leaf: Leaf) -> int:
    """The number of a leaf's parameters that one token's matrix products use."""
    has_experts = "E" in leaf.spec.logical_axes
    return leaf.size * arch.experts.per_token // arch.experts.num_experts if has_experts else leaf.size


def _mean_keys(arch: Architecture, window: int | None, length: int) -> float:
    """The mean number of positions that a query attends to, in a row of one document."""
    if not arch.causal:
        return length
    window = length if window is None else min(window, length)
    return window * (2 * length - window + 1) / (2 * length)
