"""Directories of local stores: made so that what is in them survives a loss of power."""

import os
from contextlib import suppress
from pathlib import Path

_durable: set[str] = set()  # directories whose entry in the one above is on the disk


def make_directories(path: str | Path, root: str | Path) -> None:
    """Makes a directory in `root`, or `root`, and all that are missing above it; their entries are then on the disk.

    Also those that are there already, but for the ones above `root`: another process may have made them a moment ago.
    Raises OSError.
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
    with suppress(PermissionError):  # in a directory that nobody may list a new one can be made, but not synced
        sync_directory(above)
    if not os.path.basename(path).isdecimal():  # those of one store shard each are many, and met once
        _durable.add(path)


def is_linked(path: str | Path, root: str | Path) -> bool:
    """Whether a path in the directory `root`, or a directory between the two, is a symbolic link."""
    path, root = os.path.abspath(path), os.path.abspath(root)
    while path != root:
        if os.path.islink(path):
            return True
        path = os.path.dirname(path)
    return False


def sync_directory(path: str | Path) -> None:
    """Returns when the directory's entries are on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
