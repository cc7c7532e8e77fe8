"""The folder of an export, which appears when it is complete."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.core.errors import ConfigError
from pipeline.core.requests import named_writing_errors


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
