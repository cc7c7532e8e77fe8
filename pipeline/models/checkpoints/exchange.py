"""Loading leaves that fsdp divides along another axis than a file's first, without reading all rows in every process.

Each process reads other items, and the devices exchange their parts. An item is an index of the first axis of a tensor
in the file; items are numbered through all tensors of the leaf.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array

from pipeline.models.checkpoints.leaf_reading import divides_scales
from pipeline.models.leaves import Leaf


@dataclass(frozen=True)
class Exchange:
    """How the processes share the items of a leaf. The processes of a group hold the whole leaf together."""

    leaf: Leaf
    mesh: Mesh  # the leaf's, as groups, processes of a group, and the devices of a process along data and tensor
    split: int  # the axis that fsdp divides, after the leaf's item axis was moved to the front

    @classmethod
    def of(cls, leaf: Leaf, sharding: Sharding) -> Self | None:
        """None if each process can read just what its devices hold: with one process per group, or if the items
        themselves are divided. Also if an item has only some of the inputs that share a scale, and for experts of
        devices that exchange tokens: those that divide one expert are not neighbours."""
        if not isinstance(sharding, NamedSharding) or "data" not in tuple(sharding.spec):
            return None
        if sharding.mesh.axis_names[-2:] != ("data", "tensor"):
            return None
        devices = sharding.mesh.devices
        group, tensor = devices.shape[-2:]
        local = sum(device.process_index == devices.flat[0].process_index for device in devices.flat) // tensor
        axis = tuple(sharding.spec).index("data") - len(leaf.stack_shape)
        item_axis = leaf.order.index(0)
        if group % local or group == local or axis < 0 or axis == item_axis or divides_scales(leaf):
            return None
        mesh = Mesh(devices.reshape(-1, group // local, local, tensor), ("copies", "process", "data", "tensor"))
        return cls(leaf, mesh, axis + (axis < item_axis))

    @property
    def num_items(self) -> int:
        """The items of each process; the last ones may be fewer."""
        return -(-len(self.leaf.tensors) * self.leaf.axes[0] // self.mesh.shape["process"])

    def items(self, process: int) -> range:
        """The items that a process reads."""
        processes = dict.fromkeys(device.process_index for device in self.mesh.devices.flat)
        first = list(processes).index(process) % self.mesh.shape["process"] * self.num_items
        return range(len(self.leaf.tensors) * self.leaf.axes[0])[first : first + self.num_items]

    def on_devices(self, values: np.ndarray) -> Array:
        """The items of all processes, from this process's items [items, *other axes], divided by process."""
        sizes, parts, local = list(values.shape[1:]), self.mesh.shape["process"], self.mesh.shape["data"]
        spec = ["process", *[None] * len(sizes)]
        if self.split < values.ndim:  # not for scales whose inputs are divided
            sizes[self.split - 1 : self.split] = parts, local, sizes[self.split - 1] // (parts * local)
            spec[self.split : self.split + 1] = None, "data", None
        missing = self.num_items - len(values)
        values = np.pad(values, [(0, missing), *[(0, 0)] * (values.ndim - 1)]).reshape(-1, *sizes)
        by_items = NamedSharding(self.mesh, PartitionSpec(*spec))
        shape = (parts * self.num_items, *sizes)
        return jax.make_array_from_callback(shape, by_items, lambda index: values[(slice(None), *index[1:])])

    def exchanged(self, items: Array, sharding: NamedSharding) -> Array:
        """The leaf, or its scales, from the result of `on_devices`. Every process must call it for the same leaves in
        the same order."""
        leaf, split = self.leaf, self.split if "data" in tuple(items.sharding.spec) else None
        shape = (*leaf.stack_shape, leaf.axes[0])
        return _exchange(self.mesh, sharding, shape, leaf.order.index(0), split)(items)


@cache
def _exchange(
    mesh: Mesh, sharding: NamedSharding, shape: tuple[int, ...], item_axis: int, split: int | None
) -> Callable[[Array], Array]:
    """The compiled exchange, from items divided by process to a leaf's sharding. `shape` is that of all items."""

    @jax.jit
    def exchange(x: Array) -> Array:
        if split is not None:
            by_split = PartitionSpec(*[None] * split, "process", "data")
            x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, by_split))
            x = x.reshape(*x.shape[:split], -1, *x.shape[split + 3 :])
        x = x[: math.prod(shape)].reshape(*shape, *x.shape[1:])
        return jax.lax.with_sharding_constraint(jnp.moveaxis(x, len(shape) - 1, len(shape) - 1 + item_axis), sharding)

    return exchange
