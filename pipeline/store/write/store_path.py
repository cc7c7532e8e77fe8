"""The path of a store: it must have no other objects when the store is created, and keeps these when it is deleted."""

import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice

from pipeline.core.errors import StoreInvalid
from pipeline.store.format.arrays import layout_of, own_keys
from pipeline.store.format.commits import COMMITS_PREFIX
from pipeline.store.format.keys import FOLDERS, Kind, parse_key
from pipeline.store.format.metadata import ROOT_KEY, StoreRoot
from pipeline.store.io.failures import storage_errors
from pipeline.store.io.local_files import files_below, remove_empty_folders
from pipeline.store.io.storage import Storage, StorageLike

_MAX_NAMED = 3  # foreign files that the message names
_DELETIONS_AT_ONCE = 128


def require_vacant(storage: Storage) -> bool:
    """Whether a store can be created under a path where no root was found. False if there is a root now, which another
    process may have written meanwhile.

    These may exist: objects that a worker wrote after the store was deleted, temporary files of its root, empty
    folders, names that begin with a dot, and lost+found. Raises StoreInvalid for others, and StoreError.
    """
    foreign = list(islice((key for key in _names(storage) if not _may_stay(key)), _MAX_NAMED + 1))
    if not foreign:
        return True

    def require_root(_key: str, content: bytes | None) -> bool:
        if content is not None:
            return False
        if storage.list_keys(COMMITS_PREFIX):
            raise StoreInvalid(
                f"{storage.path} has commit records, but its {ROOT_KEY} is missing. Restore it, or choose another "
                "store.path."
            )
        named = ", ".join(foreign[:_MAX_NAMED]) + (", ..." if len(foreign) > _MAX_NAMED else "")
        raise StoreInvalid(
            f"{storage.path} is not empty and is not a store: {named}. Set store.path to an empty or new folder."
        )

    return next(storage.read_checked([ROOT_KEY], require_root))


def _names(storage: Storage, prefix: str = "") -> Iterator[str]:
    """The names in a folder (with a slash) and below it. On a local path also of links and of temporary files, one
    folder after the other."""
    with storage_errors(storage.url(prefix)):
        yield from storage.list_keys(prefix) if storage.directory is None else files_below(storage.directory, prefix)


def _may_stay(key: str) -> bool:
    """Whether a store may be created while this key exists."""
    if not key or key.endswith("/"):  # stands for an empty folder in web consoles and mounted buckets
        return True
    parsed = parse_key(key)
    return (parsed is not None and parsed.kind in (Kind.root, Kind.job)) or key.startswith((".", "lost+found/"))


def delete_store(place: StorageLike, root: StoreRoot) -> Iterator[str]:
    """Deletes a store's objects by their exact names. Returns the names of the files that remain under its path.

    Commit records are deleted first, so that the store has no blocks. The root is deleted last, so that an interrupted
    deletion leaves a store and can be repeated. Symbolic links are neither followed nor removed. Raises StoreError.
    """
    storage = Storage.open(place).with_own_requests(_DELETIONS_AT_ONCE)
    is_own, directory = own_keys(root), storage.directory
    for folder in (*FOLDERS, *(spec.name for spec in layout_of(root).all_arrays)):
        names = filter(is_own, _names(storage, f"{folder}/"))
        storage.delete(name for name in names if directory is None or not os.path.islink(directory + name))
        if directory is not None:
            remove_empty_folders(directory + folder)
    with storage_errors(storage.path):  # another process may have deleted the store meanwhile
        names = [ROOT_KEY] if directory is None else list(filter(is_own, os.listdir(directory)))
    storage.delete(sorted(names, key=lambda name: name == ROOT_KEY))
    if directory is None:
        return _names(storage)
    with suppress(OSError):  # the directory has other files, or the path is a link
        os.rmdir(directory.rstrip("/"))
    return files_below(directory, onerror=None)  # some may be unreadable, and are not the store's
