"""The document tables: one parquet file per block, with the same bytes for the same documents."""

import io

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.errors import StoreError

# What every source has; the source's own columns follow (see `pipeline.data.documents.TokenBlock`).
COLUMNS = ("document", "id", "source", "index", "n_tokens", "n_cut", "first_token", "last_token")


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
    missing = [name for name in COLUMNS if name not in table.column_names]
    if missing:
        raise StoreError(f"{subject} lacks the columns {missing}; it has {table.column_names}.")
    return table
