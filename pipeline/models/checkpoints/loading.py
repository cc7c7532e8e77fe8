"""From a checkpoint's tensors to the arrays of `decoder.Params`."""

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array
from tqdm import tqdm

from pipeline.core.errors import CheckpointError
from pipeline.models.architecture import Architecture, Axis, KeyTable, our_keys
from pipeline.models.checkpoints.checkpoint import Checkpoint, current_name
from pipeline.models.checkpoints.leaf_reading import Index, read_int8, read_leaf
from pipeline.models.checkpoints.safetensors_file import FLOAT_DTYPES
from pipeline.models.decoder import Params
from pipeline.models.int8_weights import Int8Weight, is_int8
from pipeline.models.leaves import Leaf, LeafTree
from pipeline.models.weight_specs import layer_steps, weight_spec

_LOADING_THREADS = 4  # leaves loaded at a time; the host holds each until it is on the devices
_IGNORED_TENSORS = (  # of a layer: constants, stored by older versions of transformers
    "self_attn.rotary_emb.inv_freq",
    "attention.rotary_emb.inv_freq",
    *(f"{attention}.{mask}" for attention in ("attn", "attention") for mask in ("bias", "masked_bias")),
)
_MAX_NAMED = 20  # tensors in a message

Placement = Callable[[Leaf], Sharding]
"""The sharding of a leaf."""


def check_tensors(checkpoint: Checkpoint, arch: Architecture, table: KeyTable, leaves: LeafTree) -> None:
    """Compares the leaves with the checkpoint.

    Raises CheckpointError that names the tensors which are missing, of another shape or kind, or unexpected: not of
    this family, but in a layer that is needed, or in a layer that the model does not have.
    """
    expected = {checkpoint.full_name(name): leaf.hf_shape for leaf in jax.tree.leaves(leaves) for name in leaf.tensors}
    problems = []
    for name, shape in expected.items():
        info = checkpoint.info(name)
        if info is None:
            problems.append(f"{name} is missing")
        elif info.shape != shape:
            problems.append(f"{name} has shape {info.shape}, expected {shape}")
        elif info.dtype not in FLOAT_DTYPES:
            problems.append(f"{name} has dtype {info.dtype}, expected {', '.join(FLOAT_DTYPES)}")
    problems += [f"{name} is unexpected" for name in _unexpected(checkpoint, arch, table, set(expected))]
    if problems:
        named = [*problems[:_MAX_NAMED], *([f"and {len(problems) - _MAX_NAMED} more"] * (len(problems) > _MAX_NAMED))]
        raise CheckpointError(
            f"{checkpoint.where}: the weights are not those that its config.json describes: {'; '.join(named)}. "
            f"Download both again, from one place."
        )


def _unexpected(checkpoint: Checkpoint, arch: Architecture, table: KeyTable, expected: set[str]) -> Iterator[str]:
    layers = next(key for key in table if "*" in key).partition("*")[0]
    start = checkpoint.prefix + layers
    of_layer = {is_sparse: _tensors_of_layer(arch, table, is_sparse) for is_sparse in (False, True)}
    needed_layers = {name.removeprefix(start).split(".")[0] for name in expected if name.startswith(start)}
    for name in checkpoint.file_of:
        layer, _, rest = name.removeprefix(start).partition(".")
        if not name.startswith(start) or rest in _IGNORED_TENSORS:
            continue
        is_beyond = not re.fullmatch("[0-9]{1,9}", layer) or int(layer) >= arch.num_layers
        if is_beyond or (layer in needed_layers and current_name(rest) not in of_layer[arch.is_sparse(int(layer))]):
            yield f"{name:.200}"


def _tensors_of_layer(arch: Architecture, table: KeyTable, is_sparse: bool) -> set[str]:
    """The HF keys, without the layer's prefix, of all tensors that a dense or a sparse layer has."""
    num_experts = arch.axis_size(Axis.experts) if is_sparse else 1
    steps = layer_steps(is_sparse).keys()
    hf_keys = (hf_key for hf_key, entry in table.items() for key in our_keys(entry) if weight_spec(key).steps & steps)
    names = (hf_key.partition("*.")[2] for hf_key in hf_keys)
    return {name.replace("#", str(expert)) for name in names for expert in range(num_experts)}


