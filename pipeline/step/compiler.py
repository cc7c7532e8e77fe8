"""The options that programs are compiled with."""

import logging
from functools import cache

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

log = logging.getLogger("pipeline")


CompilerOption = bool | str
CompilerOptions = dict[str, CompilerOption]

_DOTS = "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"
_OWN_SUMS = (("xla_cpu_experimental_ynn_fusion_type", _DOTS),)
_ONEDNN = (("xla_cpu_use_onednn", True), ("xla_cpu_experimental_onednn_fusion_type", _DOTS))
_ONEDNN_TOKENS = 512  # tokens per step from which oneDNN's products are faster


def matmul_precision(dtype: jnp.dtype | str) -> str:
    """The precision for JAX: float32 products are computed in float32, even where the hardware's default is lower."""
    return "highest" if jnp.dtype(dtype) == jnp.float32 else "default"


def compiler_options(mesh: Mesh, tokens: int) -> CompilerOptions:
    """The options for a program that computes `tokens` at a time, over all devices. On CPUs, many tokens use oneDNN.

    For large matrices, oneDNN's products are 1.05 to 1.2 times as fast as XLA's default, YNNPACK; for small ones, half
    as fast or slower (docs/performance.md). The choice depends on the configuration alone, so that a row has the same
    bits for any number of devices. XLA's own choice of YNNPACK's sums, which have another order, depends on the number
    of rows per device, so they are never used.
    """
    if mesh.devices.flat[0].platform != "cpu":
        return {}
    return _known_options(_OWN_SUMS) | (_known_options(_ONEDNN) if tokens >= _ONEDNN_TOKENS else {})


@cache
def _known_options(options: tuple[tuple[str, CompilerOption], ...]) -> CompilerOptions:
    """The options; empty if this jaxlib does not know them. A jaxlib without the library in question ignores them."""
    try:
        jax.jit(lambda: 0).lower().compile(dict(options))
    except jax.errors.JaxRuntimeError as error:
        log.info("compiling without %s: %s", options[0][0], error)
        return {}
    return dict(options)
