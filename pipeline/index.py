"""Indexes the ids of a store's documents: `python -m pipeline.index store.path=...`.

With the index, `store.document("id")` takes two requests per stream and a few more, instead of two per block. The
command reads the document tables of all blocks once, and writes a file for each stream (12 bytes per document). To
share the work among W processes, give each `index.world=W` and its own `index.rank`, from 0 to W - 1. After a store is
extended, the same command reads only the new blocks. Until then, readers read the new blocks' tables.

Exit codes: 0 indexed; 1 the store cannot be reached; 2 there is no store, or it is damaged; 42 interrupted.
"""

from pipeline.cluster.startup import prepare_process

if __name__ == "__main__":
    prepare_process()

import sys
from dataclasses import dataclass

from tqdm import tqdm

from pipeline.cli.settings import require_rank, setting, store_path, whole_number
from pipeline.cli.store_command import run_command
from pipeline.core.counts import counted
from pipeline.core.errors import EXIT_OK
from pipeline.store.format.metadata import require_root
from pipeline.store.io.storage import Storage
from pipeline.store.read.reader import REMOTE_REQUESTS
from pipeline.store.write.indexing import index_ids


@dataclass(frozen=True)
class Settings:
    path: str = store_path()
    rank: int = setting("index.rank", "which share of the streams to index, from 0", whole_number(0), default=0)
    world: int = setting("index.world", "the number of shares", whole_number(1), default=1)


def index(settings: Settings) -> int:
    """Indexes this rank's streams, with a progress bar in blocks. Returns the exit code."""
    require_rank("index", settings.rank, settings.world)
    storage = Storage.open(settings.path).with_own_requests(REMOTE_REQUESTS)
    streams = range(settings.rank, require_root(storage).metadata.num_streams, settings.world)
    with tqdm(unit="block", desc="index", file=sys.stderr) as bar:
        index_ids(storage, streams, bar.update)
    print(f"{settings.path}: indexed the ids of {counted(len(streams), 'stream')}")
    return EXIT_OK


def main(arguments: list[str]) -> int:
    return run_command("index", __doc__, Settings, index, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
