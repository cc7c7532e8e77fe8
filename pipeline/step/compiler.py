"""The options that programs are compiled with."""

import logging
from functools import cache

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

log = logging.getLogger("pipeline")

CompilerOptions = dict[str, bool | str]

_OWN_SUMS = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}


def matmul_precision(dtype: jnp.dtype | str) -> str:
    """The precision for JAX: float32 products are computed in float32, even where the hardware's default is lower."""
    return "highest" if jnp.dtype(dtype) == jnp.float32 else "default"


def compiler_options(mesh: Mesh) -> CompilerOptions:
    """The options that a program for these devices is compiled with.

    On CPUs, XLA's own choice of YNNPACK's sums, which have another order, depends on the number of rows per device, so
    they are never used. Nor are oneDNN's products, which are up to 1.2 times as fast for large matrices: of two
    matrices and more, XLA computes them wrongly where they sum over more than 16,384 numbers (jaxlib 0.10.2).
    """
    return _known_options() if mesh.devices.flat[0].platform == "cpu" else {}


@cache
def _known_options() -> CompilerOptions:
    """The options for CPUs; empty if this jaxlib does not know them."""
    try:
        jax.jit(lambda: 0).lower().compile(_OWN_SUMS)
    except jax.errors.JaxRuntimeError as error:
        log.info("compiling without %s: %s", list(_OWN_SUMS), error)
        return {}
    return _OWN_SUMS
