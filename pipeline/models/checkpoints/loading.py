"""Loads a checkpoint's tensors into the arrays of `decoder.Params`."""

import math
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import jax
import numpy as np
from jax.dtypes import itemsize_bits  # int4 takes 4 bits on devices, and a byte on the host
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array
from tqdm import tqdm

from pipeline.core.errors import CheckpointError
from pipeline.models.architecture import Architecture, KeyTable, Part, our_keys
from pipeline.models.checkpoints.checkpoint import Checkpoint, current_name
from pipeline.models.checkpoints.leaf_reading import Exchange, Index, read_items, read_leaf
from pipeline.models.checkpoints.safetensors_file import shortened, tensor_problems
from pipeline.models.decoder import Params
from pipeline.models.exchange.context import MESH_AXES
from pipeline.models.leaves import Leaf, LeafTree
from pipeline.models.partition import Partition
from pipeline.models.quantised_weights import QuantisedWeight, stored_dtype
from pipeline.models.weight_specs import weight_spec

_LOADING_THREADS = 4  # leaves loaded at a time; each is in host memory until it is on the devices
_IGNORED_TENSORS = (  # constants in layers, which older versions of transformers store
    "self_attn.rotary_emb.inv_freq",
    "attention.rotary_emb.inv_freq",
    *(
        f"{attention}.{mask}"
        for attention in ("attn", "attention", "attn.attention")
        for mask in ("bias", "masked_bias")
    ),
)

T = TypeVar("T")

Placement = Callable[[Leaf], Sharding]
"""The sharding of a leaf."""

_Bounds = tuple[tuple[int, int, int], ...]
"""A part of an array: start, stop and step of each axis."""


def check_tensors(checkpoint: Checkpoint, arch: Architecture, table: KeyTable, leaves: LeafTree) -> None:
    """Compares the leaves with the checkpoint.

    Raises CheckpointError, which names the tensors that are missing, have an unexpected shape or dtype, or are not
    expected: unknown tensors of a needed layer, and tensors of a layer that the model does not have.
    """
    expected = {checkpoint.full_name(name): leaf.hf_shape for leaf in jax.tree.leaves(leaves) for name in leaf.tensors}
    problems = tensor_problems(expected, checkpoint.info)
    unexpected = [f"{name} is unexpected" for name in _unexpected(checkpoint, arch, table, set(expected))]
    if problems or unexpected:
        listed = [*shortened(problems), *shortened(unexpected)]
        raise CheckpointError(
            f"{checkpoint.where}: the weights do not match config.json: {'; '.join(listed)}. "
            f"Download both again, from the same place."
        )


def _unexpected(checkpoint: Checkpoint, arch: Architecture, table: KeyTable, expected: set[str]) -> Iterator[str]:
    layers = next(key for key in table if "*" in key).partition("*")[0]
    start = checkpoint.prefix + layers
    unused = unused_tensors(arch, table)
    ignored = {*_IGNORED_TENSORS, *(key.partition("*.")[2] for key, entry in table.items() if not our_keys(entry))}
    needed_layers = {name.removeprefix(start).split(".")[0] for name in expected if name.startswith(start)}
    for name in checkpoint.names:
        layer, _, rest = name.removeprefix(start).partition(".")
        if not name.startswith(start) or rest in ignored:
            continue
        number = int(layer) if re.fullmatch("[0-9]{1,9}", layer) else None
        if number is not None and 0 <= number - arch.num_layers < arch.num_ignored_layers:
            continue
        is_beyond = number is None or number >= arch.num_layers
        is_unused = not is_beyond and unused(name.removeprefix(checkpoint.prefix))
        if is_beyond or (layer in needed_layers and not is_unused and current_name(name) not in expected):
            yield f"{name:.200}"


def unused_tensors(arch: Architecture, table: KeyTable) -> Callable[[str], bool]:
    """Whether a tensor, named without the model's prefix, is of the keys and values of a layer that attends to another
    layer's. Transformers allows them, too."""
    parts = {hf_key: {weight_spec(key).part for key in our_keys(entry)} for hf_key, entry in table.items()}
    sharing = [str(layer) for layer in range(arch.num_layers) if arch.keys_of(layer) is not None]
    return {
        hf_key.replace("*", layer)
        for hf_key, used in parts.items()
        if used & {Part.keys, Part.values}
        for layer in sharing
    }.__contains__


