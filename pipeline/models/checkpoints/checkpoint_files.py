"""A checkpoint's files in a directory, at a remote path, or in a repository of the Hugging Face Hub."""

import os
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import fsspec
import numpy as np

from pipeline.core.errors import CheckpointError, PipelineError
from pipeline.core.file_errors import named_errors
from pipeline.core.hub import Repository, is_hub_id, open_repository
from pipeline.core.json_text import MAX_JSON_BYTES, parse_json
from pipeline.core.retries import repeated
from pipeline.models.checkpoints.safetensors_file import ByteSource


@runtime_checkable
class Files(Protocol):
    """A flat set of files. `open` raises FileNotFoundError for a missing file.

    Every method raises CheckpointError if a retry cannot help, and PipelineError if it might (network).
    """

    where: str  # for messages
    commit: str | None  # of a Hub repository
    is_remote: bool  # each read is a request, so several should run concurrently

    def has(self, name: str) -> bool:
        """Whether the file exists."""

    def open(self, name: str) -> ByteSource:
        """Opens a file for reading by ranges."""

    def names(self) -> list[str]:
        """The names of all files, for messages."""


def open_files(path: str, revision: str | None) -> Files:
    """The files of `model.path`. Raises CheckpointError if it is neither a directory, a remote path nor a Hub id."""
    path = os.path.expanduser(path)
    if "://" in path and not path.endswith("://"):
        return RemoteFiles(path)
    if os.path.isdir(path):
        return LocalFiles(Path(path))
    if is_hub_id(path):
        return HubFiles(_open_hub(path, revision), path)
    owner = path.partition("/")[0]
    is_folder = owner.strip(".") and os.path.isdir(owner)
    why = f" (the folder {owner} exists here, so this is not a Hub id)" if is_folder else ""
    raise CheckpointError(
        f"model.path is {path!r:.300}: expected a directory, a remote path (gs://...) or a Hub id (owner/name), "
        f"got none of them{why}. Check the path."
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


class LocalFiles:
    """A directory."""

    is_remote = False

    def __init__(self, root: Path) -> None:
        self.where = str(root)
        self.commit = None
        self._root = root

    def has(self, name: str) -> bool:
        with _local_errors(self.where):
            return (self._root / name).exists()

    def open(self, name: str) -> ByteSource:
        return _local_file(self._root / name)

    def names(self) -> list[str]:
        with _local_errors(self.where):
            return sorted(os.listdir(self._root))


class RemoteFiles:
    """A directory that fsspec can read (`gs://`, `s3://`, `memory://`, ...)."""

    is_remote = True

    def __init__(self, url: str, key: str = "model.path") -> None:
        self.where = url
        self.commit = None
        self._key = key
        with self._errors():
            self._fs, self._root = fsspec.core.url_to_fs(url)

    def has(self, name: str) -> bool:
        with self._errors():
            try:
                self._info(name)  # `exists` also returns False if the storage cannot be reached
            except FileNotFoundError:
                return False
        return True

    def _info(self, name: str) -> dict[str, Any]:
        return repeated(f"{self.where}/{name}", lambda: self._fs.info(f"{self._root}/{name}"))

    def open(self, name: str) -> ByteSource:
        path, where = f"{self._root}/{name}", f"{self.where}/{name}"
        with self._errors():
            info = self._info(name)
        if info["type"] != "file":
            raise _not_a_file(where)

        def read(start: int, stop: int) -> np.ndarray:
            with self._errors():
                content = repeated(where, lambda: self._fs.cat_file(path, start=start, end=stop))
            content = np.frombuffer(content, np.uint8)
            if content.size != stop - start:
                raise PipelineError(
                    f"{where}: expected {stop - start} bytes at offset {start}, got {content.size}. Try again; if it "
                    f"fails again, upload the file again."
                )
            return content

        return ByteSource(where, info["size"], read)

    def names(self) -> list[str]:
        with self._errors():
            paths = repeated(self.where, lambda: self._fs.ls(self._root, detail=False))
            return sorted(path.rsplit("/", 1)[-1] for path in paths)

    def _errors(self) -> AbstractContextManager[None]:
        return named_errors(self.where, key=self._key, invalid=CheckpointError)


class HubFiles:
    """A repository on the Hub, or a folder in it."""

    is_remote = False  # whole files are downloaded into the Hub's cache

    def __init__(self, repository: Repository, where: str, folder: str | None = None) -> None:
        self.where = where
        self.commit = repository.commit
        self._repository = repository
        self._prefix = f"{folder}/" if folder else ""

    def has(self, name: str) -> bool:
        return self._repository.file(self._prefix + name) is not None

    def open(self, name: str) -> ByteSource:
        path = self._repository.file(self._prefix + name)
        if path is None:
            raise FileNotFoundError(f"{self.where}/{name}")
        return _local_file(path)

    def names(self) -> list[str]:
        names = (name for name in self._repository.names() if name.startswith(self._prefix))
        return [name.removeprefix(self._prefix) for name in names]


def _open_hub(repo: str, revision: str | None) -> Repository:
    repository = open_repository(repo, revision, file="config.json", key="model.path", invalid=CheckpointError)
    if repository is None:
        raise CheckpointError(
            f"{repo} on the Hub has no config.json in revision {revision or 'main'}. Is it a model for transformers? A "
            "PEFT adapter must first be merged into its base model, and saved to a folder."
        )
    return repository


def _local_file(path: Path) -> ByteSource:
    """Reads ranges without mapping the file, since mapped pages count as this process's memory."""
    with _local_errors(str(path)):
        status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # opening a named pipe would wait for a writer
        raise _not_a_file(str(path))

    def read(start: int, stop: int) -> np.ndarray:
        with _local_errors(str(path)):
            return np.fromfile(path, np.uint8, stop - start, offset=start)

    return ByteSource(str(path), status.st_size, read)


def _not_a_file(where: str) -> CheckpointError:
    return CheckpointError(f"{where} is not a regular file. Replace it with the checkpoint's file.")


@contextmanager
def _local_errors(where: str) -> Iterator[None]:
    """Turns OSErrors into CheckpointErrors, except FileNotFoundError."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointError(f"{where} cannot be read: {error}. Check access to it.") from error
