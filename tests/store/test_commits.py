"""Commit records, and block tables: the records' counts in columns."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from pipeline.core.errors import StoreInvalid
from pipeline.store.format.block_table import BlockTable, StreamBlocks, join_streams, read_stream, split_streams
from pipeline.store.format.commits import (
    CommitRecord,
    commit_key,
    list_blocks,
    parse_commit_key,
    read_commit_records,
)
from pipeline.store.format.statistics import merge, read_stream_statistics
from pipeline.store.io.parquet import encode_table, table_digest
from pipeline.store.io.storage import Storage
from pipeline.store.write.store_writer import StoreWriter
from tests.store.example_store import WIDTHS, blocks, commit_block, layout, metadata, statistics_of

CURSOR = {"shard": 0, "document": 0, "token": 0, "ordinal": 0}


def record(stream: int, block: int, **changes) -> CommitRecord:
    """The record of a block of 7 tokens; every second block begins within a document."""
    start, stop = ({**CURSOR, "token": b % 2, "ordinal": 3 * b} for b in (block, block + 1))
    counts = {
        "rows": 2,
        "tokens": 7,
        "activations": 7,
        "documents": 3,
        "tokens_cut": 1 << 40,
        "skipped": ({"source": "a", "index": 1, "reason": "ungültig", "rows": 1},),
    }
    fixed = {"start": start, "next": stop, "exhausted": False}
    return CommitRecord(stream, block, **(counts | fixed | changes))


RECORD = record(3, 12, recent=((1, 2, 3, 4, 5, 6, 7, 1),) * 12)


def test_a_record_is_read_as_written():
    assert CommitRecord.from_json(RECORD.to_json(), "it") == RECORD


def test_keys_of_records_are_parsed():
    assert RECORD.key == "_commits/stream-00003/block-000012.json"
    assert parse_commit_key(RECORD.key) == (3, 12)
    assert parse_commit_key(commit_key(123456, 1234567)) == (123456, 1234567)
    for ending in ("tmp", "1234abcd.__lock"):
        assert parse_commit_key(f"{RECORD.key}.{ending}") is None


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{}",
        RECORD.to_json()[:-20],
        RECORD.to_json().replace(b'"tokens": 7', b'"tokens": 8'),
        RECORD.to_json().replace(b'"exhausted": false', b'"exhausted": true'),
        RECORD.to_json().replace(b'"exhausted": false, ', b""),
    ],
)
def test_damaged_and_edited_records_are_refused(text):
    with pytest.raises(StoreInvalid, match="the record"):
        CommitRecord.from_json(text, "the record")


@pytest.mark.parametrize("changes", [{"rows": 1 << 32}, {"tokens_cut": 1 << 63}, {"activations": 1 << 40}])
def test_counts_beyond_any_block_are_refused(changes):
    with pytest.raises(StoreInvalid, match="the record"):
        CommitRecord.from_json(replace(RECORD, **changes).to_json(), "the record")


def test_blocks_are_listed_in_order_and_gaps_are_reported(tmp_path):
    storage = Storage.open(str(tmp_path))
    many = range(10**6 - 1, 10**6 + 2)
    for stream, block in ((3, 1), (3, 0), (0, 0), (3, 2), *((4, block) for block in many)):
        storage.write(commit_key(stream, block), b"")
    assert [list_blocks(storage, stream) for stream in (0, 1, 3)] == [range(1), range(0), range(3)]
    assert (list_blocks(storage, 3, 1), list_blocks(storage, 4, many.start)) == (range(1, 3), many)
    storage.write(commit_key(3, 1), None)
    with pytest.raises(StoreInvalid, match=rf"stream 3 of {tmp_path} has a record of block 2, but not of block 1"):
        list_blocks(storage, 3)


def test_a_missing_record_and_one_under_another_name_are_refused(tmp_path):
    storage = Storage.open(str(tmp_path))
    storage.write(commit_key(0, 0), RECORD.to_json())
    with pytest.raises(StoreInvalid, match="is the record of block 12 of stream 3"):
        list(read_commit_records(storage, [(0, 0)]))
    with pytest.raises(StoreInvalid, match="is missing, although the block is committed"):
        list(read_commit_records(storage, [(0, 1)]))


def stream_records(count: int) -> list[CommitRecord]:
    """Records of stream 3 with different counts."""
    table, records = BlockTable(), []
    for block in range(count):
        records.append(record(3, block, tokens=7 + block, activations=7 + block, recent=table.recent(block)))
        table = BlockTable.join([table, BlockTable.from_records(records[-1:])])
    return records


def test_a_table_has_the_counts_of_the_records():
    records = [record(0, 0, exhausted=True), record(1, 0, activations=4), record(2, 0)]
    content = BlockTable.from_records(records).encode()
    table = BlockTable.decode(content, "it", table_digest(content), 3)
    assert [block[:9] for block in table] == [
        (0, 0, 2, 7, 7, 3, 1, 1 << 40, 0),
        (1, 0, 2, 7, 4, 3, 1, 1 << 40, 0),
        (2, 0, 2, 7, 7, 3, 1, 1 << 40, 0),
    ]
    assert [(block.exhausted, block.continues) for block in table] == [(1, 0), (0, 0), (0, 0)]
    assert BlockTable.from_records([record(0, 1)])[0].continues
    assert table.total("tokens_cut") == 3 << 40
    assert table[1:][0] == table[1]
    assert table.per_stream(4).tolist() == [1, 1, 1, 0]
    assert table.first_blocks(np.array([1, 0, 1])).column("stream").tolist() == [0, 2]


def decoded(change) -> BlockTable:
    """A table of stream 0's blocks 0 to 2, changed, encoded and decoded."""
    values = BlockTable.from_records(record(0, block) for block in range(3)).values
    table = pa.table({name: values[name] for name in values.dtype.names})
    content = encode_table(change(table))
    return BlockTable.decode(content, "it", table_digest(content), 1)


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table.drop_columns(["flags"]),
        lambda table: table.set_column(2, "rows", pa.array([1, 2, 3], pa.int64())),
        lambda table: table.set_column(2, "rows", pa.array([1, 2, None], pa.uint32())),
        lambda table: table.set_column(2, "rows", pa.array([[1], [2], [3]])),
        lambda table: table.set_column(0, "stream", pa.array([0, 0, 2**32 - 1], pa.uint32())),
        lambda table: table.set_column(0, "stream", pa.array([0, 0, 1], pa.uint32())),
        lambda table: table.set_column(1, "block", pa.array([0, 1, 3], pa.uint32())),
        lambda table: table.set_column(1, "block", pa.array([0, 1, 1], pa.uint32())),
        lambda table: table.set_column(1, "block", pa.array([2, 1, 0], pa.uint32())),
    ],
)
def test_other_tables_are_refused(change):
    assert len(decoded(lambda table: table)) == 3
    with pytest.raises(StoreInvalid, match="^it "):
        decoded(change)


