"""How a model's weights lie on a mesh with the axes `data` and `tensor`, and how a layer has them when it computes.

Along `tensor` a layer's matrices are divided by heads and by neurons (Shoeybi et al., arXiv 1909.08053), and stay so.
With fsdp they are divided along `data` too, and a layer gathers its own when its turn comes (Rajbhandari et al., arXiv
1910.02054). Embeddings, norms and most biases lie on every device: they are small, and an embedding that had to be
gathered would take the memory that dividing it saves.
"""

from dataclasses import dataclass

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from pipeline.models.int8_weights import Int8Weight
from pipeline.models.layers import LayerWeights
from pipeline.models.leaves import Leaf

_TENSOR_AXIS = {
    "attention.qkv": 0,
    "attention.q": 0,
    "attention.k": 0,
    "attention.v": 0,
    "attention.o": 1,
    "mlp.gate": 0,
    "mlp.up": 0,
    "mlp.down": 1,
}
"""The axis of heads or neurons in one layer's matrix. A bias has the matrix's first axes, and is divided likewise."""


@dataclass(frozen=True)
class Partition:
    """The division of one model over one mesh; without a mesh, nothing is divided."""

    mesh: Mesh | None = None
    fsdp: bool = False

    def of_leaf(self, leaf: Leaf) -> NamedSharding:
        """Where a leaf's parts lie. The axis of a stack of layers is never divided."""
        axes = self._along_tensor(leaf.key, len(leaf.layer_shape))
        along_data = self._axis_along_data(leaf, axes)
        if along_data is not None:
            axes[along_data] = "data"
        return NamedSharding(self.mesh, PartitionSpec(*[None] * leaf.is_stacked, *axes))

    def gather(self, weights: LayerWeights) -> LayerWeights:
        """Traced, inside of the step: one layer's weights as it computes with them: whole along `data`."""
        if not self.fsdp:
            return weights

        def whole(key: str, weight: Array | Int8Weight) -> Array | Int8Weight:
            if isinstance(weight, Int8Weight):
                return Int8Weight(whole(key, weight.values), whole(key, weight.scale))
            sharding = NamedSharding(self.mesh, PartitionSpec(*self._along_tensor(key, weight.ndim)))
            return jax.lax.with_sharding_constraint(weight, sharding)

        return {
            block: {name: whole(f"{block}.{name}", weight) for name, weight in of_block.items()}
            for block, of_block in weights.items()
        }

    def residual(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Traced: the residual stream, whole along `tensor`. XLA would rather divide it and gather it twice a layer."""
        if self.mesh is None or self.mesh.shape["tensor"] == 1:
            return x
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec("data")))

    def _along_tensor(self, key: str, num_axes: int) -> list[str | None]:
        axes: list[str | None] = [None] * num_axes
        axis = _TENSOR_AXIS.get(key.removesuffix("_bias"), num_axes)
        if axis < num_axes and self.mesh.shape["tensor"] > 1:
            axes[axis] = "tensor"
        return axes

    def _axis_along_data(self, leaf: Leaf, taken: list[str | None]) -> int | None:
        """The largest axis of a layer's matrix that divides; None for everything else."""
        if not self.fsdp or leaf.num_inputs == 0:
            return None
        sizes = {
            axis: size
            for axis, size in enumerate(leaf.layer_shape)
            if taken[axis] is None and size % self.mesh.shape["data"] == 0
        }
        return max(sizes, key=sizes.__getitem__, default=None)
