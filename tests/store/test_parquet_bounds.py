"""Parquet files are within the bounds that readers demand, whatever they contain."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.data.documents import DOCUMENT_SCHEMA
from pipeline.store.io.parquet import decode_parquet, encode_table

ROWS = 80_000  # of more than 64 MiB
COLUMNS = {
    "one text": pa.array(["a" * 1000] * ROWS),
    "null": pa.nulls(ROWS, pa.string()),
    "a list": pa.array([[7] * 60] * ROWS, pa.list_(pa.int32())),
    "a long text": pa.array(["a" * (100 << 20), *[""] * (ROWS - 1)]),
}


@pytest.mark.parametrize("column", COLUMNS)
def test_what_is_written_is_read(column):
    fills = [pa.nulls(ROWS, kind).fill_null(0 if kind == pa.int64() else "") for kind in DOCUMENT_SCHEMA.types]
    table = pa.table(fills, DOCUMENT_SCHEMA).append_column("more", COLUMNS[column])
    assert decode_parquet(encode_table(table), ROWS).equals(table)


def test_files_of_earlier_versions_have_statistics(monkeypatch):
    table = pa.table({"text": ["a", None, "c" * 300], "number": [1, 2, 3], "share": [0.5, 1.5, 2.5]})
    write = pq.write_table
    monkeypatch.setattr(
        pq, "write_table", lambda *given, **options: write(*given, **options | {"write_statistics": True})
    )
    assert decode_parquet(encode_table(table), 3).equals(table)
