"""Marks a store as complete: `python -m pipeline.finalize store.path=...`, once its jobs have ended.

A run does this itself when every stream is finished. The command can be repeated, and can run several times at once.

`index=true` also indexes the ids of the store's documents, so that `store.document("id")` takes a few requests instead
of two per block. It reads the document tables of all blocks once, and writes one file (12 bytes per document). After a
store is extended, the same command reads only the new blocks. Until then, readers read the new blocks' tables.

Exit codes: 0 complete; 1 a stream is unfinished (the message names it), or the store cannot be reached; 2 there
is no store, or it is damaged; 42 interrupted.
"""

from pipeline.cluster.startup import prepare_process

if __name__ == "__main__":
    prepare_process()

import sys
from dataclasses import dataclass

from tqdm import tqdm

from pipeline.cli.settings import command, flag, setting, store_path
from pipeline.core.errors import StoreError
from pipeline.core.messages import counted
from pipeline.store.io.storage import Storage
from pipeline.store.read.reader import REMOTE_REQUESTS
from pipeline.store.write.finalizing import finalize
from pipeline.store.write.indexing import index_ids
from pipeline.store.write.store_writer import StoreWriter


@dataclass(frozen=True)
class Settings:
    path: str = store_path()
    force: bool = setting("force", "complete it even if streams are unfinished", flag, default=False)
    index: bool = setting("index", "also index the ids of its documents", flag, default=False)


def finalize_store(settings: Settings) -> None:
    """Prints what each stream holds, and completes the store. Raises StoreError if it cannot."""
    path = settings.path
    obstacle = finalize(StoreWriter.open_existing(path), settings.force)
    if obstacle is not None:
        raise StoreError(f"cannot complete {path}: {obstacle}")
    print(f"{path}: complete")
    if settings.index:
        storage = Storage.open(path).with_own_requests(REMOTE_REQUESTS)
        with tqdm(unit="block", desc="index", file=sys.stderr) as bar:
            num_ids = index_ids(storage, bar.update)
        print(f"{path}: indexed {counted(num_ids, 'id')}")


main = command("finalize", __doc__, Settings, finalize_store)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
