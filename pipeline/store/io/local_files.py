"""The files and directories of local stores: written durably, so that they survive a power failure, and listed."""

import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from pipeline.core.errors import StoreError, StoreInvalid

LOCK_SUFFIX = ".__lock"  # of temporary local files, which TensorStore's listings omit; a killed process leaves them
_NO_HARD_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)

# Of files that are read whole, so that a sparse file does not fill the memory.
_MAX_BYTES = {".json": 1 << 27, ".parquet": 1 << 31, ".csc": 1 << 31}

_durable: set[str] = set()  # directories whose entry in the parent directory is known to be on the disk


def make_directories(path: str | Path, root: str | Path) -> None:
    """Creates the directory `path`, which is `root` or below it, with its missing parents. Raises OSError.

    When it returns, their entries are on the disk, and so are those of existing directories below `root`, which another
    process may just have created.
    """
    path, existing = os.path.abspath(path), os.path.abspath(root)
    if path in _durable and os.path.isdir(path):
        return
    while not os.path.isdir(existing):
        existing = os.path.dirname(existing)
    os.makedirs(path, exist_ok=True)
    parent = path
    while parent != existing:
        parent = os.path.dirname(parent)
        with suppress(PermissionError):  # a directory that cannot be listed cannot be synced
            sync_directory(parent)
    _durable.add(path)


def raise_unless_gone(error: OSError) -> None:
    """For `onerror` of os.walk: ignores a directory that another process has just removed or replaced."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


def files_below(
    path: str, prefix: str = "", onerror: Callable[[OSError], None] | None = raise_unless_gone
) -> Iterator[str]:
    """The files and links in a directory, or in its folder `prefix`, and below it, as paths relative to the directory,
    one folder after the other. Without those in lost+found and in folders such as .snapshots, which may be large.
    onerror: as for os.walk."""
    if prefix and os.path.islink(os.path.join(path, prefix.rstrip("/"))):
        return
    for directory, folders, files in os.walk(os.path.join(path, prefix), onerror=onerror):
        inner = os.path.relpath(directory, path)
        if inner == ".":
            folders[:] = [name for name in folders if name != "lost+found" and not name.startswith(".")]
        links = [name for name in folders if os.path.islink(os.path.join(directory, name))]
        yield from (os.path.normpath(os.path.join(inner, name)) for name in (*links, *files))


def require_no_links(directory: str | None, keys: Iterable[str]) -> None:
    """Raises StoreError if a key is in a linked folder of a local store's directory."""
    for folder in {os.path.dirname(key) for key in keys} if directory is not None else ():
        path = os.path.join(directory, folder)
        if os.path.realpath(path) != os.path.join(os.path.realpath(directory), folder).rstrip("/"):
            raise StoreError(f"{path} is a symbolic link, or in a linked folder. Nothing was removed. Remove the link.")


def delete_files(directory: str, keys: Sequence[str]) -> None:
    """Deletes files, links or pipes, in this order, durably. Raises OSError, also for a folder."""
    for key in keys:
        with suppress(FileNotFoundError):
            os.unlink(directory + key)
    for folder in {os.path.dirname(directory + key) for key in keys}:
        with suppress(FileNotFoundError):
            sync_directory(folder)


def remove_empty_folders(path: str) -> None:
    """Removes a folder, and those in it, if they are empty. Links stay."""
    for folder, _, _ in os.walk(path, topdown=False) if not os.path.islink(path) else ():
        with suppress(OSError):
            os.rmdir(folder)


def sync_directory(path: str | Path) -> None:
    """Flushes a directory's entries to the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_problem(directory: str | None, key: str) -> str | None:
    """What is wrong if there is something other than a file at a key of a store in this directory, or if the file's
    content may come from elsewhere, through a symbolic link; None if there is nothing, or for remote storage."""
    if directory is None:
        return None
    path = directory
    try:
        for part in key.split("/"):
            path = os.path.join(path, part)
            status = os.lstat(path)
            mode, size = status.st_mode, status.st_size
            if stat.S_ISLNK(mode):
                return "is a symbolic link or in a linked directory, expected the store's own file"
    except OSError:  # absent, or reading the object will raise an error with the reason
        return None
    if not stat.S_ISREG(mode):
        return "is a folder, a pipe or a device, expected a file"
    return size_problem(key, size)


def size_problem(key: str, size: int) -> str | None:
    """What is wrong with the size of an object: it is larger than readers accept, which read it whole."""
    most = _MAX_BYTES.get(os.path.splitext(key)[1], size)
    return f"has {size:,} bytes, expected at most {most:,}" if size > most else None


def put_file(directory: str, key: str, parts: Sequence[bytes | memoryview]) -> bool:
    """Writes a file unless it exists, all of it or nothing. Returns whether it did. Raises OSError, and StoreInvalid
    for a file system without hard links."""
    path = directory + key
    make_directories(os.path.dirname(path), directory)
    is_new = not os.path.lexists(path)
    temporary = f"{path}.{secrets.token_hex(4)}{LOCK_SUFFIX}"
    try:
        if is_new:
            with open(temporary, "xb") as file:
                file.writelines(parts)
                file.flush()
                os.fsync(file.fileno())
            os.link(temporary, path)
    except FileExistsError:
        is_new = False
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        raise StoreInvalid(
            f"{path} cannot be written: its file system has no hard links ({error}). Choose a store.path on another "
            "file system; give a mounted bucket by its URL."
        ) from error
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
    # Also if another process wrote the file: a record that names it may be on the disk before that process ends.
    sync_directory(os.path.dirname(path))
    return is_new
