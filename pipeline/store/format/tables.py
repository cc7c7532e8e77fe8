"""The document tables: one parquet file per block, with the same bytes for the same documents."""

import hashlib
import io
from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.core.errors import StoreInvalid
from pipeline.data.documents import DOCUMENT_SCHEMA
from pipeline.store.format.block_table import Block
from pipeline.store.format.commits import CommitRecord, commit_key, require_record
from pipeline.store.io.failures import DAMAGE_REMEDY
from pipeline.store.io.storage import Storage

TABLES_PREFIX = "_documents/"


def table_key(stream: int, block: int) -> str:
    """The table's key, relative to the store."""
    return f"{TABLES_PREFIX}stream-{stream:05d}/block-{block:06d}.parquet"


def encode_table(table: pa.Table) -> bytes:
    """The table as parquet. Deterministic: one row group, independent of time and machine."""
    sink = io.BytesIO()
    pq.write_table(table.combine_chunks(), sink, row_group_size=max(1, table.num_rows), compression="zstd")
    return sink.getvalue()


def table_digest(content: bytes) -> str:
    """sha256, as hex, of a parquet file: the commit record holds it, since parquet has no checksum of the whole."""
    return hashlib.sha256(content).hexdigest()


def decode_table(content: bytes | None, record: CommitRecord) -> pa.Table:
    """A block's document table from its file's bytes. Raises StoreInvalid when it is missing or damaged."""
    subject = table_key(record.stream, record.block)
    table = decode_parquet(content, subject, record.table_sha256)
    missing = [name for name in DOCUMENT_SCHEMA.names if name not in table.column_names]
    if missing:
        raise StoreInvalid(f"{subject} lacks the columns {missing}; it has {table.column_names}.")
    return table


def decode_parquet(content: bytes | None, subject: str, sha256: str) -> pa.Table:
    """A parquet file that a commit record vouches for. Raises StoreInvalid when it is missing or damaged."""
    if content is None:
        raise StoreInvalid(f"{subject} is missing, although the block is committed. {DAMAGE_REMEDY}")
    if table_digest(content) != sha256:
        raise StoreInvalid(f"the sha256 of {subject} differs from the one in its commit record. {DAMAGE_REMEDY}")
    try:
        return pq.read_table(pa.BufferReader(content))
    except (pa.ArrowException, OSError) as error:
        raise StoreInvalid(f"{subject} cannot be read: {error}. {DAMAGE_REMEDY}") from error


def read_tables(storage: Storage, blocks: Sequence[Block]) -> Iterator[pa.Table]:
    """The document tables of blocks, each with the block's stream and number as first columns.

    Raises StoreInvalid for a table or a commit record that is missing or damaged.
    """
    records: dict[str, CommitRecord] = {}  # by the key of the table that follows

    def check(key: str, content: bytes | None) -> CommitRecord | pa.Table:
        if key in records:
            return decode_table(content, records[key])
        record = require_record(storage, key, content)
        records[table_key(record.stream, record.block)] = record
        return record

    # Each record before its table, so that both are asked for at once.
    keys = [key for stream, block, *_ in blocks for key in (commit_key(stream, block), table_key(stream, block))]
    checked = storage.read_checked(keys, check)
    for record, table in zip(checked, checked, strict=True):
        records.clear()
        yield _with_place(table, record.stream, record.block)


def empty_table() -> pa.Table:
    """The table of a store without documents, with the columns of `read_tables`."""
    return _with_place(DOCUMENT_SCHEMA.empty_table(), 0, 0)


def _with_place(table: pa.Table, stream: int, block: int) -> pa.Table:
    for name, value in (("block", block), ("stream", stream)):
        table = table.add_column(0, name, pa.array([value] * table.num_rows, pa.int64()))
    return table