def load_params(
    checkpoint: Checkpoint, leaves: LeafTree, dtype: str, place: Placement, progress: bool, with_int8: bool = False
) -> Params:
    """The parameters on the devices, in `dtype`, with `with_int8` the layers' matrices in int8. Every process reads the
    parts that its devices hold.

    The host holds at most a few leaves at a time, on their way to the devices, and a piece of a tensor for each.
    """

    def load(leaf: Leaf) -> Array | Int8Weight:
        if with_int8 and is_int8(leaf):
            weight = _load_int8(checkpoint, leaf, place(leaf))
        else:
            read = partial(read_leaf, checkpoint, leaf, np.dtype(dtype))
            weight = jax.make_array_from_callback(leaf.shape, place(leaf), _once_per_part(read, leaf.shape))
        return jax.block_until_ready(weight)  # frees the host's copy

    return build_params(load, leaves, "loading weights", progress, _LOADING_THREADS)


def abstract_params(leaves: LeafTree, dtype: str, place: Placement, with_int8: bool = False) -> Params:
    """The shapes and shardings of what `load_params` returns; reads nothing, and needs no device."""

    def abstract(leaf: Leaf) -> jax.ShapeDtypeStruct | Int8Weight:
        sharding = place(leaf)
        if not (with_int8 and is_int8(leaf)):
            return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding)
        scale_shape = leaf.shape[: -leaf.num_inputs]
        return Int8Weight(
            jax.ShapeDtypeStruct(leaf.shape, np.int8, sharding=sharding),
            jax.ShapeDtypeStruct(scale_shape, np.float32, sharding=without_inputs(sharding, len(scale_shape))),
        )

    return jax.tree.map(abstract, leaves)


def _load_int8(checkpoint: Checkpoint, leaf: Leaf, sharding: Sharding) -> Int8Weight:
    """An int8 weight. Its scales are sharded like its output channels; each part is read once for both."""
    scale_shape = leaf.shape[: -leaf.num_inputs]
    scales: dict[tuple, np.ndarray] = {}

    def channels(index: Index) -> tuple:
        return tuple(part.indices(size) for part, size in zip(index[: len(scale_shape)], scale_shape, strict=True))

    def read(index: Index) -> np.ndarray:
        values, scales[channels(index)] = read_int8(checkpoint, leaf, index)
        return values

    values = jax.make_array_from_callback(leaf.shape, sharding, _once_per_part(read, leaf.shape))
    scale_sharding = without_inputs(sharding, len(scale_shape))
    return Int8Weight(
        values, jax.make_array_from_callback(scale_shape, scale_sharding, lambda index: scales[channels(index)])
    )


def _once_per_part(read: Callable[[Index], np.ndarray], shape: tuple[int, ...]) -> Callable[[Index], np.ndarray]:
    """`read` for JAX, which calls it for each device: devices with the same part share one result."""
    parts: dict[tuple, np.ndarray] = {}

    def read_once(index: Index) -> np.ndarray:
        part = tuple(axis.indices(size) for axis, size in zip(index, shape, strict=True))
        if part not in parts:
            parts[part] = read(index)
        return parts[part]

    return read_once


def without_inputs(sharding: Sharding, num_axes: int) -> Sharding:
    """The sharding of an array that has only the first `num_axes` axes."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:num_axes]))
    return sharding


def build_params(
    make: Callable[[Leaf], Array | Int8Weight], leaves: LeafTree, label: str, progress: bool, threads: int
) -> Params:
    """Makes every leaf, up to `threads` of them at a time."""
    flat, structure = jax.tree.flatten(leaves)
    total = sum(leaf.size for leaf in flat)
    arrays = []
    with (
        tqdm(total=total, desc=label, unit=" parameters", unit_scale=True, disable=not progress) as bar,
        ThreadPoolExecutor(threads) as pool,
    ):
        for leaf, array in zip(flat, pool.map(make, flat), strict=True):
            arrays.append(array)
            bar.update(leaf.size)
    return jax.tree.unflatten(structure, arrays)
