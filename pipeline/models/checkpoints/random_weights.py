"""Random parameters of the right shapes, for benchmarks. They need only a config.json."""

import math
import zlib
from collections.abc import Callable
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.dtypes import itemsize_bits
from jax.sharding import Sharding
from jaxtyping import Array, UInt32

from pipeline.core.errors import ConfigError
from pipeline.core.host import host_memory
from pipeline.models.checkpoints.loading import Placement, build_params, of_scales
from pipeline.models.decoder import Params
from pipeline.models.leaves import Leaf, LeafTree
from pipeline.models.quantised_weights import QuantisedWeight, quantise, stored_dtype

_STD = 0.02  # transformers' usual `initializer_range`


def random_params(leaves: LeafTree, seed: int, dtype: str, place: Placement, progress: bool) -> Params:
    """Makes random parameters on the devices: norms are 1, all others normal with standard deviation 0.02.

    A weight's values depend only on the seed, its HF key and its position in that tensor, not on the captured keys or
    the number of devices.

    Raises ConfigError if the devices are CPUs and the host lacks the memory. For other devices, the plan checks it.
    """
    if jax.default_backend() == "cpu":
        needed = sum(_local_bits(leaf, place(leaf), dtype) for leaf in jax.tree.leaves(leaves)) // 8
        if needed > (available := host_memory()):
            raise ConfigError(
                f"model.init=random: the weights that config.json describes need {needed / 2**30:,.0f} GiB, but this "
                f"machine has {available / 2**30:,.0f} GiB. Choose a smaller model."
            )

    def make(leaf: Leaf) -> Array | QuantisedWeight:
        sharding = place(leaf)
        if leaf.spec.is_scale:
            return jnp.ones(leaf.shape, dtype, device=sharding)
        suffix = f" {leaf.part.start}" if leaf.part.start else ""
        tensor_ids = np.array([zlib.crc32(f"{seed} {name}{suffix}".encode()) for name in leaf.tensors], np.uint32)
        kept_dtype = stored_dtype(leaf.dtype(dtype), sharding)
        if leaf.quantised:
            sharding = QuantisedWeight(sharding, of_scales(sharding, len(leaf.scale_shape)), leaf.is_grouped)
        return _normal(leaf.quantised, kept_dtype, sharding)(tensor_ids, leaf.shape, leaf.inputs_per_scale)

    # One at a time: all processes must start the same programs in the same order.
    return build_params(make, leaves, "making weights", progress, threads=1)


def _local_bits(leaf: Leaf, sharding: Sharding, dtype: str) -> int:
    """The size of a leaf's values on this process's devices."""
    num_values = math.prod(sharding.shard_shape(leaf.shape)) * len(sharding.addressable_devices)
    return num_values * itemsize_bits(stored_dtype(leaf.dtype(dtype), sharding))


@cache
def _normal(
    quantised: str | None, dtype: np.dtype, shardings: Sharding | QuantisedWeight
) -> Callable[[Array, tuple[int, ...], int], Array | QuantisedWeight]:
    """A compiled function from a leaf's tensor ids, shape and `inputs_per_scale` to its values."""

    @partial(jax.jit, static_argnums=(1, 2), out_shardings=shardings)
    def normal(tensor_ids: Array, shape: tuple[int, ...], inputs: int) -> Array | QuantisedWeight:
        element_ids = jax.lax.iota(jnp.uint32, math.prod(shape) // len(tensor_ids))
        bits = _mix(_mix(tensor_ids)[:, None] + _mix(element_ids)[None, :])
        # In the open interval (-1, 1): 23 bits plus a half are exact in float32; one more bit would round up to 1.
        uniform = ((bits >> 9).astype(jnp.float32) + 0.5) * 2.0**-22 - 1.0
        values = (_STD * math.sqrt(2) * jax.lax.erf_inv(uniform)).reshape(shape)
        if quantised is None:
            return values.astype(dtype)
        values, scale = quantise(values, inputs, quantised)
        return QuantisedWeight(values.astype(dtype), scale, shardings.is_grouped)

    return normal


def _mix(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """A 32-bit hash (Wellons' lowbias32). `jax.random` would take 4 times as long to compile for every shape."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
