"""Document tables: one parquet file per block. The same documents give the same bytes."""

from collections.abc import Iterator, Sequence

import pyarrow as pa

from pipeline.core.errors import StoreInvalid
from pipeline.data.documents import DOCUMENT_SCHEMA
from pipeline.store.format.block_table import Block
from pipeline.store.format.commits import CommitRecord, commit_key, require_record
from pipeline.store.format.keys import block_key
from pipeline.store.io.failures import DAMAGE_REMEDY
from pipeline.store.io.parquet import decode_table_of
from pipeline.store.io.storage import Storage

TABLES_PREFIX = "_documents/"
_INFO_TYPES = (pa.string(), pa.int64(), pa.float64(), pa.bool_())  # of the source's columns


def table_key(stream: int, block: int) -> str:
    """The key of a block's document table, relative to the store."""
    return block_key(TABLES_PREFIX, stream, block, ".parquet")


def decode_table(content: bytes | None, record: CommitRecord) -> pa.Table:
    """Decodes a block's document table. Raises StoreInvalid when its file is missing (`content` is None) or damaged."""
    subject = table_key(record.stream, record.block)
    table = decode_table_of(content, subject, record.documents_sha256, record.key, record.documents)
    names = table.column_names
    if missing := [name for name in DOCUMENT_SCHEMA.names if name not in names]:
        raise StoreInvalid(f"{subject} lacks the columns {missing}; it has {names}.")
    expected = {name: (kind,) for name, kind in zip(DOCUMENT_SCHEMA.names, DOCUMENT_SCHEMA.types, strict=True)}
    wrong = [
        field.name
        for field, column in zip(table.schema, table.columns, strict=True)
        if field.type not in expected.get(field.name, _INFO_TYPES) or (field.name in expected and column.null_count)
    ]
    if wrong or len(set(names)) < len(names) or table.num_rows != record.documents:
        raise StoreInvalid(
            f"{subject} has {table.num_rows} rows, expected {record.documents}; columns that no document table has: "
            f"{wrong}. {DAMAGE_REMEDY}"
        )
    return table


def read_tables(storage: Storage, blocks: Sequence[Block]) -> Iterator[pa.Table]:
    """The document tables of `blocks`, in their order, with `stream` and `block` as additional first columns.

    Raises StoreInvalid for a table or a commit record that is missing or damaged.
    """
    records: dict[str, CommitRecord] = {}  # the record read last, by the key of its block's table

    def check(key: str, content: bytes | None) -> CommitRecord | pa.Table:
        if key in records:
            return decode_table(content, records[key])
        record = require_record(storage, key, content)
        records[table_key(record.stream, record.block)] = record
        return record

    # Each record directly before its table, so that both are requested at once.
    keys = [key for stream, block, *_ in blocks for key in (commit_key(stream, block), table_key(stream, block))]
    checked = storage.read_checked(keys, check)
    for record, table in zip(checked, checked, strict=True):
        records.clear()
        yield _with_block_columns(table, record.stream, record.block)


def empty_table() -> pa.Table:
    """A table without rows that has the columns of `read_tables`."""
    return _with_block_columns(DOCUMENT_SCHEMA.empty_table(), 0, 0)


def _with_block_columns(table: pa.Table, stream: int, block: int) -> pa.Table:
    for name, value in (("block", block), ("stream", stream)):
        table = table.add_column(0, name, pa.array([value] * table.num_rows, pa.int64()))
    return table
