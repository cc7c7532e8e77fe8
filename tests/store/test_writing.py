"""Writing, finishing and extending stores, on local disk and in memory: any number of times, by several processes."""

import json
import os
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import zarr

from pipeline.core.errors import StoreError, StoreInvalid
from pipeline.store import ActivationStore
from pipeline.store.format.commits import CommitRecord
from pipeline.store.format.metadata import ROOT_KEY, read_root
from pipeline.store.format.statistics import statistics_key
from pipeline.store.format.tables import table_key
from pipeline.store.io.storage import Storage
from pipeline.store.write.store_writer import StoreWriter
from tests.store.example_store import (
    CAPTURE,
    NUM_STREAMS,
    Block,
    blocks,
    commit_block,
    comparable_image,
    layout,
    metadata,
    read_image,
    statistics_of,
    stored_tokens,
    write_blocks,
    write_store,
)


def committed(writer: StoreWriter, stream: int) -> list[int]:
    return writer.streams[stream].table.column("block").tolist()


def start_block(writer: StoreWriter, block: Block) -> Future[CommitRecord]:
    return writer.start_block(block.record, block.arrays, block.table, lambda _: (None, {}))


def attributes(path: str) -> dict:
    return json.loads(Storage.open(path).read("zarr.json"))["attributes"]["activation_store"]


def test_finishing_again_writes_missing_arrays_and_nothing_else(store_path):
    writer = write_store(store_path)
    before, expected = read_image(store_path), comparable_image(store_path)
    assert writer.finish()
    assert StoreWriter.open_existing(store_path).finish()
    assert read_image(store_path) == before
    for name in ("documents", "embed"):
        Storage.open(store_path).write(f"{name}/zarr.json", None)
    write_store(store_path)
    assert comparable_image(store_path) == expected


def test_blocks_of_a_stream_are_committed_in_order(store_path):
    """Also those that are written at once; their records repeat the counts of earlier ones."""
    writer = StoreWriter.open(store_path, metadata(), layout())
    expected = list(blocks(0))
    assert len(expected) >= 3
    records = [written.result() for written in [start_block(writer, block) for block in expected]]
    assert [replace(r, digests={}, documents_sha256="", recent=(), written_by="") for r in records] == [
        block.record for block in expected
    ]
    again = StoreWriter.open(store_path, metadata(), layout())
    assert committed(again, 0) == committed(writer, 0) == list(range(len(expected)))
    assert again.streams[0].last == records[-1]
    with pytest.raises(ValueError, match="0 blocks; 1 is not the next"):
        commit_block(writer, list(blocks(1))[1])


def test_no_block_follows_one_that_failed(store_path):
    writer = StoreWriter.open(store_path, metadata(), layout())
    first, second, *_ = blocks(0)
    Storage.open(store_path).write(table_key(0, 0), b"damaged")
    written = [start_block(writer, block) for block in (first, second)]
    for future in written:
        with pytest.raises(StoreInvalid, match="block-000000.parquet cannot be read"):
            future.result()
    assert committed(StoreWriter.open(store_path, metadata(), layout()), 0) == []


NAME = "blocks.1.resid_post"


def with_other_values(block: Block) -> Block:
    """The same block as another kind of hardware computes it."""
    return replace(block, arrays=block.arrays | {NAME: block.arrays[NAME] * 2})


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_values_that_another_run_has_written_are_adopted(store_path, compression):
    """Whether it was killed before its record, or committed the block."""
    store, capture = {"compression": compression}, CAPTURE | {"statistics": True}
    first, second, third, *_ = blocks(0)
    for is_committed in (False, True):
        path = f"{store_path}-{is_committed}"
        writers = [
            StoreWriter.open(path, metadata(store=store, capture=capture), layout(compression)) for _ in range(2)
        ]
        other = with_other_values(first)
        record = commit_block(writers[0], other, statistics_of(other))
        if not is_committed:
            for key in (record.key, statistics_key(0, 0)):
                writers[0].storage.write(key, None)
        adopted = []

        def summarise(names, adopted=adopted, first=first):
            adopted.extend(names)
            return statistics_of(first), {}

        again = writers[1].start_block(first.record, first.arrays, first.table, summarise).result()
        assert adopted == [NAME]
        np.testing.assert_array_equal(first.arrays[NAME], other.arrays[NAME])
        assert again.is_same_block(record)
        assert (again == record) == is_committed
        for block in (second, third):
            commit_block(writers[1], block, statistics_of(block))
        first = next(blocks(0))


@pytest.mark.parametrize("differing", ["tokens", "documents", "table", "record"])
def test_other_tokens_under_one_key_are_refused(store_path, differing):
    block = next(blocks(0))
    record = commit_block(StoreWriter.open(store_path, metadata(), layout()), block)
    before = read_image(store_path)
    if differing == "table":
        block = replace(block, table=block.table.set_column(0, "document", pa.array([7] * block.table.num_rows)))
    elif differing == "record":
        block = replace(block, record=replace(block.record, exhausted=True))
    else:
        block.arrays[differing][0, 0] += 1
    with pytest.raises(StoreError, match=r"another run has written with different content.*verify\.repair=true"):
        commit_block(StoreWriter.open(store_path, metadata(), layout()), block)
    assert read_image(store_path) == before
    assert StoreWriter.open(store_path, metadata(), layout()).streams[0].last == record


