"""Writes the index of a store's document ids from its document tables, for the command `pipeline.finalize`."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from pipeline.core.errors import StoreError
from pipeline.store.format.metadata import change_root, require_root
from pipeline.store.format.summary import IDS, IDS_BYTES, put_summary, read_blocks
from pipeline.store.format.tables import read_tables
from pipeline.store.ids.index import block_entries, encode_index, open_ids
from pipeline.store.io.storage import Storage


def index_ids(storage: Storage, progress: Callable[[int], None] = lambda _: None) -> int:
    """Writes the index of the ids of a finished store's documents, and names it in the root. Returns how many it has.

    Blocks that the store's index covers are not read again. `progress` is called with the number of blocks done since
    the previous call. Raises StoreInvalid for damage, and StoreError, also for a store that was never finished.
    """
    root = require_root(storage)
    if root.summary is None:
        raise StoreError(f"{storage.path} is not finished. Finish it, or run pipeline.finalize with force=true.")
    num_streams, blocks = root.metadata.num_streams, read_blocks(storage, root)
    covered, parts = np.zeros(num_streams, np.int64), []
    if (known := open_ids(storage, root)) is not None:
        covered, parts = known.covered, [known.entries()]
    progress(int(covered.sum()))
    new = blocks[np.flatnonzero(blocks.column("block") >= covered[blocks.column("stream")])]
    for block, documents in zip(new, read_tables(storage, new), strict=True):
        parts.append(block_entries(documents["id"].to_pylist(), block.block * num_streams + block.stream))
        progress(1)
    content = encode_index(parts, blocks.per_stream(num_streams).tolist())
    index = {IDS: put_summary(storage, IDS, content), IDS_BYTES: len(content)}
    change_root(storage, lambda root: replace(root, summary={**(root.summary or {}), **index}))
    return sum(map(len, parts))
