"""The summary of a finished store: tables of its blocks, its statistics and, on request, the ids of its documents.

They are immutable parquet files, whose names contain their digest. The root names the current ones, so that finishing a
store again, or after an extension, changes nothing that a reader has opened.
"""

from pipeline.store.format.block_table import BlockTable, join_streams, read_streams, split_streams
from pipeline.store.format.commits import read_commit_records
from pipeline.store.format.metadata import StoreRoot
from pipeline.store.format.statistics import Statistics, decode_statistics, merge_streams
from pipeline.store.io.parquet import table_digest
from pipeline.store.io.storage import Storage

SUMMARY_PREFIX = "_summary/"
BLOCKS, STATISTICS, IDS = "blocks", "statistics", "ids"  # keys of the root's summary: the sha256 of these files
IDS_BYTES = "ids_bytes"  # the size of the file of ids, of which readers read parts


def summary_key(kind: str, sha256: str) -> str:
    """The key of a summary's file, relative to the store. kind: blocks, statistics or ids."""
    return f"{SUMMARY_PREFIX}{kind}-{sha256[:16]}.parquet"


def put_summary(storage: Storage, kind: str, content: bytes) -> str:
    """Puts a summary's file unless the store has it. Returns its sha256, for the root. Raises StoreError."""
    sha256 = table_digest(content)
    storage.put(summary_key(kind, sha256), content)
    return sha256


def read_blocks(storage: Storage, root: StoreRoot) -> BlockTable:
    """The committed blocks of a store, in row order: those of its summary and, unless it is complete, later ones.

    Raises StoreInvalid for damage, and StoreError.
    """
    num_streams, table = root.metadata.num_streams, read_summarised(storage, root)
    if root.complete:
        return table
    known = dict(enumerate(split_streams(table, num_streams)))
    return join_streams(read_streams(storage, range(num_streams), known))


def read_summarised(storage: Storage, root: StoreRoot) -> BlockTable:
    """The blocks of a store's summary, in row order; none before the store is finished. Raises as `read_blocks`."""
    if (sha256 := (root.summary or {}).get(BLOCKS)) is None:
        return BlockTable()

    def check(key: str, content: bytes | None) -> BlockTable:
        return BlockTable.decode(content, key, sha256, root.metadata.num_streams)

    return next(storage.read_checked([summary_key(BLOCKS, sha256)], check))


def read_statistics(storage: Storage, root: StoreRoot, blocks: BlockTable) -> dict[str, Statistics]:
    """The statistics of all tokens of these blocks, the store's, by array; {} if it has none. Raises StoreError.

    Those of a complete store are in one file. Otherwise they are merged from a file per stream.
    """
    sha256 = (root.summary or {}).get(STATISTICS)
    if root.complete:
        return read_merged(storage, sha256) if sha256 else {}
    last = [part[-1] for part in split_streams(blocks, root.metadata.num_streams) if len(part)]
    return merge_streams(storage, list(read_commit_records(storage, [(block.stream, block.block) for block in last])))


def read_merged(storage: Storage, sha256: str) -> dict[str, Statistics]:
    """The summary's statistics. Raises StoreInvalid for damage, and StoreError."""
    key = summary_key(STATISTICS, sha256)
    return next(storage.read_checked([key], lambda key, content: decode_statistics(content, key, sha256)))
