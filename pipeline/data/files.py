"""Finding and reading input files: a file, a directory or a glob, local or on any file system that fsspec knows."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, BinaryIO

import fsspec
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from pipeline.core.errors import InputError
from pipeline.core.file_errors import named_errors
from pipeline.core.hub import refused_by_hub, repeat_requests
from pipeline.core.retries import is_transient, repeated

_PARQUET = ".parquet"
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_LOADERS = {  # of `datasets`, by the endings of the files that they read
    **dict.fromkeys((".json", ".jsonl", ".ndjson"), "json"),
    **dict.fromkeys((".csv", ".tsv"), "csv"),
    **{".txt": "text", ".arrow": "arrow", _PARQUET: "parquet"},
}


def hf_settings(path: str) -> str | None:
    """The settings with which data=hf reads a file; None where its name does not tell its format."""
    name, ending = os.path.splitext(path)
    loader = _LOADERS.get(os.path.splitext(name)[1] if ending in _COMPRESSED else ending)
    return loader and f"data=hf data.path={loader} data.data_files={path}"


@contextmanager
def input_errors(where: str, key: str = "data.path") -> Iterator[None]:
    """Around calls of fsspec: InputError for a file that is not there, PipelineError for what a retry might heal."""
    try:
        with named_errors(where, key=key, invalid=InputError), refused_by_hub(where, key, InputError):
            yield
    except FileNotFoundError as error:
        raise InputError(f"{where} does not exist: {error}. Check {key}.") from error


class InputStream:
    """A file that was opened for reading, whose errors name it: a reader cannot take them for damage."""

    def __init__(self, stream: BinaryIO, name: str, lock: "threading.Lock | None" = None) -> None:
        self._stream = stream
        self._name = name
        self._lock = lock or threading.Lock()
        self._position = 0

    def another(self) -> "InputStream":
        """The same open file with a position of its own, for another thread."""
        return InputStream(self._stream, self._name, self._lock)

    def read(self, size: int = -1) -> bytes:
        def read() -> bytes:
            self._stream.seek(self._position)
            return self._stream.read(size)

        with self._lock, input_errors(self._name):
            content = repeated(self._name, read)
        self._position += len(content)
        return content

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        with self._lock, input_errors(self._name):
            self._stream.seek(self._position)
            self._position = self._stream.seek(offset, whence)
        return self._position

    def tell(self) -> int:
        return self._position

    def close(self) -> None:
        self._stream.close()

    @property
    def closed(self) -> bool:
        return self._stream.closed


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file. `name` is its path below the place that was given, so that it does not depend on the machine."""

    filesystem: AbstractFileSystem
    path: str
    name: str
    size: int

    def read_bytes(self) -> bytes:
        with input_errors(self.path):
            return repeated(self.path, lambda: self.filesystem.cat_file(self.path))

    @contextmanager
    def open(self) -> Iterator[InputStream]:
        with input_errors(self.path):
            stream = repeated(self.path, lambda: self.filesystem.open(self.path, "rb"))
        with stream:
            yield InputStream(stream, self.path)


def find_files(path: str, suffix: str) -> list[InputFile]:
    """The files of `path` in order of their names; of a directory, those at any depth whose names end with `suffix`.

    Below a directory, and among what a glob finds, names that begin with `.` or `_` are left out.
    Raises InputError when there is none, PipelineError when the place cannot be listed.
    """
    if not path.strip():
        raise InputError("data.path is empty. Set it to a file, a directory or a glob.")
    with input_errors(path):
        filesystem, root = open_filesystem(path)
        files, named = repeated(path, lambda: _listed_files(filesystem, root, suffix))
    if files and named and suffix == _PARQUET and not path.endswith(suffix) and (settings := hf_settings(path)):
        raise InputError(f"{path} is not a {_PARQUET} file, which this data has to be. Read it with {settings}.")
    if not named:
        files = [file for file in files if not any(part.startswith((".", "_")) for part in file.name.split("/"))]
    with input_errors(path):
        for file in files:
            require_readable(filesystem, file.path, "data.path")
    if not files:
        is_absent = isinstance(filesystem, LocalFileSystem) and not is_glob(root) and not os.path.lexists(root)
        subject = f"there is no {path}" if is_absent else f"{path} has no {suffix} file"
        braces = " Braces have no meaning in it: a glob is made of *, **, ? and [...]." if {*"{}"} & {*path} else ""
        other = " For JSON, CSV or text: data=hf data.path=json data.data_files=..." if suffix == _PARQUET else ""
        raise InputError(
            f"{subject}. Set data.path to a file, a directory or a glob that has {suffix} files.{braces}{other}"
        )
    return sorted(files, key=lambda file: file.name)


