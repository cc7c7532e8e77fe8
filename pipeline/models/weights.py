"""From a checkpoint's tensors to the arrays of `decoder.Params`: which are needed, and how each one is made."""

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jaxtyping import Array, UInt32
from tqdm import tqdm

from pipeline.errors import CheckpointError
from pipeline.models.architecture import Architecture, KeyTable
from pipeline.models.checkpoint import Checkpoint
from pipeline.models.decoder import LayerWeights, Params
from pipeline.models.runs import LayerRun, layer_runs
from pipeline.models.safetensors_file import FLOAT_DTYPES
from pipeline.sites import ActivationKey, Site

_LOADING_THREADS = 4  # leaves on their way at a time; each needs its own size on the host for that long
_INIT_STD = 0.02
_IGNORED_TENSORS = ("rotary_emb.inv_freq",)  # a constant, stored by older versions of transformers


@dataclass(frozen=True)
class Leaf:
    """One array of the parameters: a tensor of the checkpoint, or the same tensor of several layers, stacked."""

    key: str  # ours
    tensors: tuple[str, ...]  # HF keys without prefix
    hf_shape: tuple[int, ...]  # of each of the tensors
    layer_shape: tuple[int, ...]  # ours, of one layer

    @property
    def is_stacked(self) -> bool:
        return len(self.tensors) > 1

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.tensors), *self.layer_shape) if self.is_stacked else self.layer_shape

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def needed_leaves(arch: Architecture, table: KeyTable, keys: Sequence[ActivationKey]) -> Params:
    """The parameters that `keys` need, as a pytree of Leaf: the same structure as the arrays'."""

    def leaf(hf_key: str, layers: Iterable[int] = (0,)) -> Leaf:
        ours, axes = table[hf_key]
        groups = [[arch.axis(letter) for letter in group] for group in axes.split()]
        return Leaf(
            key=ours,
            tensors=tuple(hf_key.replace("*", str(layer)) for layer in layers),
            hf_shape=tuple(math.prod(group) for group in groups),
            layer_shape=tuple(size for group in groups for size in group),
        )

    def block(name: str, run: LayerRun) -> dict[str, Leaf]:
        leaves = [
            leaf(hf, range(run.first, run.stop)) for hf, (ours, _) in table.items() if ours.startswith(f"{name}.")
        ]
        return {leaf.key.removeprefix(f"{name}."): leaf for leaf in leaves}

    def layer(run: LayerRun) -> LayerWeights:
        return {name: block(name, run) for name in (("attention", "mlp") if run.has_mlp else ("attention",))}

    hf_key_of = {ours: hf for hf, (ours, _) in table.items()}
    leaves: Params = {
        "embed": leaf(hf_key_of["embed"]),
        "runs": tuple(layer(run) for run in layer_runs(keys, arch.num_layers)),
    }
    if any(key.site is Site.final_norm for key in keys):
        leaves["final_norm"] = leaf(hf_key_of["final_norm"])
    return leaves


def check_tensors(checkpoint: Checkpoint, arch: Architecture, table: KeyTable, leaves: Params) -> None:
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
    start = f"{checkpoint.prefix}layers."
    needed_layers = {name.removeprefix(start).split(".")[0] for name in expected if name.startswith(start)}
    for name in checkpoint.file_of:
        layer, _, rest = name.removeprefix(start).partition(".")
        if not name.startswith(start) or rest.endswith(_IGNORED_TENSORS):
            continue
        is_beyond = not layer.isdigit() or int(layer) >= arch.num_layers
        if is_beyond or (layer in needed_layers and f"layers.*.{rest}" not in table):
            yield name


def load_params(checkpoint: Checkpoint, leaves: Params, dtype: str, sharding: Sharding, progress: bool) -> Params:
    """The parameters on the devices, in `dtype`; every process reads the parts that its devices hold.

    On the host lie at most a few leaves at a time.
    """

    def load(leaf: Leaf) -> Array:
        return jax.make_array_from_callback(
            leaf.shape, sharding, partial(_read_leaf, checkpoint, leaf, np.dtype(dtype))
        )

    return _build(load, leaves, "loading weights", progress, _LOADING_THREADS)


