"""Compiled programs kept between runs, so that a run that is started again does not compile its step again."""

import warnings
from importlib.util import find_spec
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from pipeline.core.errors import ConfigError


def use_compilation_cache(path: str | None) -> None:
    """Makes JAX look for every program of this process in `path`, a directory or URL, before it compiles it.

    Several processes need a path that all of them see: the first alone writes. None: as JAX's own environment variables
    say. What cannot be read or written is a warning by JAX; a CPU's steps with oneDNN's products are never kept, and
    without one. Raises ConfigError for another URL, or one without what reads it.
    """
    if path is None:
        return
    is_url = "://" in path
    if is_url and path.partition("://")[0] not in ("gs", "s3"):  # etils raises a KeyError for others
        raise ConfigError(
            f"run.compilation_cache={path} is neither a local directory nor a gs:// or s3:// URL. Give one of them."
        )
    if is_url and not (find_spec("etils") and find_spec("etils.epath")):
        raise ConfigError(
            f"run.compilation_cache={path} is not a local directory, and JAX reads others through etils, which is not "
            f"installed. Install etils[epath], or give a local directory."
        )
    jax.config.update("jax_compilation_cache_dir", path if is_url else str(Path(path).expanduser().absolute()))
    # The step is all that a run compiles, save what several processes ask each other: it is kept however small it is.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    if is_url:  # XLA's own cache, of how it tuned for a GPU, needs a local directory
        jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    not_kept = "Error writing persistent compilation cache entry.*onednn-fusion"  # XLA cannot serialise them
    warnings.filterwarnings("ignore", not_kept, UserWarning)
    compilation_cache.reset_cache()  # JAX may have decided already, for an earlier job of this process
