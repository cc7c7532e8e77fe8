"""How a model's weights are sharded over a mesh with the axes `data` and `tensor`.

Along `tensor` a layer's matrices are divided by heads, by neurons (Shoeybi et al., arXiv 1909.08053) and by experts,
also while the layer computes. With fsdp they are divided along `data` too, and each layer gathers its weights before it
computes (Rajbhandari et al., arXiv 1910.02054), but for embeddings, since gathering one would take the memory that
dividing it saves. Along `tensor`, embedding and head are divided by vocabulary where it is a multiple: a lookup adds up
what each device has. All other weights are small, and replicated; latent attention has some that are matrices.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int32, PyTree

from pipeline.models.architecture import Axis
from pipeline.models.int8_weights import Int8Weight
from pipeline.models.layers import LayerWeights, Weights
from pipeline.models.leaves import Leaf
from pipeline.models.weight_specs import TENSOR_AXES, Kind, WeightSpec, weight_spec


@dataclass(frozen=True)
class Partition:
    """How one model is divided over one mesh; without a mesh, it is not divided."""

    mesh: Mesh | None = None
    fsdp: bool = False

    def leaf_sharding(self, leaf: Leaf) -> NamedSharding:
        """The sharding of a leaf. The axis of a stack of layers is never divided."""
        axes = self._tensor_axes(leaf.spec, len(leaf.layer_shape))
        if Axis.vocab in leaf.spec.logical_axes and leaf.shape[0] % self.mesh.shape["tensor"] == 0:
            axes[0] = "tensor"
        fsdp_axis = self._fsdp_axis(leaf, axes)
        if fsdp_axis is not None:
            axes[fsdp_axis] = "data"
        return NamedSharding(self.mesh, PartitionSpec(*[None] * leaf.is_stacked, *axes))

    def gather(self, weights: LayerWeights) -> LayerWeights:
        """Traced: one layer's weights, gathered along `data`, as the layer computes with them."""
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
        """Traced: the residual stream, replicated along `tensor`. XLA would divide it and gather it twice a layer."""
        if self.mesh is None or self.mesh.shape["tensor"] == 1:
            return x
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec("data")))

    def by_rows(self, compute: Callable[..., PyTree], inputs: PyTree, *weights: Array) -> PyTree:
        """Traced: `compute(inputs, *weights)` of each device's rows, for what XLA would compute of all devices' rows
        together: the largest numbers, and what is sorted. The weights are not divided."""
        if self.mesh is None:
            return compute(inputs, *weights)
        return self._divided(compute, *[PartitionSpec()] * len(weights))(inputs, *weights)

    def by_rows_and_heads(
        self, compute: Callable[[Int32[Array, "B T"], PyTree], PyTree], segments: Int32[Array, "B T"], heads: PyTree
    ) -> PyTree:
        """Traced: `compute(segments, heads)` of each device's rows and heads. Heads are the third axis of all arrays of
        `heads`, and of those that come out."""
        if self.mesh is None:
            return compute(segments, heads)
        by_heads = PartitionSpec("data", None, "tensor")
        return jax.shard_map(
            compute, mesh=self.mesh, in_specs=(PartitionSpec("data"), by_heads), out_specs=by_heads, check_vma=False
        )(segments, heads)

    def over_experts(
        self, compute: Callable[[PyTree, Weights, int | Int32[Array, ""]], PyTree], inputs: PyTree, weights: Weights
    ) -> PyTree:
        """Traced: as `by_rows`, `compute(inputs, weights, first)` of the experts from `first` on whose weights a device
        has, summed over devices."""
        if self.mesh is None:
            return compute(inputs, weights, 0)

        def on_device(inputs: PyTree, weights: Weights) -> PyTree:
            num_experts = jax.tree.leaves(weights)[0].shape[0]
            outputs = compute(inputs, weights, jax.lax.axis_index("tensor") * num_experts)
            return jax.lax.psum(outputs, "tensor")

        return self._divided(on_device, PartitionSpec("tensor"))(inputs, weights)

    def _divided(self, compute: Callable[..., PyTree], *specs: PartitionSpec) -> Callable[..., PyTree]:
        """`specs` are those of the inputs after the first, which has rows, as what comes out."""
        rows = PartitionSpec("data")
        # check_vma=False: as for attention, JAX does not track over which axes a loop's outputs vary.
        return jax.shard_map(compute, mesh=self.mesh, in_specs=(rows, *specs), out_specs=rows, check_vma=False)

    def _tensor_axes(self, spec: WeightSpec, num_axes: int) -> list[str | None]:
        """The mesh axis of each axis of one layer's weight. An int8 weight's scale has only the first axes."""
        if spec.kind in (Kind.norm, Kind.control) or self.mesh.shape["tensor"] == 1:
            return [None] * num_axes
        return ["tensor" if axis in TENSOR_AXES else None for axis in spec.logical_axes[:num_axes]]

    def _fsdp_axis(self, leaf: Leaf, mesh_axes: list[str | None]) -> int | None:
        """The largest axis of a layer's matrix that `data` divides; None where there is none, and for other weights."""
        if not self.fsdp or leaf.num_inputs == 0:
            return None
        sizes = {
            axis: size
            for axis, size in enumerate(leaf.layer_shape)
            if mesh_axes[axis] is None and size % self.mesh.shape["data"] == 0
        }
        if Axis.experts in leaf.spec.logical_axes:
            return max(sizes, default=None)  # the last: a grouped product takes inputs before outputs
        return max(sizes, key=sizes.__getitem__, default=None)
