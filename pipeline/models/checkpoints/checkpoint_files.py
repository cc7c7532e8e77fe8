"""A checkpoint's files in a directory, at a remote path, or in a repository of the Hugging Face Hub."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fsspec
import numpy as np

from pipeline.core.errors import CheckpointError, PipelineError
from pipeline.core.hub import Repository, is_hub_id, open_repository
from pipeline.core.json_text import MAX_JSON_BYTES, parse_json
from pipeline.core.requests import named_errors, repeated
from pipeline.models.checkpoints.safetensors_file import ByteSource


class Files:
    """A flat set of files: a local directory, one that fsspec can read (`gs://`, `s3://`, ...), or a folder in a
    repository on the Hub, whose files are downloaded whole into the Hub's cache.

    Every method raises CheckpointError if a retry cannot help, and PipelineError if it might (network).
    """

    def __init__(
        self, where: str, key: str = "model.path", repository: Repository | None = None, folder: str | None = None
    ) -> None:
        """`where` is the address, `key` the setting that contains it."""
        self.where = where
        self.commit = repository.commit if repository else None  # of a Hub repository
        self.is_remote = repository is None and "://" in where  # each read is a request, so several should run at once
        self._key, self._repository = key, repository
        self._prefix = f"{folder}/" if folder else ""
        with self._errors(where):
            remote = fsspec.core.url_to_fs(where) if self.is_remote else None
        self._fs, self._root = remote or (fsspec.filesystem("file"), os.path.abspath(where))

    def has(self, name: str) -> bool:
        """Whether the file exists."""
        try:
            self._info(name)  # `exists` also returns False if the storage cannot be reached
        except FileNotFoundError:
            return False
        return True

    def open(self, name: str) -> ByteSource:
        """Opens a file for reading by ranges. Raises FileNotFoundError if it is missing."""
        where, path, info = f"{self.where}/{name}", self._path(name), self._info(name)
        if info["type"] != "file":  # opening a named pipe would wait for a writer
            raise CheckpointError(f"{where} is not a regular file. Replace it with the checkpoint's file.")

        def read(start: int, stop: int) -> np.ndarray:
            with self._errors(where):
                content = repeated(where, lambda: self._fs.cat_file(path, start=start, end=stop))
            if self.is_remote and len(content) != stop - start:
                raise PipelineError(
                    f"{where}: expected {stop - start} bytes at offset {start}, got {len(content)}. Try again; if it "
                    f"fails again, upload the file again."
                )
            return np.frombuffer(content, np.uint8)

        return ByteSource(where, info["size"], read, self.is_remote)

    def names(self) -> list[str]:
        """The names of all files, for messages."""
        if self._repository is not None:
            names = (name for name in self._repository.names() if name.startswith(self._prefix))
            return [name.removeprefix(self._prefix) for name in names]
        with self._errors(self.where):
            paths = repeated(self.where, lambda: self._fs.ls(self._root, detail=False))
        return sorted(path.rsplit("/", 1)[-1] for path in paths)

    def _path(self, name: str) -> str:
        if self._repository is None:
            return f"{self._root}/{name}"
        path = self._repository.file(self._prefix + name)
        if path is None:
            raise FileNotFoundError(f"{self.where}/{name}")
        return str(path)

    def _info(self, name: str) -> dict[str, Any]:
        path, where = self._path(name), f"{self.where}/{name}"
        with self._errors(where):
            return repeated(where, lambda: self._fs.info(path))

    @contextmanager
    def _errors(self, where: str) -> Iterator[None]:
        """FileNotFoundError passes unchanged."""
        try:
            with named_errors(self.where, key=self._key, invalid=CheckpointError):
                yield
        except PipelineError as error:
            if self.is_remote or not isinstance(error.__cause__, OSError):
                raise
            raise CheckpointError(f"{where} cannot be read: {error.__cause__}. Check access to it.") from error


def open_files(path: str, revision: str | None) -> Files:
    """The files of `model.path`. Raises CheckpointError if it is neither a directory, a remote path nor a Hub id."""
    path = os.path.expanduser(path)
    if ("://" in path and not path.endswith("://")) or os.path.isdir(path):
        return Files(path)
    if is_hub_id(path):
        return Files(path, repository=_open_hub(path, revision))
    raise CheckpointError(
        f"model.path is {path!r:.300}: expected a directory, a remote path (gs://...) or a Hub id (owner/name), "
        f"got none of them. Check the path. If a folder has the owner's name, rename it."
    )


def read_json(files: Files, name: str, remedy: str = "Download the missing file.") -> dict[str, object]:
    """Reads the object in a JSON file of a checkpoint. Raises CheckpointError if the file is damaged, or if it is
    missing, with `remedy`."""
    where = f"{files.where}/{name}"
    try:
        source = files.open(name)
        if source.size > MAX_JSON_BYTES:
            raise CheckpointError(
                f"{where} has {source.size:,} bytes, expected at most {MAX_JSON_BYTES:,}. Download it again."
            )
        content = parse_json(source.read(0, source.size).tobytes())
    except FileNotFoundError:
        raise CheckpointError(f"{files.where} has no {name}. {remedy}") from None
    except ValueError as error:
        raise CheckpointError(f"{where} is not JSON: {error}. Download it again.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{where} is not a JSON object, got {type(content).__name__}. Download it again.")
    return content


def _open_hub(repo: str, revision: str | None) -> Repository:
    repository = open_repository(repo, revision, file="config.json", key="model.path", invalid=CheckpointError)
    if repository is None:
        raise CheckpointError(
            f"{repo} on the Hub has no config.json in revision {revision or 'main'}. Is it a model for transformers? "
            "For a PEFT adapter, set model.adapter to it and model.path to its base model."
        )
    return repository
