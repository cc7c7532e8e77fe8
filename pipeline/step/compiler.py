"""The options that programs are compiled with."""

import logging
from functools import cache

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from pipeline.core.errors import ConfigError
from pipeline.core.json_text import shown
from pipeline.step.spec import CompilerOption

log = logging.getLogger("pipeline")


CompilerOptions = dict[str, CompilerOption]


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


def compile_with_options(
    lowered: jax.stages.Lowered, options: CompilerOptions, requested: CompilerOptions
) -> jax.stages.Compiled:
    """Compiles with `options` and those that the user has requested. Raises ConfigError for one that XLA refuses."""
    try:
        return lowered.compile(options | requested)
    except jax.errors.JaxRuntimeError as error:
        if not requested or not str(error).startswith("INVALID_ARGUMENT"):
            raise
        raise ConfigError(
            f"run.compiler_options is {shown(requested)}, which XLA refuses for these devices: {error}. Correct it, or "
            f"set it to null."
        ) from error


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
