"""The options that programs are compiled with."""

import logging
from functools import cache

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

log = logging.getLogger("pipeline")


CompilerOptions = dict[str, bool | str]


_ONEDNN_TOKENS = 512  # of a step, from which on its products are faster


def matmul_precision(dtype: jnp.dtype | str) -> str:
    """What the user calls float32 is float32, also where the hardware would rather multiply in less."""
    return "highest" if dtype == jnp.float32 else "default"


def compiler_options(mesh: Mesh, tokens: int) -> CompilerOptions:
    """What a program that computes so many tokens (global) at once is compiled with: on CPUs oneDNN's matrix products.

    Of large matrices they are 1.05 to 1.2 times as fast as XLA's choice, YNNPACK, of small ones half as fast or less
    (docs/performance.md). The choice depends on the configuration alone: a row has the same bits whatever the number
    of devices that share the step.
    """
    is_large = mesh.devices.flat[0].platform == "cpu" and tokens >= _ONEDNN_TOKENS
    return _onednn_options() if is_large else {}


@cache
def _onednn_options() -> CompilerOptions:
    """Empty where this jaxlib does not know them. One that is built without oneDNN ignores them."""
    options: CompilerOptions = {
        "xla_cpu_use_onednn": True,
        "xla_cpu_experimental_onednn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT",
    }
    try:
        jax.jit(lambda: 0).lower().compile(options)
    except jax.errors.JaxRuntimeError as error:
        log.info("matrix products without oneDNN: %s", error)
        return {}
    return options
