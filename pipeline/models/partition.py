"""How a model's weights are sharded over a mesh with the axes `data` and `tensor`.

| weights | along `tensor` | along `data`, with fsdp |
|---|---|---|
| matrices of layers | by heads, neurons (Shoeybi et al., arXiv 1909.08053) or experts | yes (arXiv 1910.02054) |
| embedding and head | by vocabulary, if `tensor` divides its size | no |
| other matrices of layers, such as low-rank projections | no | yes |
| all others, which are small | no | no |

With fsdp (Rajbhandari et al.), each layer gathers its weights along `data` before it computes. A matrix without an axis
that `data` divides is divided among groups of neighbours, as many as divide one of its axes, so each group has a copy.
Embeddings are not divided along `data`, since gathering one would need the memory that dividing it saves.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int32, PyTree

from pipeline.models.int8_weights import Int8Weight
from pipeline.models.layers import BlockWeights, LayerWeights
from pipeline.models.leaves import Leaf
from pipeline.models.weight_specs import TENSOR_AXES, WeightKind, WeightSpec, weight_spec


@dataclass(frozen=True)
class Partition:
    """How a model is divided over a mesh. Without a mesh, it is not divided."""

    mesh: Mesh | AbstractMesh | None = None  # an abstract mesh suffices for shapes of shards
    fsdp: bool = False

    def leaf_sharding(self, leaf: Leaf) -> NamedSharding:
        """The sharding of a leaf. The layer axis of a stack is never divided."""
        axes = self._tensor_axes(leaf.spec, len(leaf.layer_shape))
        if "V" in leaf.spec.logical_axes and leaf.shape[0] % self.mesh.shape["tensor"] == 0:
            axes[0] = "tensor"
        axis, group = self._fsdp_axis(leaf, axes)
        if group > 1:
            axes[axis] = "data"
        return NamedSharding(self._grouped(group), PartitionSpec(*[None] * leaf.is_stacked, *axes))

    def fsdp_group(self, leaf: Leaf) -> int:
        """The number of devices along `data` that fsdp divides the leaf among; 1 if it does not."""
        return self._fsdp_axis(leaf, self._tensor_axes(leaf.spec, len(leaf.layer_shape)))[1]

    def gather(self, weights: LayerWeights) -> LayerWeights:
        """Traced: one layer's weights, gathered along `data`."""
        if not self.fsdp:
            return weights

        def gathered(spec: WeightSpec, weight: Array | Int8Weight) -> Array | Int8Weight:
            if isinstance(weight, Int8Weight):
                return replace(weight, values=gathered(spec, weight.values), scale=gathered(spec, weight.scale))
            sharding = NamedSharding(self.mesh, PartitionSpec(*self._tensor_axes(spec, weight.ndim)))
            return jax.lax.with_sharding_constraint(weight, sharding)

        return {
            block: {name: gathered(weight_spec(f"{block}.{name}"), weight) for name, weight in block_weights.items()}
            for block, block_weights in weights.items()
        }

    def residual(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Traced: the residual stream, replicated along `tensor`. Otherwise XLA would divide it, and gather it twice
        per layer."""
        if self.mesh is None or self.mesh.shape["tensor"] == 1:
            return x
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec("data")))

    def by_rows(self, compute: Callable[..., PyTree], inputs: PyTree, *weights: Array) -> PyTree:
        """Traced: `compute(inputs, *weights)` on each device's rows. For `top_k` and sorting, for which XLA would
        gather all devices' rows. The weights are replicated."""
        if self.mesh is None:
            return compute(inputs, *weights)
        return self._divided(compute, *[PartitionSpec()] * len(weights))(inputs, *weights)

    def by_rows_and_heads(
        self, compute: Callable[[Int32[Array, "B T"], PyTree], PyTree], segments: Int32[Array, "B T"], heads: PyTree
    ) -> PyTree:
        """Traced: `compute(segments, heads)` on each device's rows and heads. Heads are the third axis of all arrays in
        `heads` and in the result."""
        if self.mesh is None:
            return compute(segments, heads)
        by_heads = PartitionSpec("data", None, "tensor")
        return jax.shard_map(
            compute, mesh=self.mesh, in_specs=(PartitionSpec("data"), by_heads), out_specs=by_heads, check_vma=False
        )(segments, heads)

    def over_experts(
        self,
        compute: Callable[[PyTree, BlockWeights, int | Int32[Array, ""]], PyTree],
        inputs: PyTree,
        weights: BlockWeights,
    ) -> PyTree:
        """Traced: like `by_rows`, but each device computes its own experts only, and the results are summed over
        `tensor`. It calls `compute(inputs, weights, first)` with these experts' weights; `first` is the number of the
        first one."""
        if self.mesh is None:
            return compute(inputs, weights, 0)

        def on_device(inputs: PyTree, weights: BlockWeights) -> PyTree:
            num_experts = jax.tree.leaves(weights)[0].shape[0]
            outputs = compute(inputs, weights, jax.lax.axis_index("tensor") * num_experts)
            return jax.lax.psum(outputs, "tensor")

        return self._divided(on_device, PartitionSpec("tensor"))(inputs, weights)

    def _divided(self, compute: Callable[..., PyTree], *specs: PartitionSpec) -> Callable[..., PyTree]:
        """Maps `compute` over the mesh. The first input and the result are divided by rows, the other inputs by
        `specs`."""
        rows = PartitionSpec("data")
        # check_vma=False: JAX does not track over which axes a loop's outputs vary.
        return jax.shard_map(compute, mesh=self.mesh, in_specs=(rows, *specs), out_specs=rows, check_vma=False)

    def _tensor_axes(self, spec: WeightSpec, num_axes: int) -> list[str | None]:
        """The mesh axis of each axis of one layer's weight. An int8 weight's scale has only the first `num_axes`."""
        if spec.kind in (WeightKind.norm, WeightKind.control) or self.mesh.shape["tensor"] == 1:
            return [None] * num_axes
        return ["tensor" if axis in TENSOR_AXES else None for axis in spec.logical_axes[:num_axes]]

    def _fsdp_axis(self, leaf: Leaf, mesh_axes: list[str | None]) -> tuple[int, int]:
        """The axis of a layer's matrix that most devices divide (of several, the largest; of experts, the last: the
        inputs), and the number of these devices; 1 for other weights."""
        if not self.fsdp or not leaf.is_matrix:
            return 0, 1
        groups = {
            axis: math.gcd(size, self.mesh.shape["data"])
            for axis, size in enumerate(leaf.layer_shape)
            if mesh_axes[axis] is None
        }
        sizes = range(len(leaf.layer_shape)) if "E" in leaf.spec.logical_axes else leaf.layer_shape
        axis = max(groups, key=lambda axis: (groups[axis], sizes[axis]))
        return axis, groups[axis]

    def _grouped(self, group: int) -> Mesh | AbstractMesh:
        """The mesh, if `group` devices along `data` do not divide a weight alone: with `data` of that size."""
        data, tensor = self.mesh.shape["data"], self.mesh.shape["tensor"]
        if group in (1, data):
            return self.mesh
        sizes, names, types = (data // group, group, tensor), ("copies", "data", "tensor"), (AxisType.Auto,) * 3
        if isinstance(self.mesh, AbstractMesh):
            return AbstractMesh(sizes, names, types)
        return Mesh(self.mesh.devices.reshape(sizes), names, types)
