"""JAX's persistent compilation cache, so that a restarted run does not compile its step again."""

from importlib.util import find_spec
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from pipeline.core.errors import ConfigError


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
