"""Deletes a store: `python -m pipeline.delete store.path=... confirm=true`. Without `confirm=true`, only describes it.

Deletes only objects with the exact names of a store's objects. Other files and symbolic links stay and are listed;
links are not followed. The store's root is deleted last, so an interrupted deletion can be repeated.

Exit codes: 0 deleted; 1 a process has leased a stream of the store, or it cannot be reached; 2 not confirmed, or there
is no store; 42 interrupted.
"""

from pipeline.cluster.startup import prepare_process

if __name__ == "__main__":
    prepare_process()

import sys
from dataclasses import dataclass
from itertools import islice

from pipeline.cli.settings import command, flag, setting, store_path
from pipeline.core.errors import ConfigError, StoreError
from pipeline.core.messages import counted
from pipeline.store.format.commits import COMMITS_PREFIX, parse_commit_key
from pipeline.store.format.keys import LEASES_PREFIX
from pipeline.store.format.metadata import require_root
from pipeline.store.io.storage import Storage
from pipeline.store.write.store_path import delete_store

_MAX_NAMED = 5  # leases and remaining files that a message names


@dataclass(frozen=True)
class Settings:
    path: str = store_path()
    confirm: bool = setting("confirm", "delete the store, instead of describing it", flag, default=False)
    force: bool = setting(
        "force", "delete it although its streams are leased; only if those processes are dead", flag, default=False
    )


def delete(settings: Settings) -> None:
    """Deletes the store, and prints the files that remain at its path."""
    path = settings.path
    storage = Storage.open(path)
    root = require_root(storage)
    if not settings.confirm:
        features = (sae["features"] for sae in root.metadata.encoders)
        state, arrays = "complete" if root.complete else "unfinished", ", ".join([*root.arrays, *features])
        blocks = sum(parse_commit_key(key) is not None for key in storage.list_keys(COMMITS_PREFIX))
        raise ConfigError(
            f"{path}: {state} store of {arrays} with {counted(blocks, 'block')}, created {root.created}. confirm=true "
            "deletes it."
        )
    leases = [] if settings.force else storage.list_keys(LEASES_PREFIX)
    if leases:
        raise StoreError(
            f"cannot delete {path}: processes have leased streams ({', '.join(leases[:_MAX_NAMED])}). Wait until they "
            "end, or set force=true if they are dead."
        )
    left = list(islice(delete_store(storage, root), _MAX_NAMED + 1))
    names = ", ".join(left[:_MAX_NAMED]) + (", ..." if len(left) > _MAX_NAMED else "")
    print(f"{path}: deleted" + (f", except files that are not part of the store: {names}" if left else ""))


main = command("delete", __doc__, Settings, delete)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
