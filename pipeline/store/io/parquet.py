"""The parquet files of a store: encoded, and decoded within bounds, since a few bytes may be a page of 2 GiB, or a text
in a million rows. So files have no dictionaries, and only plain values, which zstd compresses as well. A file that it
would make smaller than the bounds allow is not compressed.

The bounds are checked before anything is decoded. The footer says how much a file has, but pages are decoded by their
own headers, so these are read, too. Format: https://parquet.apache.org/docs/file-format
"""

import hashlib
import io
from collections.abc import Collection, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.core.errors import StoreInvalid
from pipeline.store.io.failures import DAMAGE_REMEDY

Content = bytes | memoryview

# A file may take this many bytes decoded, and this many times its size.
_FREE_BYTES, _MAX_RATIO = 64 << 20, 256

_MAX_FOOTER_BYTES = 1 << 20  # parsed, it takes up to 100 times as much
_MAX_ITEMS = 1 << 14  # of a list in the footer: columns or row groups
_VALUE_BYTES = 16  # of a value with its offsets and bits for nulls, in arrow's memory
_TAIL_BYTES = 8  # the footer's size and the format's name

# Of Thrift's compact protocol: https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md
_BOOLEANS, _INTEGERS, _BINARY, _STRUCT = (1, 2), (4, 5, 6), 8, 12
_MAX_DEPTH = 8  # of the structures in a page's header

# Fields of a page's header.
_UNCOMPRESSED, _COMPRESSED = 2, 3
_DATA, _NUM_VALUES, _ENCODING, _PLAIN = 5, 1, 2, 0  # the header of a data page, and its own fields


def encode_table(table: pa.Table) -> bytes:
    """The table as parquet. Deterministic: independent of time and machine."""
    return bytes(encode_parquet(table.combine_chunks()))


def encode_parquet(table: pa.Table, compression: str = "zstd", **options: Any) -> memoryview:
    """The table as parquet that readers accept: one row group, not compressed where that would make it too small for
    what it contains. options: of pq.write_table."""
    sink, num_rows = io.BytesIO(), max(1, table.num_rows)
    options |= {"row_group_size": num_rows, "use_dictionary": False, "write_statistics": False}
    pq.write_table(table, sink, compression=compression, **options)
    content = sink.getbuffer()
    if compression != "none" and _excess(content, pq.read_metadata(pa.BufferReader(content))):
        return encode_parquet(table, "none", **options)
    return content


def table_digest(content: bytes) -> str:
    """The sha256 of a parquet file, as hex: parquet has no checksum of the whole file."""
    return hashlib.sha256(content).hexdigest()


def decode_table_of(content: bytes | None, subject: str, sha256: str, place: str, max_rows: int) -> pa.Table:
    """Decodes the parquet file whose sha256 is in `place`: a commit record, or the root.

    Raises StoreInvalid, naming `subject`, if it is missing (`content` is None) or damaged, or has more rows.
    """
    if content is None:
        raise StoreInvalid(f"{subject} is missing, although it is in {place}. {DAMAGE_REMEDY}")
    if table_digest(content) != sha256:
        raise StoreInvalid(f"the sha256 of {subject} differs from the one in {place}. {DAMAGE_REMEDY}")
    try:
        return decode_parquet(content, max_rows)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise StoreInvalid(f"{subject} cannot be read: {error}. {DAMAGE_REMEDY}") from error


def require_schema(table: pa.Table, schema: pa.Schema, subject: str, optional: Collection[str] = ()) -> None:
    """Raises StoreInvalid unless the table has exactly these columns, with nulls only in `optional` ones."""
    nulls = [name for name in schema.names if name in table.column_names and table[name].null_count]
    if table.schema.remove_metadata() != schema or set(nulls) - set(optional):
        found = f"the columns {table.schema.names}, with nulls in {nulls}"
        raise StoreInvalid(
            f"{subject} has {found}, expected {schema.names}, with nulls in none but {list(optional)}. {DAMAGE_REMEDY}"
        )


