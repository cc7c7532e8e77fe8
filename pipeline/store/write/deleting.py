"""Deletes a store's objects, and no other objects under the same path."""

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import takewhile
from threading import Event

from pipeline.core.errors import StoreError, StoreInvalid
from pipeline.store.format.keys import StoreKeys
from pipeline.store.format.metadata import ROOT_KEY, StoreRoot
from pipeline.store.io.directories import raise_unless_gone
from pipeline.store.io.storage import Storage, StorageLike, write_many

_DELETIONS_AT_ONCE = 128
_LISTINGS_AT_ONCE = 2  # a listing holds the keys of one array
_FOLDERS_AT_ONCE = 8


def delete_store(place: StorageLike, root: StoreRoot) -> Iterator[str]:
    """Deletes a store's objects by their exact names. Yields the names of the files that remain under its path.

    Commit records are deleted first, so that the store has no blocks. The root is deleted last, so that an interrupted
    deletion leaves a store and can be repeated. Symbolic links are neither followed nor removed.

    Raises StoreInvalid before anything is deleted if the root names arrays that no store has, or is a link, and
    StoreError.
    """
    storage = Storage.open(place)
    path = storage.path
    try:
        keys = StoreKeys(root.arrays, [spec.name for spec in root.metadata.outputs])
    except ValueError as error:
        raise StoreInvalid(f"{path}/{ROOT_KEY} was edited: {error}. Nothing was deleted.") from error
    folder = storage.directory
    if folder is None:
        return _delete_objects(storage, keys)
    if os.path.islink(folder + ROOT_KEY):
        raise StoreInvalid(f"{folder}{ROOT_KEY} is a symbolic link: the store is not {path}. Nothing was deleted.")
    try:
        return _delete_files(folder, keys)
    except OSError as error:
        raise StoreError(f"cannot delete {path}: {error}. Remove the cause, and run the same command again.") from error


def _delete_objects(storage: Storage, keys: StoreKeys) -> Iterator[str]:
    deleting = storage.with_own_requests(_DELETIONS_AT_ONCE)
    _delete_prefixes(partial(_delete_prefix, deleting, keys), keys.prefixes, _LISTINGS_AT_ONCE)
    storage.write(ROOT_KEY, None)
    return iter(storage.list_keys())


def _delete_prefixes(delete: Callable[[str, Event], None], prefixes: Sequence[str], at_once: int) -> None:
    """Deletes what is under the first prefix, then what is under the others, several in parallel.

    After an error or an interruption the event is set, and the calls of `delete` that still run return.
    """
    should_stop = Event()
    delete(prefixes[0], should_stop)
    with ThreadPoolExecutor(at_once, thread_name_prefix="delete") as pool:
        try:
            for future in [pool.submit(delete, prefix, should_stop) for prefix in prefixes[1:]]:
                future.result()
        finally:
            should_stop.set()


def _delete_prefix(storage: Storage, keys: StoreKeys, prefix: str, should_stop: Event) -> None:
    own_keys = [] if should_stop.is_set() else filter(keys.is_own, storage.list_keys(prefix))
    write_many(storage, ((key, None) for key in takewhile(lambda _: not should_stop.is_set(), own_keys)))


def _delete_files(folder: str, keys: StoreKeys) -> Iterator[str]:
    _delete_prefixes(partial(_delete_folder, folder, keys), keys.prefixes, _FOLDERS_AT_ONCE)
    for name in sorted(filter(keys.is_own, os.listdir(folder)), key=lambda name: name == ROOT_KEY):
        with suppress(FileNotFoundError):
            os.unlink(folder + name)
    with suppress(OSError):  # the folder has other files, or the path is a link
        os.rmdir(folder.rstrip("/"))
    return _files_in(folder)


def _delete_folder(folder: str, keys: StoreKeys, prefix: str, should_stop: Event) -> None:
    """Deletes the store's files in one of its folders, and the folders that are then empty.

    Works on descriptors of the folders, so that a folder that is replaced by a link meanwhile is not followed.
    """
    name = prefix.rstrip("/")
    if not os.path.isdir(folder + name) or os.path.islink(folder + name):
        return
    for directory, folders, files, descriptor in os.fwalk(folder + name, topdown=False, onerror=raise_unless_gone):
        inner = os.path.relpath(directory, folder)
        if should_stop.is_set():
            return
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
    for directory, folders, files in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(directory, name))]
        yield from (os.path.relpath(os.path.join(directory, name), folder) for name in (*files, *links))
