"""Copies of a store in the formats of other libraries, each a folder that appears when it is complete."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from pipeline.core.errors import ConfigError
from pipeline.core.requests import named_writing_errors
from pipeline.store import ActivationStore


def require_context(store: ActivationStore, context: int) -> None:
    """Raises ConfigError for a store with less than one context of tokens."""
    if store.num_activations < context:
        raise ConfigError(
            f"{store.path} has activations of {store.num_activations} tokens, less than one context of {context}. "
            "Lower export.context."
        )


def converted(name: str, values: np.ndarray, dtype: str) -> np.ndarray:
    """The values in `dtype`. Raises ConfigError if a finite value is not finite there."""
    with np.errstate(over="ignore"):
        converted = values.astype(dtype)
    if not np.isfinite(converted).all() and np.isfinite(values.astype(np.float32)).all():
        raise ConfigError(f"export.dtype={dtype}: {name} has values outside its range. Choose float32.")
    return converted


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to write to, next to `path`. At the end it becomes `path`; after an error it is deleted. What a killed
    export has left is replaced.

    Raises ConfigError unless `path` is a new or empty folder, and PipelineError if the files cannot be written.
    """
    path = Path(os.path.realpath(path))
    with named_writing_errors(f"export.path={path}"):
        if path.exists() and (os.path.ismount(path) or any(path.iterdir())):
            what = "a mount point" if os.path.ismount(path) else "not empty"
            raise ConfigError(f"export.path={path} is {what}. Choose a different path, or a new folder in it.")
        unfinished = path.with_name(f"{path.name}.unfinished-export")
        if unfinished.exists():
            shutil.rmtree(unfinished)
        unfinished.mkdir(parents=True)
        try:
            yield unfinished
            for file in (file for file in unfinished.rglob("*") if file.is_file()):
                with file.open("rb") as written:
                    os.fsync(written.fileno())
            unfinished.rename(path)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
