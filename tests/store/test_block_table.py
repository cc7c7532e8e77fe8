"""Block tables: the commit records' counts in columns."""

import hashlib
import io
from dataclasses import replace

import numpy as np
import pytest

from pipeline.store import ActivationStore
from pipeline.store.format.block_table import (
    DTYPE,
    BlockTable,
    StreamBlocks,
    index_step,
    join_streams,
    read_stream,
    split_streams,
    stream_table_key,
)
from pipeline.store.format.commits import CommitRecord, read_stream_records
from pipeline.store.format.statistics import (
    Statistics,
    merge,
    read_running,
    token_statistics,
)
from pipeline.store.io.storage import Storage
from pipeline.store.write.committed_streams import CommittedStreams
from pipeline.store.write.store_writer import StoreWriter
from tests.store.example_store import WIDTHS, Block, blocks, commit_block, copy_store, layout, metadata

CURSOR = {"shard": 0, "document": 0, "token": 0, "ordinal": 0}


def record(stream: int, block: int, **changes) -> CommitRecord:
    """The record of a block of 7 tokens; every second block begins within a document."""
    start, stop = ({**CURSOR, "token": b % 2, "ordinal": 3 * b} for b in (block, block + 1))
    counts = {
        "rows": 2,
        "tokens": 7,
        "documents": 3,
        "tokens_cut": 1 << 40,
        "skipped": ({"source": "a", "index": 1, "reason": "", "rows": 1},),
    }
    fixed = {"start": start, "next": stop, "exhausted": False, "truncated": False}
    return CommitRecord(stream, block, **(counts | fixed | changes))


def stream_records(count: int) -> list[CommitRecord]:
    """Records of stream 3, each with the digest of those before it."""
    records: list[CommitRecord] = []
    for block in range(count):
        records.append(record(3, block, blocks_before=BlockTable.from_records(records).digest()))
    return records


def write_records(storage: Storage, *records: CommitRecord) -> None:
    for entry in records:
        storage.write(entry.key, entry.to_json())


def test_a_table_has_the_counts_of_the_records():
    records = [
        record(1, 5, selected=4),
        record(0, 6, exhausted=True, statistics_sha256="s"),
        record(2, 7, truncated=True),
    ]
    table = BlockTable.decode(BlockTable.from_records(records).encode())
    assert [block[:9] for block in table] == [
        (1, 5, 2, 7, 4, 3, 1, 1 << 40, 15),
        (0, 6, 2, 7, 7, 3, 1, 1 << 40, 18),
        (2, 7, 2, 7, 7, 3, 1, 1 << 40, 21),
    ]
    flags = [(block.exhausted, block.truncated, block.has_statistics, block.continues) for block in table]
    assert flags == [(0, 0, 0, 1), (1, 0, 1, 0), (0, 1, 0, 1)]
    assert table.total("tokens_cut") == 3 << 40
    assert table.has_statistics.tolist() == [False, True, False]
    assert table[1:][0] == table[1]
    assert table.in_row_order(3).column("stream").tolist() == [1, 0, 2]


def test_a_table_is_a_file_that_numpy_opens(tmp_path):
    (tmp_path / "table.npy").write_bytes(BlockTable.from_records([record(0, 0), record(0, 1)]).encode())
    assert np.load(tmp_path / "table.npy")["tokens"].tolist() == [7, 7]


def crafted(dtype=DTYPE, shape=(2,), fortran_order=False, values: bytes = bytes(2 * DTYPE.itemsize)) -> bytes:
    file = io.BytesIO()
    header = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": fortran_order, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    return sealed(file.getvalue() + values)


def sealed(payload: bytes) -> bytes:
    return payload + hashlib.sha256(payload).digest()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        bytes(100),
        hashlib.sha256(b"").digest(),
        b"x" + hashlib.sha256(b"x").digest(),
        crafted()[:-1],
        crafted(shape=(10**15,)),
        crafted(shape=(1, 2)),
        crafted(shape=()),
        crafted(values=b""),
        crafted(dtype="<i8"),
        crafted(dtype=[("stream", "O")]),
        crafted(dtype="O"),
        sealed(b"\x93NUMPY\x01\x00\x10\x00" + b"{'descr': [(((((("),
        sealed(b"\x93NUMPY\x01\x00\xff\xff"),
    ],
)
def test_other_files_are_not_decoded(content):
    assert BlockTable.decode(content) is None


def test_a_crafted_file_with_the_right_header_is_decoded():
    assert len(BlockTable.decode(crafted())) == 2


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