@pytest.mark.parametrize("change", [lambda tokens: tokens[:2], lambda tokens: tokens.astype(np.int64)])
def test_wrong_arrays_are_refused(tmp_path, change):
    example = next(blocks(0))
    example.arrays["tokens"] = change(example.arrays["tokens"])
    with pytest.raises(ValueError, match="a store shard is int32"):
        commit_block(StoreWriter.open(str(tmp_path), metadata(), layout()), example)


def test_a_complete_store_must_be_reopened(tmp_path):
    writer = write_store(str(tmp_path))
    with pytest.raises(ValueError, match="reopen"):
        start_block(writer, next(blocks(0)))


class FailsOnce(Storage):
    """Storage that refuses to put one object once, while its key is in `refused`."""

    refused = ()

    def put(self, key, *parts):
        if key in self.refused:
            self.refused.remove(key)
            raise StoreError(f"{key} cannot be written.")
        return super().put(key, *parts)


def test_a_planned_store_that_could_not_be_created_is_created_by_the_next_call(tmp_path, monkeypatch):
    monkeypatch.setattr(FailsOnce, "refused", ["zarr.json"])
    storage = FailsOnce.open(f"memory://{tmp_path}")
    writer = StoreWriter.plan(storage, metadata(), layout())
    writer.record(weights_error={"embed": {"token_median": 0.5}})
    with pytest.raises(StoreError, match="cannot be written"):
        writer.create()
    writer.create()
    assert StoreWriter.open_existing(storage).root.weights_error


def test_another_zarr_hierarchy_is_left_alone(tmp_path):
    zarr.create_group(str(tmp_path))
    before = (tmp_path / "zarr.json").read_bytes()
    with pytest.raises(StoreInvalid, match="is a Zarr group, but not an activation store"):
        StoreWriter.open(str(tmp_path), metadata(), layout())
    assert (tmp_path / "zarr.json").read_bytes() == before


def test_a_store_that_lost_its_root_is_refused(tmp_path):
    write_store(str(tmp_path))
    (tmp_path / "zarr.json").unlink()
    with pytest.raises(StoreInvalid, match=r"has commit records, but its zarr\.json is missing"):
        StoreWriter.open(str(tmp_path), metadata(), layout())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_without_permission_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(StoreError, match="Grant this user the permission"):
        StoreWriter.open(str(tmp_path / "store"), metadata(), layout())


def test_a_late_finisher_does_not_undo_an_extension(store_path):
    """It read the records before the extension began, and finds that the root has changed."""
    writer = write_store(store_path, finish=False, max_blocks=1)
    other = StoreWriter.open_existing(store_path)

    def extend_while_reading():
        streams = type(other.streams).read_all_again(other.streams)
        writer.reopen("all")
        return streams

    other.streams.read_all_again = extend_while_reading
    assert not other.finish()
    assert not read_root(Storage.open(store_path)).complete
    for stream in range(NUM_STREAMS):
        write_blocks(writer, stream)
    assert writer.finish()


def test_a_finisher_reads_what_other_writers_have_committed(store_path):
    writers = [write_store(store_path, finish=False, max_blocks=1) for _ in range(NUM_STREAMS)]
    writers[0].reopen("all")
    for stream, writer in enumerate(writers):
        write_blocks(writer, stream)
    assert writers[0].finish()
    assert ActivationStore.open(store_path).num_tokens == stored_tokens()


def test_finishing_does_not_hide_a_lost_record(store_path):
    record = write_store(store_path).streams[0].last
    Storage.open(store_path).write(record.key, None)
    before = read_root(Storage.open(store_path))
    writer = StoreWriter.open_existing(store_path)
    writer.reopen("all")
    assert not writer.finish()
    assert writer.finish(force=True)
    assert read_root(Storage.open(store_path)).summary != before.summary
    assert len(ActivationStore.open(store_path).blocks) == 5


@pytest.mark.parametrize(
    "change", [StoreWriter.finish, StoreWriter.reopen, lambda store: store.record(weights_error={})]
)
def test_a_root_that_was_deleted_meanwhile_is_not_written_again(tmp_path, change):
    writer = write_store(str(tmp_path / "store"))
    writer.storage.write(ROOT_KEY, None)
    with pytest.raises(StoreInvalid, match=r"store/zarr\.json was deleted while the store was being written"):
        change(writer)
    assert writer.storage.read(ROOT_KEY) is None


def test_a_forced_store_takes_more_blocks_later(store_path):
    """A job that runs beside `finalize force=true` goes on, and completes the store again."""
    writer = write_store(store_path, finish=False, max_blocks=1)
    assert StoreWriter.open_existing(store_path).finish(force=True)
    [_, block, *_] = blocks(0)
    commit_block(writer, block)
    for stream in range(NUM_STREAMS):
        write_blocks(writer, stream)
    assert writer.finish()
    assert len(ActivationStore.open(store_path).blocks) == sum(len(list(blocks(s))) for s in range(NUM_STREAMS))
