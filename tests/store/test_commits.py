from dataclasses import replace

import pytest

from pipeline.core.errors import StoreInvalid
from pipeline.store.format.commits import (
    CommitRecord,
    commit_key,
    list_blocks,
    parse_commit_key,
    read_commit_records,
)
from pipeline.store.io.storage import Storage

CURSOR = {"shard": 0, "document": 5, "token": 128, "ordinal": 7}
RECORD = CommitRecord(
    stream=3,
    block=12,
    rows=4,
    tokens=30,
    activations=30,
    documents=2,
    tokens_cut=1,
    skipped=({"source": "a.parquet", "index": 1, "reason": "ungültig"},),
    start=CURSOR,
    next={**CURSOR, "document": 6, "token": 0},
    exhausted=False,
    recent=((1, 2, 3, 4, 5, 6, 7, 1),) * 12,
)


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
        RECORD.to_json().replace(b'"tokens": 30', b'"tokens": 31'),
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
    for stream, block in ((3, 1), (3, 0), (0, 0), (3, 2)):
        storage.write(commit_key(stream, block), b"")
    assert [list_blocks(storage, stream) for stream in (0, 1, 3)] == [range(1), range(0), range(3)]
    assert list_blocks(storage, 3, 1) == range(1, 3)
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
