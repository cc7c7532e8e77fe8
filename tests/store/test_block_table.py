"""Block tables: the commit records' counts in columns."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from pipeline.core.errors import StoreInvalid
from pipeline.store.format.block_table import BlockTable, StreamBlocks, join_streams, read_stream, split_streams
from pipeline.store.format.commits import CommitRecord, commit_key, list_blocks
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
        "skipped": ({"source": "a", "index": 1, "reason": "", "rows": 1},),
    }
    fixed = {"start": start, "next": stop, "exhausted": False}
    return CommitRecord(stream, block, **(counts | fixed | changes))


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


def test_records_beyond_a_million_blocks_are_seen(tmp_path):
    storage = Storage.open(str(tmp_path))
    for block in (10**6 - 1, 10**6, 10**6 + 1):
        storage.write(commit_key(3, block), b"")
    assert list_blocks(storage, 3, 10**6 - 1) == range(10**6 - 1, 10**6 + 2)


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
