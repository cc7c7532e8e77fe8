"""The directories of local stores, created durably: they survive a power failure."""

import os
from contextlib import suppress
from pathlib import Path

_durable: set[str] = set()  # directories whose entry in the parent directory is known to be on the disk


def make_directories(path: str | Path, root: str | Path) -> None:
    """Creates the directory `path`, which is `root` or below it, with its missing parents. Raises OSError.

    When it returns, their entries are on the disk, and so are those of existing directories below `root`, which another
    process may just have created.
    """
    path, root = os.path.abspath(path), os.path.abspath(root)
    if path in _durable and os.path.isdir(path):
        return
    if path == root and os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    if path != root:
        make_directories(parent, root)
    elif not os.path.isdir(parent):
        make_directories(parent, parent)
    if not os.path.isdir(path):
        try:
            os.mkdir(path)
        except FileExistsError:  # another process was faster
            if not os.path.isdir(path):
                raise
    with suppress(PermissionError):  # a directory that cannot be listed cannot be synced
        sync_directory(parent)
    _durable.add(path)


def raise_unless_gone(error: OSError) -> None:
    """For `onerror` of os.walk: ignores a directory that another process has just removed or replaced."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


def sync_directory(path: str | Path) -> None:
    """Flushes a directory's entries to the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
