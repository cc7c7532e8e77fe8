"""Directories of local stores: made so that their content survives a loss of power."""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from pipeline.core.errors import StoreInvalid

_durable: set[str] = set()  # directories whose entry in their parent directory is on the disk


def make_directories(path: str | Path, root: str | Path) -> None:
    """Makes a directory in `root`, or `root`, and its missing parents; their entries are then on the disk.

    Also the entries of existing directories in `root`, which another process may have made a moment ago. Raises
    OSError.
    """
    path, root = os.path.abspath(path), os.path.abspath(root)
    if path in _durable and os.path.isdir(path):
        return
    if path == root and os.path.isdir(path):
        return
    above = os.path.dirname(path)
    if path != root:
        make_directories(above, root)
    elif not os.path.isdir(above):
        make_directories(above, above)
    if not os.path.isdir(path):
        try:
            os.mkdir(path)
        except FileExistsError:  # another process was faster
            if not os.path.isdir(path):
                raise
    with suppress(PermissionError):  # a directory that cannot be listed cannot be synced
        sync_directory(above)
    if not os.path.basename(path).isdecimal():  # each store shard has one of these: they are many, and used once
        _durable.add(path)


def is_linked(path: str | Path, root: str | Path) -> bool:
    """Whether a path in the directory `root`, or a directory between the two, is a symbolic link."""
    path, root = os.path.abspath(path), os.path.abspath(root)
    while path != root:
        if os.path.islink(path):
            return True
        path = os.path.dirname(path)
    return False


def raise_unless_gone(error: OSError) -> None:
    """For `onerror` of os.walk: passes over a directory that another process has removed or replaced meanwhile."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


def sync_directory(path: str | Path) -> None:
    """Returns when the directory's entries are on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def require_no_links(root: str | None, keys: Iterable[str]) -> None:
    """Raises StoreInvalid where an object of the store in `root` (None: no local one) is a symbolic link, or in a
    directory that is one: its content need not be the store's."""
    if root is None:
        return
    for key in keys:
        if is_linked(root + key, root):
            raise StoreInvalid(f"{root}{key} is a symbolic link, or in one: it is not the store's. Remove the link.")
