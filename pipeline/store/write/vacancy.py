"""Checks before a store is created that its path has no other objects."""

from itertools import islice

from pipeline.core.errors import StoreError, StoreInvalid
from pipeline.store.format.commits import COMMITS_PREFIX
from pipeline.store.format.keys import Kind, parse_key
from pipeline.store.format.metadata import ROOT_KEY
from pipeline.store.io.local_files import files_below
from pipeline.store.io.storage import Storage

_MAX_NAMED = 3  # foreign files that the message names


def require_vacant(storage: Storage) -> bool:
    """Whether a store can be created under a path where no root was found. False if there is a root now, which another
    process may have written meanwhile.

    These may exist: objects that a worker wrote after the store was deleted, temporary files of its root, empty
    folders, names that begin with a dot, and lost+found. Raises StoreInvalid for others, and StoreError.
    """
    # Local files are listed lazily, since a folder may be large.
    keys = storage.list_keys() if storage.directory is None else files_below(storage.directory)
    try:
        foreign = list(islice((key for key in keys if not _may_stay(key)), _MAX_NAMED + 1))
    except OSError as error:
        raise StoreError(
            f"{storage.directory} cannot be listed: {error}. Check access to it, or choose another store.path."
        ) from error
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


def _may_stay(key: str) -> bool:
    """Whether a store may be created while this key exists."""
    if not key or key.endswith("/"):  # stands for an empty folder in web consoles and mounted buckets
        return True
    parsed = parse_key(key)
    return (parsed is not None and parsed.kind in (Kind.root, Kind.job)) or key.startswith((".", "lost+found/"))
