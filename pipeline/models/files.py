"""Where a checkpoint's files lie: a directory, a remote path, or a repository of the Hugging Face Hub."""

import os
import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, runtime_checkable

import fsspec
import huggingface_hub
import numpy as np
from huggingface_hub.errors import (
    EntryNotFoundError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from pipeline.access import named_errors
from pipeline.errors import CheckpointError, PipelineError
from pipeline.models.safetensors_file import ByteSource


@runtime_checkable
class Files(Protocol):
    """A flat set of files. `read` and `open` raise FileNotFoundError for a file that is not there.

    Every method raises CheckpointError where a retry cannot help, PipelineError where it might (network).
    """

    where: str  # for messages
    commit: str | None  # of a Hub repository: names the content

    def has(self, name: str) -> bool:
        """Whether a file is there."""

    def read(self, name: str) -> bytes:
        """A whole small file."""

    def open(self, name: str) -> ByteSource:
        """A large file, to be read by ranges."""

    def names(self) -> list[str]:
        """What is there; for messages."""


def open_files(path: str, revision: str | None) -> Files:
    """The files of `model.path`. Raises CheckpointError if it is neither a directory, a remote path nor a Hub id."""
    path = os.path.expanduser(path)
    if "://" in path:
        return RemoteFiles(path)
    if os.path.isdir(path):
        return LocalFiles(Path(path))
    if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path) and not path.startswith("."):
        return HubFiles(path, revision)
    raise CheckpointError(
        f"model.path is {path!r}: expected a directory, a remote path (gs://...) or a Hub id (owner/name), "
        f"got none of them. Check the path."
    )


class LocalFiles:
    """A directory."""

    def __init__(self, root: Path) -> None:
        self.where = str(root)
        self.commit = None
        self._root = root

    def has(self, name: str) -> bool:
        return (self._root / name).exists()

    def read(self, name: str) -> bytes:
        with _named_errors(self.where, CheckpointError):
            return (self._root / name).read_bytes()

    def open(self, name: str) -> ByteSource:
        with _named_errors(self.where, CheckpointError):
            return _local_file(self._root / name)

    def names(self) -> list[str]:
        with _named_errors(self.where, CheckpointError):
            return sorted(os.listdir(self._root))


class RemoteFiles:
    """A directory that fsspec can read (`gs://`, `s3://`, `memory://`, ...)."""

    def __init__(self, url: str) -> None:
        self.where = url
        self.commit = None
        with _named_errors(url, PipelineError):
            self._fs, self._root = fsspec.core.url_to_fs(url)

    def has(self, name: str) -> bool:
        with _named_errors(self.where, PipelineError):
            return self._fs.exists(f"{self._root}/{name}")

    def read(self, name: str) -> bytes:
        with _named_errors(self.where, PipelineError):
            return self._fs.cat_file(f"{self._root}/{name}")

    def open(self, name: str) -> ByteSource:
        path = f"{self._root}/{name}"
        with _named_errors(self.where, PipelineError):
            size = self._fs.info(path)["size"]

        def read(start: int, stop: int) -> np.ndarray:
            with _named_errors(self.where, PipelineError):
                return np.frombuffer(self._fs.cat_file(path, start=start, end=stop), np.uint8)

        return ByteSource(f"{self.where}/{name}", size, read)

    def names(self) -> list[str]:
        with _named_errors(self.where, PipelineError):
            return sorted(path.rsplit("/", 1)[-1] for path in self._fs.ls(self._root, detail=False))


class HubFiles:
    """A repository of the Hub, at one commit. Files are fetched into the Hub's own cache when they are first used."""

    def __init__(self, repo: str, revision: str | None) -> None:
        self.where = repo
        self._repo = repo
        self._revision = revision
        try:
            config = self._fetch("config.json")
        except FileNotFoundError as error:
            raise CheckpointError(f"the Hub's {repo} has no config.json. Is it a model for transformers?") from error
        self.commit = config.parent.name  # the cache keeps files under snapshots/<commit>/, also without network
        self._revision = self.commit

    def has(self, name: str) -> bool:
        try:
            self._download(name)
        except EntryNotFoundError:  # the Hub says so, or cannot be reached and the cache lacks it
            return False
        return True

    def read(self, name: str) -> bytes:
        return self._fetch(name).read_bytes()

    def open(self, name: str) -> ByteSource:
        return _local_file(self._fetch(name))

    def names(self) -> list[str]:
        with _named_errors(self.where, PipelineError):
            return sorted(huggingface_hub.list_repo_files(self._repo, revision=self.commit))

    def _fetch(self, name: str) -> Path:
        try:
            return self._download(name)
        except LocalEntryNotFoundError as error:
            raise PipelineError(
                f"{self._repo}: {name} is not in the Hub's cache, and the Hub cannot be reached ({error}). "
                f"Try again; if model.path should be a directory, it does not exist."
            ) from error
        except EntryNotFoundError as error:
            raise FileNotFoundError(f"{self._repo}/{name}") from error

    def _download(self, name: str) -> Path:
        try:
            return Path(huggingface_hub.hf_hub_download(self._repo, name, revision=self._revision))
        except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError) as error:  # also of gated ones
            raise CheckpointError(
                f"model.path={self._repo}, model.revision={self._revision}: neither a directory nor a model that the "
                f"Hub gives out ({error}). Check the spelling, or log in with `hf auth login`."
            ) from error
        except EntryNotFoundError:
            raise
        except OSError as error:
            raise PipelineError(f"{self._repo}/{name} cannot be fetched from the Hub: {error}. Try again.") from error


def _local_file(path: Path) -> ByteSource:
    """Read, not mapped: mapped pages would count as this process's memory, all of the checkpoint in the end."""

    def read(start: int, stop: int) -> np.ndarray:
        with _named_errors(str(path), CheckpointError):
            return np.fromfile(path, np.uint8, stop - start, offset=start)

    return ByteSource(str(path), path.stat().st_size, read)


def _named_errors(where: str, failed: type[PipelineError]) -> AbstractContextManager[None]:
    """Gives what a file system raises the checkpoint's name; a missing file stays a FileNotFoundError."""
    return named_errors(where, key="model.path", invalid=CheckpointError, failed=failed)