def _read_leaf(checkpoint: Checkpoint, leaf: Leaf, dtype: np.dtype, index: tuple[slice, ...]) -> np.ndarray:
    """A part of a leaf: only the rows of the first axis that it covers are read."""
    start, stop, _ = index[leaf.is_stacked].indices(leaf.layer_shape[0])
    rows_per_item = leaf.hf_shape[0] // leaf.layer_shape[0]
    inner = (slice(None), *index[leaf.is_stacked + 1 :])

    def part(tensor: str) -> np.ndarray:
        rows = checkpoint.rows(checkpoint.prefix + tensor, start * rows_per_item, stop * rows_per_item)
        return rows.reshape(stop - start, *leaf.layer_shape[1:])[inner]

    if not leaf.is_stacked:
        return part(leaf.tensors[0]).astype(dtype)
    tensors = leaf.tensors[index[0]]
    first = part(tensors[0])
    stack = np.empty((len(tensors), *first.shape), dtype)
    stack[0] = first
    for i, tensor in enumerate(tensors[1:], start=1):
        stack[i] = part(tensor)
    return stack


def random_params(leaves: Params, seed: int, dtype: str, sharding: Sharding, progress: bool) -> Params:
    """Random parameters, made on the devices: norms are 1, everything else normal with standard deviation 0.02.

    A tensor's values depend on the seed and its HF key alone, not on what is captured or how many devices there are.
    """

    @partial(jax.jit, static_argnames=("shape",), out_shardings=sharding)
    def normal(tensor_ids: Array, shape: tuple[int, ...]) -> Array:
        element_ids = jax.lax.iota(jnp.uint32, math.prod(shape) // len(tensor_ids))
        bits = _mix(_mix(tensor_ids)[:, None] + _mix(element_ids)[None, :])
        uniform = ((bits >> 8).astype(jnp.float32) + 0.5) * 2.0**-23 - 1.0  # in (-1, 1)
        return (_INIT_STD * math.sqrt(2) * jax.lax.erf_inv(uniform)).astype(dtype).reshape(shape)

    def make(leaf: Leaf) -> Array:
        if leaf.key.endswith("norm"):
            return jnp.ones(leaf.shape, dtype, device=sharding)
        return normal(np.array([zlib.crc32(f"{seed} {name}".encode()) for name in leaf.tensors], np.uint32), leaf.shape)

    # One after the other: all processes must start the same programs in the same order.
    return _build(make, leaves, "making weights", progress, threads=1)


def _mix(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """A hash of 32 bits (Wellons' lowbias32). `jax.random` would do, but compiles 4 times as long for every shape."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _build(make: Callable[[Leaf], Array], leaves: Params, label: str, progress: bool, threads: int) -> Params:
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


def num_params(leaves: Params) -> int:
    """How many numbers the leaves hold."""
    return sum(leaf.size for leaf in jax.tree.leaves(leaves))


def flops_per_token(arch: Architecture, leaves: Params, length: int) -> int:
    """Floating-point operations of the forward pass per token slot, in rows of `length`.

    Two per weight of a matrix product, and attention over all of the row's positions (causal masking and packing are
    not subtracted, as is the custom: PaLM, arXiv 2204.02311, appendix B). Norms, softmax and rotations are left out.
    """
    in_layers = jax.tree.leaves(leaves["runs"])
    matrices = sum(leaf.size for leaf in in_layers if len(leaf.hf_shape) == 2)
    num_attentions = sum(len(leaf.tensors) for leaf in in_layers if leaf.key == "attention.o")
    return 2 * matrices + num_attentions * 4 * length * arch.num_heads * arch.head_dim
