"""Indexes the ids of a finished store's documents: `python -m pipeline.index store.path=...`.

With the index, `store.document("id")` takes a few requests, instead of two per block. The command reads the document
tables of all blocks once, and writes one file (12 bytes per document). After a store is extended, the same command
reads only the new blocks. Until then, readers read the new blocks' tables.

Exit codes: 0 indexed; 1 the store cannot be reached or is not finished; 2 there is no store, or it is damaged; 42
interrupted.
"""

from pipeline.cluster.startup import prepare_process

if __name__ == "__main__":
    prepare_process()

import sys
from dataclasses import dataclass

from tqdm import tqdm

from pipeline.cli.settings import store_path
from pipeline.cli.store_command import run_command
from pipeline.core.counts import counted
from pipeline.core.errors import EXIT_OK
from pipeline.store.io.storage import Storage
from pipeline.store.read.reader import REMOTE_REQUESTS
from pipeline.store.write.indexing import index_ids


@dataclass(frozen=True)
class Settings:
    path: str = store_path()


def index(settings: Settings) -> int:
    """Indexes the store, with a progress bar in blocks. Returns the exit code."""
    storage = Storage.open(settings.path).with_own_requests(REMOTE_REQUESTS)
    with tqdm(unit="block", desc="index", file=sys.stderr) as bar:
        num_ids = index_ids(storage, bar.update)
    print(f"{settings.path}: indexed {counted(num_ids, 'id')}")
    return EXIT_OK


def main(arguments: list[str]) -> int:
    return run_command("index", __doc__, Settings, index, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
