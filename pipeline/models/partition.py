"""How a model's weights are sharded over a mesh with the axes `data`, `context` and `tensor`.

| weights | along `tensor` | along `data` and `context`, with fsdp |
|---|---|---|
| matrices of layers | by heads, neurons (Shoeybi et al., arXiv 1909.08053) or experts | yes (arXiv 1910.02054) |
| embeddings of tokens, and head | by vocabulary, if `tensor` divides its size | by vocabulary |
| other matrices of layers, such as low-rank projections | no | yes |
| all others, which are small | no | no |

With fsdp (Rajbhandari et al.), each layer gathers its weights along `data` and `context` before it computes. A matrix
without an axis that these devices divide is divided among groups of neighbours, as many as divide one of its axes, so
each group has a copy. Vocabularies are divided along `data` only.

With `expert_group` above 1, that many neighbours along `data` divide the experts of a layer and exchange tokens
(`exchange/tokens.py`). Then each device gathers only its experts, and nothing if the group is all of `data`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Float32, Int32, PyTree

from pipeline.models.attention.context import attend_chunks
from pipeline.models.attention.spec import Attend
from pipeline.models.exchange.context import (
    chunk_ends,
    context_axis,
    device_chunks,
    halves,
    joined,
    reordered,
    row_chunks,
)
from pipeline.models.exchange.tables import look_up
from pipeline.models.layers import BlockWeights, LayerWeights
from pipeline.models.leaves import Leaf
from pipeline.models.quantised_weights import QuantisedWeight
from pipeline.models.weight_specs import TENSOR_AXES, WeightKind, WeightSpec, weight_spec

_ROWS = PartitionSpec("data", "context")  # of [B, T, ...]
TABLE_ROWS = ("copies", "data")  # of the rows' axis in the mesh of a divided table
_EXPERT_ROWS = PartitionSpec(("data", "experts"))  # in the `_expert_mesh`
_EXPERTS = ("tensor", "experts")


class ExpertShare(NamedTuple):
    """The experts that a device computes alone, or a group of devices together."""

    device: jax.Device  # one of those that compute
    first: int | Int32[Array, ""] = 0  # the number of the first one
    group: int = 1
    axis: str = "experts"  # the mesh axis of the group
    mesh_axes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Partition:
    """How a model is divided over a mesh. Without a mesh, it is not divided."""

    mesh: Mesh | AbstractMesh | None = None  # an abstract mesh suffices for shapes of shards
    fsdp: bool = False
    expert_group: int = 1  # only with fsdp: neighbours along `data` that exchange tokens; divides the experts

    @property
    def context(self) -> int:
        """The number of devices that divide the positions of a row."""
        return 1 if self.mesh is None else self.mesh.shape["context"]

    @property
    def device(self) -> jax.Device:
        """The first device of a mesh that is not abstract. All are of one kind."""
        return jax.devices()[0] if self.mesh is None else self.mesh.devices.flat[0]

    @property
    def is_on_gpus(self) -> bool:
        return isinstance(self.mesh, Mesh) and self.device.platform == "gpu"

    @property
    def _expert_mesh(self) -> Mesh | AbstractMesh:
        """The mesh with `data` divided into expert groups of neighbours."""
        return self.mesh_with(self.mesh.shape["data"] // self.expert_group, experts=self.expert_group)

    def over_context(self, attend: Attend) -> Attend:
        """`attend`, or another function of attention's inputs, for rows whose positions are divided along `context`."""
        return attend if self.context == 1 else partial(attend_chunks, attend, self.mesh)

    def leaf_sharding(self, leaf: Leaf) -> NamedSharding:
        """The sharding of a leaf. The layer axis of a stack is never divided."""
        axes = self._tensor_axes(leaf.spec, leaf.layer_shape)
        axis, group = self._fsdp_axis(leaf, axes)
        if "V" in leaf.spec.logical_axes:
            vocabulary, group = self.vocabulary(leaf.shape[0], not leaf.spec.is_bias)
            return NamedSharding(self.mesh_with(group, context=self.context), PartitionSpec(vocabulary))
        if self._exchanges(leaf.spec):
            axes[0] = _EXPERTS
            axes[axis] = (*_EXPERTS, "data") if axis == 0 else "data"
            mesh = self.mesh_with(group, experts=self.expert_group)
        else:
            axes[axis] = "data" if group > 1 else axes[axis]
            mesh = self.mesh_with(group) if group > 1 else self.mesh
        return NamedSharding(mesh, PartitionSpec(*[None] * leaf.is_stacked, *axes))

    def gather(self, weights: LayerWeights) -> LayerWeights:
        """Traced: one layer's weights, gathered along `data` and `context`."""
        if not self.fsdp:
            return weights

        def gathered(spec: WeightSpec, weight: Array | QuantisedWeight) -> Array | QuantisedWeight:
            if isinstance(weight, QuantisedWeight):
                return replace(weight, values=gathered(spec, weight.values), scale=gathered(spec, weight.scale))
            sharding = NamedSharding(self.mesh, PartitionSpec(*self._tensor_axes(spec, weight.shape)))
            if self._exchanges(spec):
                sharding = NamedSharding(self._expert_mesh, PartitionSpec(_EXPERTS))
            return jax.lax.with_sharding_constraint(weight, sharding)

        return {
            block: {name: gathered(weight_spec(f"{block}.{name}"), weight) for name, weight in block_weights.items()}
            for block, block_weights in weights.items()
        }

    def token_vectors(
        self, table: Float[Array, " V *D"], ids: Int32[Array, "B T"], columns: slice = slice(None)
    ) -> Float[Array, "B T *columns"]:
        """Traced: the `columns` of the ids' vectors."""
        if not self.fsdp:
            return table[ids, columns]
        vocabulary, group = self.vocabulary(len(table))
        if group == 1:
            return table[ids, columns]
        mesh = self.mesh_with(group, context=self.context)
        rows = PartitionSpec(TABLE_ROWS, context_axis(self.mesh, ids.shape[1]))

        def on_device(table: Array, ids: Array) -> Array:
            if "tensor" not in vocabulary:
                return look_up(table, ids, "data", columns)
            first = jax.lax.axis_index("tensor") * len(table) * group
            return jax.lax.psum(look_up(table, ids - first, "data", columns), "tensor")

        in_specs = PartitionSpec(vocabulary), rows
        return jax.shard_map(on_device, mesh=mesh, in_specs=in_specs, out_specs=rows, check_vma=False)(table, ids)

    def residual(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Traced: the residual stream, replicated along `tensor`. Otherwise XLA would divide it, and gather it twice
        per layer."""
        if self.mesh is None or (self.mesh.shape["tensor"] == 1 and self.context == 1):
            return x
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, _ROWS))

    def by_rows(self, compute: Callable[..., PyTree], inputs: PyTree, *weights: Array) -> PyTree:
        """Traced: `compute(inputs, *weights)` on each device's rows. For `top_k` and sorting, for which XLA would
        gather all devices' rows. The weights are replicated."""
        if self.mesh is None:
            return compute(inputs, *weights)
        in_specs = _ROWS, *[PartitionSpec()] * len(weights)
        # check_vma=False: JAX does not track over which axes a loop's outputs vary.
        mapped = jax.shard_map(compute, mesh=self.mesh, in_specs=in_specs, out_specs=_ROWS, check_vma=False)
        return mapped(inputs, *weights)

    def by_rows_and_heads(
        self, compute: Callable[[Int32[Array, "B T"], PyTree], PyTree], segments: Int32[Array, "B T"], heads: PyTree
    ) -> PyTree:
        """Traced: `compute(segments, heads)` on each device's rows and heads. Heads are the third axis of all arrays in
        `heads` and in the result.

        If positions are divided, the devices along `context` exchange positions for heads: each computes whole rows.
        """
        if self.mesh is None:
            return compute(segments, heads)
        context, length = self.context, segments.shape[1]

        def on_device(segments: Array, heads: PyTree) -> PyTree:
            if context == 1:
                return compute(segments, heads)
            rows = jax.tree.map(partial(reordered, chunks=row_chunks(context, length)), (segments, heads))
            return jax.tree.map(partial(reordered, chunks=device_chunks(context, length)), compute(*rows))

        by_heads = PartitionSpec("data", None, "tensor" if context == 1 else ("context", "tensor"))
        return jax.shard_map(
            on_device, mesh=self.mesh, in_specs=(PartitionSpec("data"), by_heads), out_specs=by_heads, check_vma=False
        )(segments, heads)

    def with_earlier(
        self,
        compute: Callable[[Array, Array, Array], Array],
        num_earlier: int,
        x: Float[Array, "B T *heads"],
        weights: Float[Array, "*heads c"],
        segments: Int32[Array, "B T"],
    ) -> Float32[Array, "B T *heads"]:
        """Traced: `compute(x, weights, segments)`, where a position depends on so many earlier ones."""
        if self.context == 1:
            return compute(x, weights, segments)

        def on_device(x: Array, weights: Array, segments: Array) -> Array:
            reached = map(joined, chunk_ends((x, segments), num_earlier), halves((x, segments)))
            return joined(*(compute(x, weights, segments)[:, num_earlier:] for x, segments in reached))

        heads = PartitionSpec("data", "context", "tensor")
        return jax.shard_map(
            on_device, mesh=self.mesh, in_specs=(heads, PartitionSpec("tensor"), _ROWS), out_specs=heads
        )(x, weights, segments)

    def over_experts(
        self, compute: Callable[[PyTree, BlockWeights, ExpertShare], PyTree], inputs: PyTree, weights: BlockWeights
    ) -> PyTree:
        """Traced: like `by_rows`, but each device computes its own experts only, and the results are summed over
        `tensor`. It calls `compute(inputs, weights, share)` with these experts' weights, [E, ...]."""
        if self.mesh is None:
            return compute(inputs, weights, ExpertShare(self.device))
        group = self.expert_group
        mesh, rows, experts = self.mesh, _ROWS, "tensor"
        if group > 1:
            mesh, rows, experts = self._expert_mesh, _EXPERT_ROWS, _EXPERTS

        def on_device(inputs: PyTree, weights: BlockWeights) -> PyTree:
            num_experts = jax.tree.leaves(weights)[0].shape[0] * group
            first = jax.lax.axis_index("tensor") * num_experts
            outputs = compute(inputs, weights, ExpertShare(self.device, first, group, mesh_axes=mesh.axis_names))
            return jax.lax.psum(outputs, "tensor")

        in_specs = rows, PartitionSpec(experts)
        return jax.shard_map(on_device, mesh=mesh, in_specs=in_specs, out_specs=rows, check_vma=False)(inputs, weights)

    def _tensor_axes(self, spec: WeightSpec, shape: tuple[int, ...]) -> list[str | None]:
        """The mesh axis of each axis of one layer's weight, or of its scales, which have only the first axes. An int4
        weight has one axis more, and its groups are not divided if `tensor` does not divide their number."""
        tensor = self.mesh.shape["tensor"]
        if spec.kind in (WeightKind.norm, WeightKind.control) or tensor == 1:
            return [None] * len(shape)
        letters = spec.logical_axes.ljust(len(shape))
        is_divided = (
            letter in TENSOR_AXES and size % tensor == 0 for letter, size in zip(letters, shape, strict=False)
        )
        return ["tensor" if divided else None for divided in is_divided]

    def vocabulary(self, size: int, is_matrix: bool = True) -> tuple[tuple[str, ...], int]:
        """The mesh axes that divide a vocabulary of `size` entries, and the number of devices along `data` that do. A
        bias is small, so not divided along `data`."""
        tensor = self.mesh.shape["tensor"]
        axes = ("tensor",) if tensor > 1 and size % tensor == 0 else ()
        entries = size // tensor if axes else size
        group = math.gcd(entries, self.mesh.shape["data"]) if self.fsdp and is_matrix else 1
        return (*axes, "data") if group > 1 else axes, group

    def _fsdp_axis(self, leaf: Leaf, mesh_axes: list[str | None]) -> tuple[int, int]:
        """The axis of a layer's matrix that most devices along `data` and `context` divide (of several, the largest; of
        experts, the last: the inputs), and the number of these devices; 1 for other weights. Within a group that
        exchanges tokens, of several the first: a process reads the experts of its devices.

        On GPUs, of several the first one, along which they gather. XLA would transpose stacks that are divided along
        another one before each step's loop over layers: 6 GiB per device for Llama-3-70B on 8 GPUs.
        """
        if not self.fsdp or not leaf.is_matrix:
            return 0, 1
        shape = leaf.scale_shape[leaf.is_stacked :] if leaf.is_grouped else leaf.layer_shape
        if self._exchanges(leaf.spec):
            sizes = shape[0] // (self.mesh.shape["tensor"] * self.expert_group), *shape[1:]
            groups = [math.gcd(size, self.mesh.shape["data"] // self.expert_group) for size in sizes]
            return groups.index(max(groups)), max(groups)
        groups = {
            axis: math.gcd(size, self.mesh.shape["data"] * self.context)
            for axis, size in enumerate(shape)
            if mesh_axes[axis] is None
        }
        sizes = range(len(leaf.layer_shape)) if "E" in leaf.spec.logical_axes else leaf.layer_shape
        axis = max(groups, key=lambda axis: (groups[axis], self.is_on_gpus and axis == 0, sizes[axis]))
        return axis, groups[axis]

    def _exchanges(self, spec: WeightSpec) -> bool:
        """Whether a group divides this weight's experts, which are its first axis."""
        is_divided = spec.kind is WeightKind.matrix and "E" in spec.logical_axes
        return self.expert_group > 1 and is_divided

    def mesh_with(self, data: int, **others: int) -> Mesh | AbstractMesh:
        """The mesh of the same devices, in the same order, with other axes: `data` of this size, `others` and `tensor`.
        The axis `copies`, before them, has groups that each hold a copy."""
        sizes = {"data": data, **others, "tensor": self.mesh.shape["tensor"]}
        sizes = {"copies": self.mesh.size // math.prod(sizes.values()), **sizes}
        names, types = tuple(sizes), (AxisType.Auto,) * len(sizes)
        if isinstance(self.mesh, AbstractMesh):
            return AbstractMesh(tuple(sizes.values()), names, types)
        return Mesh(self.mesh.devices.reshape(*sizes.values()), names, types)
