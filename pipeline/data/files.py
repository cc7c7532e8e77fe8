"""Finds and reads input files: a file, a directory or a glob, local or in any file system that fsspec supports."""

import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import fsspec
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from pipeline.core.errors import InputError
from pipeline.core.hub import refused_by_hub, repeat_requests
from pipeline.core.range_file import RangeFile
from pipeline.core.requests import is_transient, named_errors, repeated

_THREADS = 16
OTHER_FORMATS = (
    "For JSON, CSV or text: data=hf data.path=json data.data_files=FILE (in Python: Stream.from_config(['data=hf', "
    "...]))."
)
# What listings of remote storage have to identify content: Google's, the Hub's, S3's and HTTP's, Azure's.
_CHECKSUMS = ("crc32c", "blob_id", "ETag", "etag")


T = TypeVar("T")


class NoSuchFiles(InputError):
    """A path has no file of the kind that the data source reads."""


@contextmanager
def input_errors(where: str, key: str = "data.path") -> Iterator[None]:
    """Turns errors of fsspec into InputError, for a missing file, or PipelineError, if a retry might help."""
    try:
        with named_errors(where, key=key, invalid=InputError), refused_by_hub(where, key, InputError):
            yield
    except FileNotFoundError as error:
        raise InputError(f"{where} does not exist: {error}. Check {key}.") from error


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file. name: its path relative to the directory that was searched, which does not depend on the machine.
    checksum: what the listing has to identify the content, as `kind:value`; None if it has nothing."""

    filesystem: AbstractFileSystem
    path: str
    name: str
    size: int | None
    checksum: str | None = None

    @classmethod
    def listed(cls, filesystem: AbstractFileSystem, path: str, name: str, info: Mapping[str, Any]) -> "InputFile":
        """A file with the facts of a listing."""
        kind = next((kind for kind in _CHECKSUMS if info.get(kind)), None)
        return cls(filesystem, path, name, info["size"], kind and f"{kind}:{info[kind]}")

    def read_bytes(self) -> bytes:
        with input_errors(self.path):
            return repeated(self.path, lambda: self.filesystem.cat_file(self.path))

    @contextmanager
    def open(self) -> Iterator[RangeFile]:
        """Opens the file. Its errors are PipelineErrors that name it, so a reader does not take them for damage of the
        file."""
        with input_errors(self.path):
            stream = repeated(self.path, lambda: self.filesystem.open(self.path, "rb"))
        lock = threading.Lock()

        def read(start: int, size: int) -> bytes:
            def attempt() -> bytes:
                stream.seek(start)
                return stream.read(size)

            with lock, input_errors(self.path):
                return repeated(self.path, attempt)

        def end() -> int:
            with lock, input_errors(self.path):
                return stream.seek(0, os.SEEK_END)

        with stream:
            yield RangeFile(read, end)


def find_files(path: str, suffix: str) -> list[InputFile]:
    """The files at `path`, sorted by name: a file, the matches of a glob, or a directory's files at any depth whose
    names end with `suffix`.

    In directories and globs, names that begin with `.` or `_` are left out.
    Raises NoSuchFiles if there are no files, and PipelineError if they cannot be listed.
    """
    with input_errors(path):
        filesystem, root = open_filesystem(path)
        files, is_file = repeated(path, lambda: _listed_files(filesystem, root, suffix))
    if not is_file:
        files = [file for file in files if not any(part.startswith((".", "_")) for part in file.name.split("/"))]
    if not files:
        braces = " Braces are not supported in globs, only *, **, ? and [...]." if {*"{}"} & {*path} else ""
        other = f" {OTHER_FORMATS}" if suffix == ".parquet" else ""
        raise NoSuchFiles(
            f"{path} has no {suffix} file. Set data.path to one, or to a directory or glob with {suffix} files.{braces}"
            f"{other}"
        )
    with input_errors(path):
        for file in files:
            require_readable(filesystem, file.path, "data.path")
    return sorted(files, key=lambda file: file.name)


def in_parallel(call: Callable[..., T], *items: Iterable[Any]) -> list[T]:
    """`map` by several threads: each file in remote storage takes a round trip."""
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(call, *items))


def hub_data_set(path: str, *, is_whole: bool = False) -> str | None:
    """owner/name in a path hf://datasets/owner/name[/...] without a revision; None for other paths. is_whole: for paths
    without a part after the name only."""
    match = re.match(r"hf://datasets/([^/@]+/[^/@]+)" + (r"/*\Z" if is_whole else r"(?:/|\Z)"), path)
    return match and match[1]


def open_filesystem(path: str) -> tuple[AbstractFileSystem, str]:
    """The file system of a path, and the path within it. Call it within `input_errors`."""
    if "hf://" in path:
        repeat_requests()
    return fsspec.core.url_to_fs(os.path.expanduser(path))


def require_readable(filesystem: AbstractFileSystem, path: str, key: str) -> None:
    """Raises InputError if a local path is not a regular file that this user may read. Reading a FIFO, a device or a
    socket might never end. Also for a name that is not UTF-8, since a store contains the names of files."""
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"the name of {path!r} is not UTF-8. Rename the file.") from error
    if not isinstance(filesystem, LocalFileSystem) or not os.path.exists(path):
        return
    if not os.path.isfile(path):
        kind = "a directory" if os.path.isdir(path) else "a FIFO, a device or a socket"
        raise InputError(f"{path} is {kind}, expected a file. Check {key}.")
    if not os.access(path, os.R_OK, effective_ids=True):
        raise InputError(f"{path} cannot be read: permission denied. Grant this user read permission, or check {key}.")


def is_glob(path: str) -> bool:
    """Whether fsspec treats a path as a pattern."""
    return any(character in path for character in "*?[")


def _listed_files(filesystem: AbstractFileSystem, root: str, suffix: str) -> tuple[list[InputFile], bool]:
    """The files at a path, in any order, including hidden ones; and whether the path itself is a file."""
    if is_glob(root) and not (isinstance(filesystem, LocalFileSystem) and os.path.exists(root)):
        fixed = root[: min(root.index(character) for character in "*?[" if character in root)]
        listed, base, is_file = filesystem.glob(root, detail=True), fixed.rpartition("/")[0], False
    else:
        listed, base, is_file = _listing(filesystem, root, suffix)
    files = [
        InputFile.listed(filesystem, path, path[len(base) :].lstrip("/"), info)
        for path, info in listed.items()
        # For symbolic links, listings of local directories do not tell what they lead to.
        if info["type"] == "file" or (info["type"] != "directory" and not filesystem.isdir(path))
    ]
    if not files:  # of fsspec's functions, only `ls` distinguishes an unreachable directory from an empty one
        with suppress(FileNotFoundError, NotADirectoryError):
            filesystem.ls(base, detail=False)
    return files, is_file


def _listing(filesystem: AbstractFileSystem, root: str, suffix: str) -> tuple[dict[str, dict[str, Any]], str, bool]:
    """The info of a file, or of a directory's files, by path; the directory to which their names are relative; whether
    `root` itself is a file."""
    try:
        info = filesystem.info(root)  # `exists` and `isdir` may return False for an unreachable path
    except FileNotFoundError as error:
        if is_transient(error):
            raise
        return {}, root, True
    if info["type"] == "directory" or filesystem.isdir(root):  # fsspec's HTTP reports a page of links as a file
        listed = filesystem.find(root, detail=True)
        return {path: info for path, info in listed.items() if path.endswith(suffix)}, root.rstrip("/"), False
    return {root: info}, root.rpartition("/")[0], True