def load_params(checkpoint: Checkpoint, leaves: LeafTree, dtype: str, place: Placement, progress: bool) -> Params:
    """Loads the parameters onto the devices, in `dtype` (see `Leaf.dtype`). Every process reads the parts that its
    devices hold, or as many items (see `Exchange`).

    Host memory holds at most a few leaves at a time, and a piece of a tensor for each.
    """

    def load(leaf: Leaf) -> Callable[[], Array | QuantisedWeight]:
        sharding = place(leaf)
        kept_dtype = stored_dtype(leaf.dtype(dtype), sharding)
        shapes = [leaf.shape, leaf.scale_shape] if leaf.quantised else [leaf.shape]
        shardings = [of_scales(sharding, len(shape)) for shape in shapes]
        exchange = Exchange.of(leaf, sharding)
        if exchange is not None:
            items = read_items(checkpoint, leaf, kept_dtype, exchange.items(jax.process_index()))
            divided = jax.block_until_ready([exchange.on_devices(values) for values in items])
            return lambda: _weight(leaf, map(exchange.exchanged, divided, shardings))
        indices = sharding.addressable_devices_indices_map(leaf.shape).values()
        parts = {_bounds(index, leaf.shape): index for index in indices}
        read = read_leaf(checkpoint, leaf, kept_dtype, [*parts.values()])
        weight = _weight(leaf, map(partial(_on_devices, parts), shapes, shardings, read))
        return lambda: weight

    # All processes must exchange leaves in the same order, so on one thread.
    return build_params(load, leaves, "loading weights", progress, _LOADING_THREADS, finish=lambda weight: weight())


def _weight(leaf: Leaf, arrays: Iterable[Array]) -> Array | QuantisedWeight:
    """The weight, from values and perhaps scales, once it is on the devices, which frees the host's copy."""
    values, *scales = jax.block_until_ready(list(arrays))
    return QuantisedWeight(values, *scales, leaf.is_grouped) if scales else values


def abstract_params(leaves: LeafTree, dtype: str, place: Placement) -> Params:
    """The shapes and shardings of the result of `load_params`. Reads nothing, and needs no device."""

    def abstract(leaf: Leaf) -> jax.ShapeDtypeStruct | QuantisedWeight:
        sharding, shape = place(leaf), leaf.scale_shape
        values = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype(dtype), sharding=sharding)
        if not leaf.quantised:
            return values
        scales = jax.ShapeDtypeStruct(shape, np.float32, sharding=of_scales(sharding, len(shape)))
        return QuantisedWeight(values, scales, leaf.is_grouped)

    return jax.tree.map(abstract, leaves)


@dataclass(frozen=True)
class WeightBytes:
    """The bytes of weights on each device of a mesh: those of the shards of `abstract_params`."""

    leaves: LeafTree
    dtype: str
    others: int = 0  # bytes of other arrays on each device

    def on_device(self, tensor: int = 1, data: int = 1, expert_group: int = 1, context: int = 1) -> int:
        """`tensor`, `data` and `context` are the numbers of devices along those axes; see `Partition`."""
        partition = Partition(AbstractMesh((data, context, tensor), MESH_AXES), data * context > 1, expert_group)
        arrays = jax.tree.leaves(abstract_params(self.leaves, self.dtype, partition.leaf_sharding))
        shards = ((array.sharding.shard_shape(array.shape), itemsize_bits(array.dtype)) for array in arrays)
        return self.others + sum(-(-math.prod(shape) * bits // 8) for shape, bits in shards)


def _on_devices(
    parts: Iterable[_Bounds], shape: tuple[int, ...], sharding: Sharding, values: Iterable[np.ndarray]
) -> Array:
    """An array from the values of its parts, whose bounds may have more axes."""
    by_bounds = {bounds[: len(shape)]: part for bounds, part in zip(parts, values, strict=True)}
    return jax.make_array_from_callback(shape, sharding, lambda index: by_bounds[_bounds(index, shape)])


def _bounds(index: Index, shape: tuple[int, ...]) -> _Bounds:
    return tuple(part.indices(size) for part, size in zip(index, shape, strict=True))


def of_scales(sharding: Sharding, num_axes: int) -> Sharding:
    """The sharding of an array with only the first `num_axes` axes of a weight, as scales."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:num_axes]))
    return sharding


def build_params(
    make: Callable[[Leaf], T],
    leaves: LeafTree,
    label: str,
    progress: bool,
    threads: int,
    finish: Callable[[T], Array | QuantisedWeight] = lambda array: array,
) -> Params:
    """Calls `make` for every leaf, up to `threads` at a time, and `finish` with its results, in order."""
    flat, structure = jax.tree.flatten(leaves)
    total = sum(leaf.size for leaf in flat)
    arrays = []
    with (
        tqdm(total=total, desc=label, unit=" parameters", unit_scale=True, disable=not progress) as bar,
        ThreadPoolExecutor(threads) as pool,
    ):
        for leaf, array in zip(flat, pool.map(make, flat), strict=True):
            arrays.append(finish(array))
            bar.update(leaf.size)
    return jax.tree.unflatten(structure, arrays)