def decode_parquet(content: bytes, max_rows: int) -> pa.Table:
    """The table of a parquet file with at most `max_rows` rows. Raises ValueError for a file that has more, or is much
    larger when it is decoded, and pyarrow's errors for a damaged one: ArrowException and OSError.

    Unlike `pq.read_table`, it uses no thread of pyarrow. If such a thread releases `content` while Python exits, it is
    stopped within a C++ destructor, which aborts the process: "terminate called without an active exception", exit
    code 134.
    """
    if int.from_bytes(content[-_TAIL_BYTES:][:4], "little") > _MAX_FOOTER_BYTES:
        raise ValueError(f"its footer is larger than {_MAX_FOOTER_BYTES:,} bytes")
    limits = {"thrift_container_size_limit": _MAX_ITEMS, "thrift_string_size_limit": _MAX_FOOTER_BYTES}
    with pq.ParquetFile(pa.BufferReader(content), **limits) as file:
        _require_bounded(content, file.metadata, max_rows)
        return file.read(use_threads=False)


def _require_bounded(content: bytes, metadata: pq.FileMetaData, max_rows: int) -> None:
    """Raises ValueError if the file has too many rows, or takes too much memory when it is decoded."""
    groups = [metadata.row_group(n) for n in range(metadata.num_row_groups)]
    num_rows = max(metadata.num_rows, sum(group.num_rows for group in groups))
    if num_rows > max_rows:
        raise ValueError(f"it has {num_rows:,} rows, expected at most {max_rows:,}")
    if excess := _excess(content, metadata):
        raise ValueError(f"it takes {excess:,} bytes more when it is decoded than a file of its size may take")


def _excess(content: Content, metadata: pq.FileMetaData) -> int:
    """By how many bytes the decoded file is too large; 0 if it is not. Raises ValueError as `_pages`."""
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    columns = (group.column(n) for group in groups for n in range(group.num_columns))
    num_bytes = sum(size + _VALUE_BYTES * values for column in columns for size, values in _pages(content, column))
    return max(0, num_bytes - _FREE_BYTES - _MAX_RATIO * len(content))


def _pages(content: Content, column: pq.ColumnChunkMetaData) -> Iterator[tuple[int, int]]:
    """Of each page: its size when it is decompressed, and the number of its values. Raises ValueError for one that does
    not have plain values, since others may be repeated."""
    if not column.num_values:
        return  # of a table without rows, whose pages are not read
    at = column.data_page_offset
    stop = at + column.total_compressed_size
    if column.has_dictionary_page or not 0 <= at <= stop <= len(content):
        raise ValueError("a column has a dictionary, or is outside of the file")
    while at < stop:
        header, at = _read_struct(content, at, _MAX_DEPTH)
        page = header.get(_DATA)
        fields = page if isinstance(page, dict) else {}
        sizes = (header.get(_UNCOMPRESSED), header.get(_COMPRESSED), fields.get(_NUM_VALUES))
        if fields.get(_ENCODING) != _PLAIN or not all(isinstance(size, int) and size >= 0 for size in sizes):
            raise ValueError("a page has no valid header, or not plain values")
        yield sizes[0], sizes[2]
        at += sizes[1]


def _read_struct(content: Content, at: int, depth: int) -> tuple[dict[int, object], int]:
    """The integers and structures among the fields of a structure, by number, and the position after it. It may have
    statistics, as in stores of earlier versions: booleans and texts. Raises ValueError."""
    fields: dict[int, object] = {}
    number = 0
    try:
        while depth and (head := content[at]):
            at += 1
            kind = head & 15
            if head >> 4:
                number += head >> 4
            else:
                number, at = _read_integer(content, at)
            if kind in _INTEGERS:
                fields[number], at = _read_integer(content, at)
            elif kind == _STRUCT:
                fields[number], at = _read_struct(content, at, depth - 1)
            elif kind == _BINARY:
                size, at = _read_varint(content, at)
                at += size
            elif kind not in _BOOLEANS:
                raise ValueError(f"a page's header has a field of type {kind}")
    except IndexError:
        depth = 0
    if not depth:
        raise ValueError("a page's header is damaged")
    return fields, at + 1


def _read_integer(content: Content, at: int) -> tuple[int, int]:
    value, at = _read_varint(content, at)
    return (value >> 1) ^ -(value & 1), at


def _read_varint(content: Content, at: int) -> tuple[int, int]:
    value = shift = 0
    while (byte := content[at]) & 128 and shift < 63:
        value |= (byte & 127) << shift
        shift += 7
        at += 1
    return value | byte << shift, at + 1