def test_streams_are_joined_in_the_order_of_rows_and_split_again():
    lengths = [3, 0, 5, 1]
    streams = {
        stream: StreamBlocks(BlockTable.from_records(record(stream, block) for block in range(n)), None)
        for stream, n in enumerate(lengths)
    }
    table = join_streams(streams)
    places = [(block.block, block.stream) for block in table]
    assert places == sorted(places)
    again = split_streams(table, len(lengths))
    for stream, part in enumerate(again):
        np.testing.assert_array_equal(part.values, streams[stream].table.values)
    assert list(map(len, split_streams(BlockTable(), 2))) == [0, 0]


def test_a_stream_is_read_from_few_records(tmp_path):
    storage, count = Storage.open(str(tmp_path)), 600
    records = stream_records(count)
    expected = BlockTable.from_records(records).values
    for entry in records:
        storage.write(entry.key, entry.to_json())
    for known in (0, 1, 255, 256, 511, 599, 600):
        table, last = read_stream(storage, 3, BlockTable(expected[:known]))
        np.testing.assert_array_equal(table.values, expected)
        assert last == records[-1]
    assert len(records[511].to_json()) < 15_000
    for entry in records:
        if entry.block not in (255, 511, 599):
            storage.write(entry.key, b"not read")
    np.testing.assert_array_equal(read_stream(storage, 3).table.values, expected)
    assert not len(read_stream(storage, 2).table)


@pytest.mark.parametrize(
    "recent", [((2, 7, 7, 3, 1, 0, 0, 0),) * 2, ((2, 7, 7, 3, 1, 0, 0),) * 3, ((2, 7, 7, 3, 1, 0, 0, 1 << 63),) * 3]
)
def test_records_with_impossible_earlier_counts_are_refused(recent):
    with pytest.raises(StoreInvalid):
        BlockTable.through(CommitRecord.from_json(replace(record(3, 3), recent=recent).to_json(), "it"))


def test_running_statistics_cover_all_blocks(tmp_path):
    """Whoever wrote the previous blocks: this writer or another."""
    expected = list(blocks(0))
    statistics = list(map(statistics_of, expected))
    writer = StoreWriter.open(str(tmp_path), metadata(), layout())
    for index, block in enumerate(expected):
        if index % 2 == 0:
            writer = StoreWriter.open(str(tmp_path), metadata(), layout())
        commit_block(writer, block, statistics[index])
        running = read_stream_statistics(writer.storage, writer.streams[0].last)
        for name in WIDTHS:
            total = merge(part[name] for part in statistics[: index + 1])
            assert all(np.array_equal(vars(running[name])[field], value) for field, value in vars(total).items())
    assert index == 3
