"""How programs are compiled: options, the persistent cache, and the device memory that they need."""

import logging
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Self

import jax
import jax.numpy as jnp
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

from pipeline.core.errors import ConfigError

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


def use_compilation_cache(path: str | None) -> None:
    """Makes JAX cache this process's compiled programs in `path`, a directory or URL. None: JAX's environment variables
    apply.

    Several processes need a path that all of them can access; only the first writes. JAX warns if an entry cannot be
    read or written. Raises ConfigError for a URL that is not supported, or if the package that reads it is missing.
    """
    if path is None:
        return
    is_url = "://" in path
    if is_url and path.partition("://")[0] not in ("gs", "s3"):  # etils raises a KeyError for others
        raise ConfigError(
            f"run.compilation_cache={path} is neither a local directory nor a gs:// or s3:// URL. Set it to one of "
            f"these."
        )
    if is_url and not (find_spec("etils") and find_spec("etils.epath")):
        raise ConfigError(
            f"run.compilation_cache={path} is a URL, for which JAX needs etils, which is not installed. "
            f"Install etils[epath], or set it to a local directory."
        )
    jax.config.update("jax_compilation_cache_dir", path if is_url else str(Path(path).expanduser().absolute()))
    # A run compiles little besides the step, which should be cached even if it compiles quickly.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    if is_url:  # XLA's autotuning cache for GPUs needs a local directory
        jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    compilation_cache.reset_cache()  # an earlier job in this process may have initialised it


@dataclass(frozen=True)
class DeviceMemory:
    """The compiler's report. Bytes per device, including the padding of its memory layout."""

    argument_bytes: int  # weights and one step's rows
    output_bytes: int  # one step's activations
    temporary_bytes: int
    peak_bytes: int  # while one step runs, without the outputs of other steps

    @classmethod
    def of(cls, executable: jax.stages.Compiled) -> Self:
        memory = executable.memory_analysis()
        return cls(
            argument_bytes=memory.argument_size_in_bytes,
            output_bytes=memory.output_size_in_bytes,
            temporary_bytes=memory.temp_size_in_bytes,
            peak_bytes=memory.peak_memory_in_bytes,
        )

    def describe(self) -> str:
        """The parts, in GiB."""
        parts = {"arguments": self.argument_bytes, "outputs": self.output_bytes, "temporaries": self.temporary_bytes}
        return ", ".join(f"{name} {num_bytes / 2**30:.2f}" for name, num_bytes in parts.items())

    def resident_bytes(self, steps_in_flight: int) -> int:
        """Bytes per device while one step runs and the outputs of the other steps wait to be copied to the host."""
        return max(self.peak_bytes, self.argument_bytes + self.output_bytes + self.temporary_bytes) + (
            (steps_in_flight - 1) * self.output_bytes
        )
