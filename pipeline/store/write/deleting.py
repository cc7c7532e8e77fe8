"""Deleting a store's own objects, and nothing else at its place."""

import os
import stat
from collections import deque
from collections.abc import Iterator
from contextlib import suppress

import tensorstore as ts

from pipeline.core.errors import StoreError, StoreInvalid
from pipeline.store.format.commits import COMMITS_PREFIX, CONSOLIDATED_KEY
from pipeline.store.format.keys import LOCK_SUFFIX, StoreKeys
from pipeline.store.format.metadata import ROOT_KEY, StoreRoot
from pipeline.store.io.directories import raise_unless_gone
from pipeline.store.io.storage import Storage, StorageLike

_DELETIONS_AHEAD = 256


def delete_store(place: StorageLike, root: StoreRoot) -> Iterator[str]:
    """Deletes a store's objects, by their exact names; yields the names of the files that are left at its place.

    The commit records go first, so that no block is left, and the root last: what an interruption leaves is a store,
    whose deletion can be repeated. No symbolic link is followed or removed. Raises StoreInvalid, before anything is
    deleted, where the root names arrays that no store has, or is a link, and StoreError.
    """
    storage = Storage.open(place)
    path = storage.path
    try:
        keys = StoreKeys(root.arrays)
    except ValueError as error:
        raise StoreInvalid(f"{path}/{ROOT_KEY} was edited: of its arrays {error}. Nothing is deleted.") from error
    folder = storage.directory
    if folder is None:
        return _delete_objects(storage, keys)
    if os.path.islink(folder + ROOT_KEY):
        raise StoreInvalid(f"{folder}{ROOT_KEY} is a symbolic link: the store is not {path}. Nothing is deleted.")
    try:
        return _delete_files(folder, keys)
    except OSError as error:
        raise StoreError(
            f"{path} is not deleted: {error}. Remove the cause, and run the same command again."
        ) from error


def _delete_objects(storage: Storage, keys: StoreKeys) -> Iterator[str]:
    storage.write(CONSOLIDATED_KEY, None)
    for prefix in keys.prefixes:
        own = [key for key in storage.list_keys(prefix) if keys.is_own(key)]
        under_way: deque[tuple[str, ts.Future]] = deque()
        for key in own:
            under_way.append((key, storage.start_write(key, None)))
            if len(under_way) > _DELETIONS_AHEAD:
                _wait(storage, *under_way.popleft())
        while under_way:
            _wait(storage, *under_way.popleft())
    storage.write(ROOT_KEY, None)
    return iter(storage.list_keys())


def _wait(storage: Storage, key: str, deletion: ts.Future) -> None:
    with storage.errors(key):
        deletion.result()


def _delete_files(folder: str, keys: StoreKeys) -> Iterator[str]:
    with suppress(FileNotFoundError):
        if not os.path.islink(folder + COMMITS_PREFIX.rstrip("/")):
            os.unlink(folder + CONSOLIDATED_KEY)
    for prefix in keys.prefixes:
        name = prefix.rstrip("/")
        if os.path.isdir(folder + name) and not os.path.islink(folder + name):
            _delete_folder(folder, name, keys)
    for name in (ROOT_KEY, ROOT_KEY + LOCK_SUFFIX):
        with suppress(FileNotFoundError):
            os.unlink(folder + name)
    with suppress(OSError):  # the folder has other files, or the path is a link
        os.rmdir(folder.rstrip("/"))
    return _files_in(folder)


def _delete_folder(folder: str, name: str, keys: StoreKeys) -> None:
    """Deletes the store's files in one of its folders, and the folders that are then empty.

    By descriptors of the folders: one that is exchanged for a link meanwhile is not followed.
    """
    for at, folders, files, descriptor in os.fwalk(folder + name, topdown=False, onerror=raise_unless_gone):
        inner = os.path.relpath(at, folder)
        for file in files:
            if keys.is_own(f"{inner}/{file}") and not _is_link(file, descriptor):
                os.unlink(file, dir_fd=descriptor)
        for child in folders:
            if keys.is_own_folder(f"{inner}/{child}"):
                with suppress(OSError):  # the folder is a link, or has other files
                    os.rmdir(child, dir_fd=descriptor)
    with suppress(OSError):
        os.rmdir(folder + name)


def _is_link(file: str, descriptor: int) -> bool:
    return stat.S_ISLNK(os.stat(file, dir_fd=descriptor, follow_symlinks=False).st_mode)


def _files_in(folder: str) -> Iterator[str]:
    for at, folders, files in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(at, name))]
        yield from (os.path.relpath(os.path.join(at, name), folder) for name in (*files, *links))
