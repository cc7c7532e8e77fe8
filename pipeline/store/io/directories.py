"""The directories of local stores, created durably: they survive a power failure."""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from pipeline.core.errors import StoreInvalid

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
    if not os.path.basename(path).isdecimal():  # each store shard has such a directory; there are many, each used once
        _durable.add(path)


def is_linked(path: str | Path, root: str | Path) -> bool:
    """Whether `path`, which is below the directory `root`, or any directory between the two is a symbolic link."""
    path, root = os.path.abspath(path), os.path.abspath(root)
    while path != root:
        if os.path.islink(path):
            return True
        path = os.path.dirname(path)
    return False


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


def require_no_links(root: str | None, keys: Iterable[str]) -> None:
    """Raises StoreInvalid if an object of a store is a symbolic link or in a linked directory, since its content may
    then come from elsewhere. `root`: the directory of a local store; None for other storage, which has no links."""
    if root is None:
        return
    for key in keys:
        if is_linked(root + key, root):
            raise StoreInvalid(
                f"{root}{key} is a symbolic link or in a linked directory, not the store's own file. Remove the link."
            )
