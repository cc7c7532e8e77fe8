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
from pipeline.store.format.metadata import require_root
from pipeline.store.format.target import has_share, stream_share
from pipeline.store.indexes.ids import index_ids
from pipeline.store.io.storage import Storage
from pipeline.store.read.shard_reads import REMOTE_REQUESTS
from pipeline.store.write.store_writer import StoreWriter


@dataclass(frozen=True)
class Settings:
    path: str = store_path()
    force: bool = setting("force", "complete it even if streams are unfinished", flag, default=False)
    index: bool = setting("index", "also index the ids of its documents", flag, default=False)


def finalize_store(settings: Settings) -> None:
    """Completes the store and, if asked to, indexes the ids of its documents. Raises StoreError if it cannot."""
    path = settings.path
    if (obstacle := finalize(StoreWriter.open_existing(path), settings.force)) is not None:
        raise StoreError(f"cannot complete {path}: {obstacle}")
    print(f"{path}: complete")
    if settings.index:
        storage = Storage.open(path).with_own_requests(REMOTE_REQUESTS)
        with tqdm(unit="block", desc="index", file=sys.stderr) as bar:
            num_ids = index_ids(storage, bar.update)
        print(f"{path}: indexed {counted(num_ids, 'id')}")


def finalize(store: StoreWriter, is_forced: bool = False) -> str | None:
    """Marks the store complete. Returns None, or why it cannot. Raises StoreError."""
    if store.finish(is_forced):
        return None
    num_streams, target = store.metadata.num_streams, require_root(store.storage).target
    unfinished = [
        stream
        for stream, blocks in store.streams.all().items()
        if not has_share(blocks.table, stream_share(target, num_streams, stream))
    ]
    return (
        f"streams {', '.join(map(str, unfinished))} are unfinished. Let the jobs continue, start another, or run "
        "pipeline.finalize with force=true to complete the store as it is."
    )


main = command("finalize", __doc__, Settings, finalize_store)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