@pytest.mark.parametrize("indexed", [0, 1, 4, 5, 6, 9])
def test_a_stream_is_read_from_its_table_and_the_later_records(tmp_path, indexed):
    """Deleting records leaves a table that is longer than the stream; it is not used."""
    storage = Storage.open(str(tmp_path))
    records = stream_records(9)
    write_records(storage, *records[:6])
    storage.write(stream_table_key(3), BlockTable.from_records(records[:indexed]).encode())
    known = range(indexed - 1 if 0 < indexed <= 6 else 0)
    for block in known:
        storage.write(records[block].key, b"not read")
    table, last, _ = read_stream(storage, 3)
    np.testing.assert_array_equal(table.values, BlockTable.from_records(records[:6]).values)
    assert last == records[5]


@pytest.mark.parametrize(
    "wrong",
    [{"tokens": 8}, {"exhausted": True}, {"selected": 1}, {"blocks_before": "other"}],
)
def test_a_table_that_contradicts_the_records_is_not_used(tmp_path, wrong):
    storage = Storage.open(str(tmp_path))
    records = stream_records(4)
    write_records(storage, *records[:2], replace(records[2], **wrong), records[3])
    storage.write(stream_table_key(3), BlockTable.from_records(records[:3]).encode())
    table, *_ = read_stream(storage, 3)
    expected = [*records[:2], replace(records[2], **wrong), records[3]]
    np.testing.assert_array_equal(table.values, BlockTable.from_records(expected).values)


def test_a_crafted_table_is_not_used(tmp_path):
    """Its last block and its sums agree with the records."""
    storage = Storage.open(str(tmp_path))
    records = stream_records(6)
    write_records(storage, *records)
    table = BlockTable.from_records(records[:4])
    table.values["rows"][0] += 1
    storage.write(stream_table_key(3), table.encode())
    np.testing.assert_array_equal(read_stream(storage, 3).table.values, BlockTable.from_records(records).values)


def test_records_beyond_a_million_blocks_are_seen(tmp_path):
    storage = Storage.open(str(tmp_path))
    for block in (10**6 - 1, 10**6, 10**6 + 1):
        write_records(storage, record(3, block))
    assert [r.block for r in read_stream_records(storage, 3, 10**6 - 1, list_all=False)] == [999999, 1000000, 1000001]


def test_a_table_lacks_an_eighth_of_a_streams_blocks_and_at_most_63():
    steps = {0: 8, 8: 8, 127: 8, 128: 16, 255: 16, 256: 32, 511: 32, 512: 64, 10**6: 64}
    assert {num_blocks: index_step(num_blocks) for num_blocks in steps} == steps
    assert all(num_blocks % index_step(num_blocks) <= max(7, num_blocks / 8) for num_blocks in range(2000))


def test_a_table_is_written_every_few_blocks_and_at_the_end(tmp_path):
    storage = Storage.open(str(tmp_path))
    streams = CommittedStreams(storage, 4)
    last = 8 * 16 + 3
    assert len(streams[3].table) == 0
    lengths = []
    for block in range(last + 1):
        entry = record(3, block, truncated=block == last)
        write_records(storage, entry)
        streams.append(entry)
        content = storage.read(stream_table_key(3))
        lengths.append(0 if content is None else len(BlockTable.decode(content)))
    assert sorted(set(lengths)) == [*range(0, last, 8), last]
    assert len(CommittedStreams(storage, 4)[3].table) == last + 1


def statistics_of(block: Block) -> dict[str, Statistics]:
    valid = block.arrays["segments"] > 0
    return {name: token_statistics(block.arrays[name][valid].astype(np.float32)) for name in WIDTHS}


def test_running_statistics_cover_all_blocks(tmp_path):
    """Whoever wrote the previous blocks: this writer or another."""
    expected = list(blocks(0))
    statistics = list(map(statistics_of, expected))
    writer = StoreWriter.open(str(tmp_path), metadata(), layout())
    for index, block in enumerate(expected):
        if index % 2 == 0:
            writer = StoreWriter.open(str(tmp_path), metadata(), layout())
        commit_block(writer, block, statistics[index])
        running = read_running(writer.storage, writer.streams[0].last)
        for name in WIDTHS:
            total = merge(part[name] for part in statistics[: index + 1])
            assert all(np.array_equal(vars(running[name])[field], value) for field, value in vars(total).items())
    assert index == 3


def test_documents_that_span_blocks_are_looked_up_in_their_blocks(tmp_path):
    copy_store(str(tmp_path))
    store = ActivationStore.open(str(tmp_path))
    documents = store.documents
    for number in set(documents["document"].to_pylist()):
        has_it = documents.filter(np.asarray(documents["document"]) == number)
        expected = set(zip(has_it["stream"].to_pylist(), has_it["block"].to_pylist(), strict=True))
        candidates = {block[:2] for block in store._documents.blocks_with(number)}
        assert expected <= candidates
        assert len(candidates) <= len(expected) + 1
