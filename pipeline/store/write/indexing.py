"""Writes the indexes of a store's document ids from its document tables, for the command `pipeline.index`."""

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from pipeline.core.errors import StoreInvalid
from pipeline.store.format.block_table import read_stream
from pipeline.store.format.tables import read_tables
from pipeline.store.ids.index_file import IndexHeader, block_entries, decode_index, ids_key, sorted_entries
from pipeline.store.io.storage import Storage

_STREAMS_AT_ONCE = 4  # takes 24 bytes of memory per document of these streams


def index_ids(storage: Storage, streams: Iterable[int], progress: Callable[[int], None] | None = None) -> None:
    """Writes the index of each stream's document ids. The same blocks give the same bytes.

    Blocks that an existing index covers are not read again. An index that is damaged or covers different blocks is
    replaced. `progress` is called with the number of blocks done since the previous call. Raises StoreInvalid for a
    damaged record or document table, and StoreError.
    """
    with ThreadPoolExecutor(_STREAMS_AT_ONCE, thread_name_prefix="index") as pool:
        deque(pool.map(partial(_index_stream, storage, progress or (lambda _: None)), streams), maxlen=0)


def _index_stream(storage: Storage, progress: Callable[[int], None], stream: int) -> None:
    key, table = ids_key(stream), read_stream(storage, stream).table
    if not len(table):
        return
    num_known, parts = 0, []
    content = storage.read(key)
    if content is not None:
        try:
            header, entries = decode_index(content, key)
        except StoreInvalid:  # replaced below
            pass
        else:
            num_known = header.num_known(table) or 0
            parts.append(entries[entries["block"] < num_known])
    progress(num_known)
    blocks = table[num_known:]
    for block, documents in zip(blocks, read_tables(storage, blocks), strict=True):
        parts.append(block_entries(documents["id"].to_pylist(), block.block))
        progress(1)
    entries = sorted_entries(parts)
    indexed = IndexHeader.of(table, len(entries), key).encode(entries)
    if indexed != content:
        storage.write(key, indexed)
