"""Deletes a store's objects, and no other objects under the same path."""

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress

from pipeline.core.errors import StoreError
from pipeline.store.format.arrays import layout_of, own_keys
from pipeline.store.format.keys import FOLDERS
from pipeline.store.format.metadata import ROOT_KEY, StoreRoot
from pipeline.store.io.local_files import files_below, raise_unless_gone
from pipeline.store.io.storage import Storage, StorageLike

_DELETIONS_AT_ONCE = 128


def delete_store(place: StorageLike, root: StoreRoot) -> Iterator[str]:
    """Deletes a store's objects by their exact names. Returns the names of the files that remain under its path.

    Commit records are deleted first, so that the store has no blocks. The root is deleted last, so that an interrupted
    deletion leaves a store and can be repeated. Symbolic links are neither followed nor removed.

    Raises StoreError.
    """
    storage = Storage.open(place)
    folders = (*FOLDERS, *(spec.name for spec in layout_of(root).all_arrays))
    is_own, directory = own_keys(root), storage.directory
    if directory is None:
        deleting = storage.with_own_requests(_DELETIONS_AT_ONCE)
        for folder in folders:
            deleting.delete(filter(is_own, deleting.list_keys(f"{folder}/")))
        storage.write(ROOT_KEY, None)
        return iter(storage.list_keys())
    try:
        for folder in folders:
            _delete_folder(directory, folder, is_own)
        for name in sorted(filter(is_own, os.listdir(directory)), key=lambda name: name == ROOT_KEY):
            with suppress(FileNotFoundError):
                os.unlink(directory + name)
        with suppress(OSError):  # the directory has other files, or the path is a link
            os.rmdir(directory.rstrip("/"))
        return files_below(directory, onerror=None)  # some may be unreadable, and are not the store's
    except OSError as error:
        raise StoreError(
            f"cannot delete {storage.path}: {error}. Remove the cause, and run the same command again."
        ) from error


def _delete_folder(directory: str, folder: str, is_own: Callable[[str], bool]) -> None:
    """Deletes the store's files in one of its folders, and the folders that are then empty.

    Works on descriptors of the folders, so that a folder that is replaced by a link meanwhile is not followed.
    """
    if not os.path.isdir(directory + folder) or os.path.islink(directory + folder):
        return
    for path, children, files, descriptor in os.fwalk(directory + folder, topdown=False, onerror=raise_unless_gone):
        inner = os.path.relpath(path, directory)
        for file in files:
            if is_own(f"{inner}/{file}"):
                status = os.stat(file, dir_fd=descriptor, follow_symlinks=False)
                if not stat.S_ISLNK(status.st_mode):
                    os.unlink(file, dir_fd=descriptor)
        for child in children:
            with suppress(OSError):  # the folder is a link, or has other files
                os.rmdir(child, dir_fd=descriptor)
    with suppress(OSError):
        os.rmdir(directory + folder)