def open_filesystem(path: str) -> tuple[AbstractFileSystem, str]:
    """The file system of a path, and the path within it; to be called within `input_errors`."""
    if "hf://" in path:
        repeat_requests()
    return fsspec.core.url_to_fs(os.path.expanduser(path))


def _listed_files(filesystem: AbstractFileSystem, root: str, suffix: str) -> tuple[list[InputFile], bool]:
    """The files of a place in any order, hidden ones too; and whether the place is itself a file."""
    listed, base, named = _listing(filesystem, root, suffix)
    files = [
        InputFile(filesystem, file, file[len(base) :].lstrip("/"), info["size"])
        for file, info in listed.items()
        if not _is_directory(filesystem, file, info)
    ]
    if not files:  # fsspec takes a place that it cannot reach for an empty one, except in `ls`
        with suppress(FileNotFoundError, NotADirectoryError):
            filesystem.ls(base, detail=False)
    return files, named


def require_readable(filesystem: AbstractFileSystem, path: str, key: str) -> None:
    """Raises InputError for a local place that is no file: a directory, or a FIFO, a device or a socket, of which
    reading may not end; and for a local file that this user may not read, or that is not stored, as those of /proc.

    Also for a name that is not UTF-8, since the store names the file of each document.
    """
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"the name of {path!r} is not UTF-8. Rename the file.") from error
    if not isinstance(filesystem, LocalFileSystem) or not os.path.exists(path):
        return
    if not os.path.isfile(path):
        kind = "a directory" if os.path.isdir(path) else "a FIFO, a device or a socket"
        raise InputError(f"{path} is {kind}, expected a file. Check {key}.")
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except PermissionError as error:
        raise InputError(
            f"{path} cannot be read: {error.strerror}. Give this user the permission, or check {key}."
        ) from error
    try:
        if os.fstat(opened).st_size == 0 and _has_content(opened):
            raise InputError(
                f"{path} says that it is empty but is not, as files of /proc do; expected a stored file. Check {key}."
            )
    finally:
        os.close(opened)


def _has_content(opened: int) -> bool:
    """Whether there is anything to read, now or later, or only an error."""
    try:
        return os.read(opened, 1) != b""
    except OSError:
        return True


def is_glob(path: str) -> bool:
    """Whether fsspec takes a path for a pattern."""
    return any(character in path for character in "*?[")


def _listing(filesystem: AbstractFileSystem, root: str, suffix: str) -> tuple[dict[str, dict[str, Any]], str, bool]:
    """What may be files, by path; the place that their names are relative to; and whether `root` is itself a file."""
    if is_glob(root) and not (isinstance(filesystem, LocalFileSystem) and os.path.exists(root)):
        fixed = root[: min(root.index(character) for character in "*?[" if character in root)]
        return filesystem.glob(root, detail=True), fixed.rpartition("/")[0], False
    try:
        info = filesystem.info(root)  # `exists` and `isdir` may say no of a place that they cannot reach
    except FileNotFoundError as error:
        if is_transient(error):
            raise
        return {}, root, True
    if info["type"] == "directory" or filesystem.isdir(root):  # a page of links is a file to fsspec's HTTP
        listed = filesystem.find(root, detail=True)
        return {name: info for name, info in listed.items() if name.endswith(suffix)}, root.rstrip("/"), False
    return {root: info}, root.rpartition("/")[0], True


def _is_directory(filesystem: AbstractFileSystem, path: str, info: dict[str, Any]) -> bool:
    """Listings of local folders say of a symbolic link only that it is neither file nor directory."""
    return info["type"] == "directory" or (info["type"] != "file" and filesystem.isdir(path))
