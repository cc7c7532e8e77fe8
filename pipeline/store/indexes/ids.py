"""The index of a store's document ids: for the hash of each id, the blocks whose document table has it.

It is one parquet file of all streams, sorted by hash, in row groups of which a lookup reads one. The index repeats what
the document tables contain. It covers the first blocks of each stream, and stays valid when a store is extended.
"""

import hashlib
import io
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Bool, Int64, Shaped

from pipeline.core.errors import StoreError, StoreInvalid
from pipeline.core.range_file import RangeFile
from pipeline.store.format.block_table import BlockTable
from pipeline.store.format.metadata import StoreRoot, change_root, require_root
from pipeline.store.format.summary import IDS, IDS_BYTES, put_summary, read_blocks, summary_key
from pipeline.store.format.tables import read_tables
from pipeline.store.io.failures import DAMAGE_REMEDY
from pipeline.store.io.storage import Storage

ENTRY = np.dtype([("hash", "<u8"), ("shard", "<u4")])  # shard: block * num_streams + stream
_SCHEMA = pa.schema([(name, pa.from_numpy_dtype(ENTRY[name])) for name in ENTRY.names])
_ROW_GROUP = 65_536  # entries: 787 kB
_COVERED = b"blocks_per_stream"  # key of the schema's metadata

T = TypeVar("T")

Entries = Shaped[np.ndarray, " n"]  # of ENTRY


def id_hash(id: str) -> int:
    """The first 64 bits of the sha256 of an id."""
    return int.from_bytes(hashlib.sha256(id.encode("utf-8", "surrogatepass")).digest()[:8], "little")


def block_entries(ids: Iterable[str], shard: int) -> Entries:
    """The entries of a block's documents, unsorted."""
    hashes = [id_hash(id) for id in ids]
    entries = np.empty(len(hashes), ENTRY)
    entries["hash"], entries["shard"] = hashes, shard
    return entries


def encode_index(parts: Sequence[Entries], covered: Sequence[int]) -> bytes:
    """The file with these entries. covered: how many first blocks of each stream they are from."""
    entries = np.sort(np.concatenate([np.empty(0, ENTRY), *parts]), order=["hash", "shard"])
    schema = _SCHEMA.with_metadata({_COVERED: json.dumps(list(covered))})
    sink = io.BytesIO()
    pq.write_table(
        pa.table([entries[name] for name in ENTRY.names], schema=schema),
        sink,
        row_group_size=_ROW_GROUP,
        compression="none",
        use_dictionary=False,
        write_page_checksum=True,
    )
    return sink.getvalue()


def index_ids(storage: Storage, progress: Callable[[int], None] = lambda _: None) -> int:
    """Writes the index of the ids of a finished store's documents, and names it in the root. Returns how many it has.

    `progress` is called with the number of blocks done since the previous call. Raises StoreInvalid for damage, and
    StoreError, also for a store that was never finished.
    """
    root = require_root(storage)
    if root.summary is None:
        raise StoreError(f"{storage.path} is not finished. Finish it, or run pipeline.finalize with force=true.")
    num_streams, blocks = root.metadata.num_streams, read_blocks(storage, root)
    parts = []
    for block, documents in zip(blocks, read_tables(storage, blocks), strict=True):
        parts.append(block_entries(documents["id"].to_pylist(), block.block * num_streams + block.stream))
        progress(1)
    content = encode_index(parts, blocks.per_stream(num_streams).tolist())
    index = {IDS: put_summary(storage, IDS, content), IDS_BYTES: len(content)}
    change_root(storage, lambda root: root.summary and replace(root, summary={**root.summary, **index}))
    return sum(map(len, parts))


def open_ids(storage: Storage, root: StoreRoot) -> "StoredIds | None":
    """The index of ids that the root names; None if it names none. Raises StoreInvalid and StoreError."""
    summary = root.summary or {}
    if summary.get(IDS) is None:
        return None
    return StoredIds(storage, summary[IDS], summary[IDS_BYTES], root.metadata.num_streams)


class StoredIds:
    """The index of a store's ids, as its root names it. Methods raise StoreInvalid if it is damaged, and StoreError."""

    def __init__(self, storage: Storage, sha256: str, size: int, num_streams: int) -> None:
        """size: of the file, in bytes."""
        self._storage = storage
        self._key = summary_key(IDS, sha256)
        self._num_streams = num_streams
        self._file = storage.retry_read(partial(self._checked, lambda: self._open(size)))

    def _open(self, size: int) -> pq.ParquetFile:
        def read(start: int, length: int) -> bytes:
            stop = size if length < 0 else min(start + length, size)
            [content] = self._storage.read_many([self._key], [(start, stop)])
            if content is None:
                raise StoreInvalid(f"{self._storage.path}/{self._key} is missing. {DAMAGE_REMEDY}")
            return content

        file = pq.ParquetFile(
            pa.PythonFile(RangeFile(read, lambda: size), mode="r"),
            page_checksum_verification=True,
            pre_buffer=True,
        )
        if file.schema_arrow.remove_metadata() != _SCHEMA:
            raise ValueError(f"its columns are {file.schema_arrow.names}, expected {_SCHEMA.names}")
        groups = map(file.metadata.row_group, range(file.metadata.num_row_groups))
        self._least, self._most = np.array(list(map(_least_and_most, groups)), np.uint64).reshape(-1, 2).T
        covered = json.loads((file.schema_arrow.metadata or {})[_COVERED])
        self.covered: Int64[np.ndarray, " streams"] = np.array(covered, np.int64).reshape(self._num_streams)
        return file

    def _checked(self, read: Callable[[], T]) -> T:
        try:
            return read()
        except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, OverflowError) as error:
            raise StoreInvalid(
                f"{self._storage.path}/{self._key} is not an index of ids: {error}. {DAMAGE_REMEDY}"
            ) from error

    def covers(self, blocks: BlockTable) -> Bool[np.ndarray, " n"]:
        """Whether the index has the documents of each block."""
        return blocks.column("block") < self.covered[blocks.column("stream")]

    def find(self, id: str, blocks: BlockTable) -> BlockTable:
        """Those of `blocks` that have a document with this id according to the index, which reads one row group. Since
        it contains hashes, they may include blocks of a different id."""
        hash = np.uint64(id_hash(id))
        groups = np.flatnonzero((self._least <= hash) & (hash <= self._most)).tolist()
        entries = self._storage.retry_read(partial(self._checked, lambda: self._read(groups)))
        shards = blocks.column("block") * self._num_streams + blocks.column("stream")
        hits = np.isin(shards, entries["shard"][entries["hash"] == hash])
        return blocks[np.flatnonzero(self.covers(blocks) & hits)]

    def _read(self, groups: list[int]) -> Entries:
        table = self._file.read_row_groups(groups, use_threads=False) if groups else _SCHEMA.empty_table()
        entries = np.empty(table.num_rows, ENTRY)
        for name in ENTRY.names:
            entries[name] = table[name].to_numpy()
        return entries


def _least_and_most(group: pq.RowGroupMetaData) -> tuple[int, int]:
    """The first and the last hash of a row group. Raises ValueError if it is not as `encode_index` writes it."""
    if not group.num_rows:
        return 1, 0
    statistics = group.column(0).statistics
    if group.num_rows > _ROW_GROUP or statistics is None or not statistics.has_min_max:
        raise ValueError(f"it has a row group of {group.num_rows:,} rows, or one without statistics")
    return statistics.min, statistics.max
