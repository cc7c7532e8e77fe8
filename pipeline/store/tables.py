"""The document tables: one parquet file per block, with the same bytes for the same documents."""

import io
from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.parquet as pq
import tensorstore as ts

from pipeline.data.documents import DOCUMENT_SCHEMA
from pipeline.errors import StoreError
from pipeline.store.kvstore import read_keys


def table_key(stream: int, block: int) -> str:
    """The table's key, relative to the store."""
    return f"_documents/stream-{stream:05d}/block-{block:06d}.parquet"


def encode_table(table: pa.Table) -> bytes:
    """The table as parquet with page checksums. Deterministic: one row group, nothing of the time or machine."""
    sink = io.BytesIO()
    pq.write_table(
        table.combine_chunks(),
        sink,
        row_group_size=max(1, table.num_rows),
        compression="zstd",
        write_page_checksum=True,
    )
    return sink.getvalue()


def decode_table(content: bytes, subject: str) -> pa.Table:
    """The inverse of `encode_table`. Raises StoreError, naming `subject`, for a damaged file."""
    try:
        table = pq.read_table(pa.BufferReader(content), page_checksum_verification=True)
    except (pa.ArrowException, OSError) as error:
        raise StoreError(f"{subject} is damaged: {error}") from error
    missing = [name for name in DOCUMENT_SCHEMA.names if name not in table.column_names]
    if missing:
        raise StoreError(f"{subject} lacks the columns {missing}; it has {table.column_names}.")
    return table


def read_tables(path: str, kvstore: ts.KvStore, places: Sequence[tuple[int, int]]) -> Iterator[pa.Table]:
    """The document tables of blocks given as (stream, block), with these two as first columns.

    Raises StoreError for a table that is missing or damaged.
    """
    keys = [table_key(*place) for place in places]
    for (stream, block), key, content in zip(places, keys, read_keys(kvstore, keys), strict=True):
        if content is None:
            raise StoreError(f"{path}/{key} is missing, although the block is committed.")
        yield _with_place(decode_table(content, f"{path}/{key}"), stream, block)


def empty_table() -> pa.Table:
    """What `read_tables` gives for a store without documents."""
    return _with_place(DOCUMENT_SCHEMA.empty_table(), 0, 0)


def _with_place(table: pa.Table, stream: int, block: int) -> pa.Table:
    for name, value in (("block", block), ("stream", stream)):
        table = table.add_column(0, name, pa.array([value] * table.num_rows, pa.int64()))
    return table
