import json
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from pipeline.core.errors import StoreError, StoreInvalid
from pipeline.store.format.commits import (
    CommitRecord,
    commit_key,
    parse_commit_key,
    read_stream_records,
)
from pipeline.store.io.storage import Storage

CURSOR = {"shard": 0, "document": 5, "token": 128, "ordinal": 7}
RECORD = CommitRecord(
    stream=3,
    block=12,
    rows=4,
    tokens=30,
    documents=2,
    tokens_cut=1,
    skipped=({"source": "a.parquet", "index": 1, "reason": "ungültig"},),
    start=CURSOR,
    next={**CURSOR, "document": 6, "token": 0},
    exhausted=False,
    truncated=True,
)


def test_a_record_is_read_as_written():
    assert CommitRecord.from_json(RECORD.to_json(), "it") == RECORD


def test_the_keys_of_a_record_have_a_stable_order():
    counts = ["version", "stream", "block", "rows", "tokens", "documents", "tokens_cut"]
    others = ["skipped", "start", "next", "exhausted", "truncated", "table_sha256", "statistics_sha256"]
    digests = ["digests", "blocks_before", "sha256"]
    assert list(json.loads(RECORD.to_json())) == counts + others + digests


def test_keys_of_records_are_parsed():
    assert RECORD.key == "_commits/stream-00003/block-000012.json"
    assert parse_commit_key(RECORD.key) == (3, 12)
    assert parse_commit_key(commit_key(123456, 1234567)) == (123456, 1234567)
    assert parse_commit_key("_commits/stream-00003/block-000012.json.tmp") is None


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{}",
        RECORD.to_json()[:-20],
        RECORD.to_json().replace(b'"tokens": 30', b'"tokens": 31'),
        RECORD.to_json().replace(b'"truncated": true', b'"truncated": false'),
        RECORD.to_json().replace(b'"exhausted": false,\n', b""),
    ],
)
def test_damaged_and_edited_records_are_refused(text):
    with pytest.raises(StoreInvalid, match="the record"):
        CommitRecord.from_json(text, "the record")


@pytest.mark.parametrize("changes", [{"rows": 1 << 32}, {"tokens_cut": 1 << 63}, {"selected": 1 << 40}])
def test_counts_beyond_any_block_are_refused(changes):
    with pytest.raises(StoreInvalid, match="the record"):
        CommitRecord.from_json(replace(RECORD, **changes).to_json(), "the record")


def test_a_later_version_is_refused():
    with pytest.raises(StoreInvalid, match="has version 2, expected 1"):
        CommitRecord.from_json(replace(RECORD, version=2).to_json(), "it")


def test_records_are_read_in_order_and_gaps_are_reported(tmp_path):
    storage = Storage.open(str(tmp_path))
    first, second = (replace(RECORD, block=block) for block in (0, 1))
    for record in (second, first, replace(RECORD, stream=0, block=0)):
        storage.write(record.key, record.to_json())
    records = {stream: read_stream_records(storage, stream) for stream in (0, 3)}
    assert {stream: [record.block for record in found] for stream, found in records.items()} == {0: [0], 3: [0, 1]}
    storage.write(first.key, None)
    with pytest.raises(StoreInvalid, match=rf"stream 3 of {tmp_path} has a record of block 1, but not of block 0"):
        read_stream_records(storage, 3)


def test_a_record_under_another_name_is_refused(tmp_path):
    storage = Storage.open(str(tmp_path))
    storage.write(commit_key(0, 0), RECORD.to_json())
    with pytest.raises(StoreInvalid, match="is the record of block 12 of stream 3"):
        read_stream_records(storage, 0)


def before_each_read(monkeypatch, act: Callable[[], None]) -> None:
    """Calls `act` after the records were listed and before they are read, in place of another worker."""

    read_checked = Storage.read_checked

    def read(storage: Storage, keys: list[str], check: Callable) -> Iterator[CommitRecord | None]:
        act()
        return read_checked(storage, keys, check)

    monkeypatch.setattr(Storage, "read_checked", read)


def test_a_record_deleted_while_records_are_read_is_left_out(tmp_path, monkeypatch):
    storage = Storage.open(str(tmp_path))
    first, second = (replace(RECORD, block=block) for block in (0, 1))
    for record in (first, second):
        storage.write(record.key, record.to_json())
    before_each_read(monkeypatch, lambda: storage.write(second.key, None))
    assert read_stream_records(storage, 3) == [first]


def test_an_earlier_record_written_after_the_listing_is_read(tmp_path, monkeypatch):
    storage = Storage.open(str(tmp_path))
    first, second = (replace(RECORD, block=block) for block in (0, 1))
    storage.write(second.key, second.to_json())
    before_each_read(monkeypatch, lambda: storage.write(first.key, first.to_json()))
    assert read_stream_records(storage, 3) == [first, second]


def test_records_that_keep_disappearing_end_the_reading(tmp_path, monkeypatch):
    storage = Storage.open(str(tmp_path))
    left = [replace(RECORD, block=block) for block in range(4)]
    for record in left:
        storage.write(record.key, record.to_json())
    before_each_read(monkeypatch, lambda: storage.write(left.pop().key, None))
    with pytest.raises(StoreError, match="disappeared twice while it was being read") as caught:
        read_stream_records(storage, 3)
    assert caught.value.exit_code == 1
    assert len(left) == 2


def test_records_of_the_same_block_are_recognised():
    """By the digests of values, not the bytes of parquet files."""
    ours = replace(RECORD, digests={"tokens": "01"}, table_sha256="a")
    assert ours.is_same_block(replace(ours, table_sha256="b"))
    assert not ours.names_same_files(replace(ours, table_sha256="b"))
    assert not ours.is_same_block(replace(ours, digests={"tokens": "02"}))
    assert not ours.is_same_block(replace(ours, tokens=ours.tokens + 1))
