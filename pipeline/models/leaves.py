"""The arrays that a capture needs, and their floating-point operations, computed from config.json alone.

Letters: L layers of a stack, E experts.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import jax
from jaxtyping import PyTree

from pipeline.core.sites import FINAL_NORM, ActivationKey, Site
from pipeline.models.architecture import (
    DELTA_CHUNK,
    Architecture,
    Axis,
    DeltaNet,
    Interleaved,
    KeyTable,
    Part,
    TableEntry,
    our_keys,
)
from pipeline.models.runs import layer_runs
from pipeline.models.weight_specs import Kind, WeightSpec, weight_spec

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
    rows: range  # this weight's part of the first HF axis
    columns: slice  # this weight's part of the last HF axis
    item_rows: int | None  # if weights are interleaved: rows of the HF tensor per item of the first of `axes`
    item_part: slice  # this weight's part of those rows
    axes: tuple[int, ...]  # the sizes of this weight's part, with the HF axes split
    order: tuple[int, ...]  # the permutation from `axes` to our axes

    @property
    def num_inputs(self) -> int:
        """The number of last axes that a layer's matrix product sums over; 0 for other weights."""
        return self.spec.num_inputs

    @property
    def is_matrix(self) -> bool:
        """Whether this is a matrix of layers; only those may be int8, or divided by fsdp."""
        return self.num_inputs > 0

    def dtype(self, dtype: str) -> str:
        """The leaf's dtype in a model of this dtype. Matrices may be int8 instead."""
        return "float32" if self.spec.is_wide else dtype

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
        return (*self.stack_shape, *(self.axes[axis] for axis in self.order))

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
                if part in arch.blocks(stack[0]).parts:
                    block, _, name = key.partition(".")
                    sizes = arch.with_sizes_of(stack[0])
                    layer.setdefault(block, {})[name] = make_leaf(sizes, key, hf_key, stack, entry)
    return trunk | {"runs": tuple(layers)}


def make_leaf(
    arch: Architecture, key: str, hf_key: str, layers: Sequence[int] = (0,), entry: TableEntry | None = None
) -> Leaf:
    """The leaf of one weight of these layers. `entry`, from the `KeyTable`, contains the file's axes if they differ
    from those of the weight's `WeightSpec`, and all weights in the tensor if there are several."""
    spec = weight_spec(key)
    spec_axes, experts = spec.axes, None
    if "#" in hf_key:
        spec_axes, experts = spec_axes.replace(Axis.experts, ""), arch.axis_size(Axis.experts)
    groups = _file_axes(entry, spec_axes).split()
    letters = "".join(groups)
    our_letters = letters if spec.kind is Kind.norm else spec_axes.replace(" ", "")  # a norm may be over different axes
    layer_keys = (hf_key.replace("*", str(layer)) for layer in layers)
    tensors = (name.replace("#", str(expert)) for name in layer_keys for expert in range(experts or 1))
    hf_shape = [_size(arch, group) for group in groups]
    rows, columns = range(hf_shape[0]), slice(None)
    item_rows, item_part = None, slice(None)
    weights = our_keys(entry or key)
    if isinstance(entry, Interleaved):
        all_rows = [_item_rows(arch, _file_axes(entry, weight_spec(weight).axes).split()) for weight in weights]
        first, item_rows = sum(all_rows[: weights.index(key)]), sum(all_rows)
        item_part = slice(first, first + _item_rows(arch, groups))
        if len(groups[0]) == 1:
            hf_shape[1] = item_rows
        else:
            hf_shape[0] = item_rows * arch.axis_size(Axis(letters[0]))
            rows = range(hf_shape[0])
    elif isinstance(entry, list):
        all_rows = [_size(arch, weight_spec(weight).axes.split()[0]) for weight in weights]
        first, hf_shape[0] = sum(all_rows[: weights.index(key)]), sum(all_rows)
        rows = range(first, first + len(rows))
    elif len(weights) > 1:
        columns = slice(weights.index(key), None, len(weights))
        hf_shape[-1] *= len(weights)
    return Leaf(
        key=key,
        spec=spec,
        tensors=tuple(tensors),
        num_layers=len(layers),
        num_experts=experts,
        hf_shape=tuple(hf_shape),
        rows=rows,
        columns=columns,
        item_rows=item_rows,
        item_part=item_part,
        axes=tuple(arch.axis_size(Axis(letter)) for letter in letters),
        order=tuple(letters.index(letter) for letter in our_letters),
    )


def _file_axes(entry: TableEntry | None, spec_axes: str) -> str:
    """The axes of one weight's part of a tensor, grouped as in the file."""
    if isinstance(entry, Interleaved):
        return entry.axes or spec_axes
    return entry[1] if isinstance(entry, tuple) else spec_axes


def _item_rows(arch: Architecture, groups: Sequence[str]) -> int:
    """The rows per item of a weight's first axis, which is a whole group or the first letter of one."""
    return _size(arch, groups[1] if len(groups[0]) == 1 else groups[0][1:])


def _size(arch: Architecture, letters: str) -> int:
    return math.prod(arch.axis_size(Axis(letter)) for letter in letters)


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
        del stacks[-1]["mlp"]
    matrices = sum(_used_size(arch, leaf) for leaf in jax.tree.leaves(stacks) if leaf.is_matrix)
    attention, deltas, captured = 0, 0, {*keys}
    for layer in layers:
        sizes = arch.with_sizes_of(layer)
        window = arch.local.window if arch.is_local(layer) else None
        mean_keys = _mean_keys(arch, window, length) * (1 if attention_shares is None else attention_shares[window])
        if Part.delta in arch.blocks(layer).parts:
            deltas += _delta_flops(arch.delta)
        else:
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
    """FLOPs per token of the matrix products in `delta_net.delta_rule`, without inverting its triangular system."""
    scores = 2 * DELTA_CHUNK * 2 * delta.key_dim  # queries and keys, times the keys of the chunk
    macs_per_value_head = DELTA_CHUNK * (delta.key_dim + 2 * delta.value_dim) + 3 * delta.key_dim * delta.value_dim
    return delta.num_heads * (scores + delta.values_per_key * 2 * macs_per_value_head)


def _used_size(arch: Architecture, leaf: Leaf) -> int:
    """The number of a leaf's parameters that one token's matrix products use."""
    has_experts = Axis.experts in leaf.spec.logical_axes
    return leaf.size * arch.experts.per_token // arch.experts.num_experts if has_experts else leaf.size


def _mean_keys(arch: Architecture, window: int | None, length: int) -> float:
    """The mean number of positions that a query attends to, in a row of one document."""
    if not arch.causal:
        return length
    window = length if window is None else min(window, length)
    return window * (2 * length - window + 1) / (2 * length)
