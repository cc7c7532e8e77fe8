"""From a checkpoint's tensors to the arrays of `decoder.Params`."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import numpy as np
from jax.sharding import Sharding
from jaxtyping import Array
from tqdm import tqdm

from pipeline.errors import CheckpointError
from pipeline.models.architecture import Architecture, KeyTable
from pipeline.models.checkpoint import Checkpoint, current_name
from pipeline.models.decoder import Params
from pipeline.models.leaves import Leaf, LeafTree
from pipeline.models.safetensors_file import FLOAT_DTYPES

_LOADING_THREADS = 4  # leaves on their way at a time; each needs its own size on the host for that long
_IGNORED_TENSORS = (  # of a layer: constants, stored by older versions of transformers
    "self_attn.rotary_emb.inv_freq",
    "attention.rotary_emb.inv_freq",
    *(f"{attention}.{mask}" for attention in ("attn", "attention") for mask in ("bias", "masked_bias")),
)


def check_tensors(checkpoint: Checkpoint, arch: Architecture, table: KeyTable, leaves: LeafTree) -> None:
    """Compares what the leaves need with what the checkpoint has.

    Raises CheckpointError that names every tensor which is missing, of another shape or kind, or unexpected: not of
    this family, but in a layer that is needed, or in a layer that the model does not have.
    """
    prefix = checkpoint.prefix
    expected = {prefix + name: leaf.hf_shape for leaf in jax.tree.leaves(leaves) for name in leaf.tensors}
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
        raise CheckpointError(
            f"{checkpoint.where}: the weights are not those that its config.json describes: {'; '.join(problems)}. "
            f"Download both again, from one place."
        )


def _unexpected(checkpoint: Checkpoint, arch: Architecture, table: KeyTable, expected: set[str]) -> Iterator[str]:
    layers = next(key for key in table if "*" in key).partition("*")[0]
    start = checkpoint.prefix + layers
    needed_layers = {name.removeprefix(start).split(".")[0] for name in expected if name.startswith(start)}
    for name in checkpoint.file_of:
        layer, _, rest = name.removeprefix(start).partition(".")
        if not name.startswith(start) or rest in _IGNORED_TENSORS:
            continue
        is_beyond = not layer.isdigit() or int(layer) >= arch.num_layers
        if is_beyond or (layer in needed_layers and f"{layers}*.{current_name(rest)}" not in table):
            yield name


def load_params(checkpoint: Checkpoint, leaves: LeafTree, dtype: str, sharding: Sharding, progress: bool) -> Params:
    """The parameters on the devices, in `dtype`; every process reads the parts that its devices hold.

    On the host lie at most a few leaves at a time.
    """

    def load(leaf: Leaf) -> Array:
        return jax.make_array_from_callback(leaf.shape, sharding, partial(read_leaf, checkpoint, leaf, np.dtype(dtype)))

    return build_params(load, leaves, "loading weights", progress, _LOADING_THREADS)


def read_leaf(checkpoint: Checkpoint, leaf: Leaf, dtype: np.dtype, index: tuple[slice, ...]) -> np.ndarray:
    """A part of a leaf: only the rows of HF's first axis that it covers are read."""
    of_axis = dict(zip(leaf.order, index[leaf.is_stacked :], strict=True))
    start, stop, _ = of_axis[0].indices(leaf.axes[0])
    rows_per_item = leaf.hf_shape[0] // leaf.axes[0]
    inner = (slice(None), *(of_axis[axis] for axis in range(1, len(leaf.axes))))

    def part(tensor: str) -> np.ndarray:
        rows = checkpoint.rows(checkpoint.prefix + tensor, start * rows_per_item, stop * rows_per_item)
        return rows.reshape(stop - start, *leaf.axes[1:])[inner].transpose(leaf.order)

    if not leaf.is_stacked:
        return part(leaf.tensors[0]).astype(dtype, order="C")
    tensors = leaf.tensors[index[0]]
    first = part(tensors[0])
    stack = np.empty((len(tensors), *first.shape), dtype)
    stack[0] = first
    for i, tensor in enumerate(tensors[1:], start=1):
        stack[i] = part(tensor)
    return stack


def build_params(make: Callable[[Leaf], Array], leaves: LeafTree, label: str, progress: bool, threads: int) -> Params:
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
