"""Random parameters of the right shapes, for benchmarks. They need only a config.json."""

import math
import zlib
from collections.abc import Callable
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jaxtyping import Array, UInt32

from pipeline.core.errors import ConfigError
from pipeline.core.host import host_memory
from pipeline.models.checkpoints.loading import Placement, build_params, without_inputs
from pipeline.models.decoder import Params
from pipeline.models.int8_weights import Int8Weight, quantise
from pipeline.models.leaves import Leaf, LeafTree

_STD = 0.02  # transformers' usual `initializer_range`


def random_params(
    leaves: LeafTree, seed: int, dtype: str, place: Placement, progress: bool, with_int8: bool = False
) -> Params:
    """Makes random parameters on the devices: norms are 1, all others normal with standard deviation 0.02.

    A weight's values depend only on the seed, its HF key and its position in that tensor, not on the captured keys or
    the number of devices.

    Raises ConfigError if the devices are CPUs and the host lacks the memory. For other devices, the plan checks it.
    """
    if jax.default_backend() == "cpu":
        itemsize = 1 if with_int8 else np.dtype(dtype).itemsize
        needed = sum(_local_size(leaf, place(leaf)) for leaf in jax.tree.leaves(leaves)) * itemsize
        if needed > (available := host_memory()):
            raise ConfigError(
                f"model.init=random: the weights that config.json describes need {needed / 2**30:,.0f} GiB, but this "
                f"machine has {available / 2**30:,.0f} GiB. Choose a smaller model."
            )

    def make(leaf: Leaf) -> Array | Int8Weight:
        sharding = place(leaf)
        if leaf.spec.is_scale:
            return jnp.ones(leaf.shape, dtype, device=sharding)
        suffix = f" {leaf.part.start}" if leaf.part.start else ""
        tensor_ids = np.array([zlib.crc32(f"{seed} {name}{suffix}".encode()) for name in leaf.tensors], np.uint32)
        if with_int8 and leaf.is_matrix:
            scale_sharding = without_inputs(sharding, len(leaf.shape) - leaf.num_inputs)
            return _normal(dtype, Int8Weight(sharding, scale_sharding))(tensor_ids, leaf.shape, leaf.num_inputs)
        return _normal(leaf.dtype(dtype), sharding)(tensor_ids, leaf.shape, 0)

    # One at a time: all processes must start the same programs in the same order.
    return build_params(make, leaves, "making weights", progress, threads=1)


def _local_size(leaf: Leaf, sharding: Sharding) -> int:
    """The number of a leaf's values on this process's devices."""
    return math.prod(sharding.shard_shape(leaf.shape)) * len(sharding.addressable_devices)


@cache
def _normal(
    dtype: str, shardings: Sharding | Int8Weight
) -> Callable[[Array, tuple[int, ...], int], Array | Int8Weight]:
    """A compiled function from a leaf's tensor ids, shape and number of inputs (0: not int8) to its values."""

    @partial(jax.jit, static_argnums=(1, 2), out_shardings=shardings)
    def normal(tensor_ids: Array, shape: tuple[int, ...], num_inputs: int) -> Array | Int8Weight:
        element_ids = jax.lax.iota(jnp.uint32, math.prod(shape) // len(tensor_ids))
        bits = _mix(_mix(tensor_ids)[:, None] + _mix(element_ids)[None, :])
        # In the open interval (-1, 1): 23 bits plus a half are exact in float32; one more bit would round up to 1.
        uniform = ((bits >> 9).astype(jnp.float32) + 0.5) * 2.0**-22 - 1.0
        values = (_STD * math.sqrt(2) * jax.lax.erf_inv(uniform)).reshape(shape)
        return Int8Weight(*quantise(values, num_inputs)) if num_inputs else values.astype(dtype)

    return normal


def _mix(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """A 32-bit hash (Wellons' lowbias32). `jax.random` would take 4 times as long to compile for every shape."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
