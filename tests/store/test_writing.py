"""Writing, finishing and extending stores, on local disk and in memory."""

import json
import os
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import tensorstore as ts
import zarr

from pipeline.core.errors import StoreError, StoreInvalid, StoreMismatch
from pipeline.store import ActivationStore
from pipeline.store.check.verifying import verify_store
from pipeline.store.format.commits import CommitRecord
from pipeline.store.format.statistics import statistics_key
from pipeline.store.format.tables import table_key
from pipeline.store.io.storage import Storage
from pipeline.store.write.store_writer import StoreWriter
from tests.store.example_store import (
    CAPTURE,
    LENGTH,
    NUM_STREAMS,
    PART_BYTES,
    WIDTHS,
    Block,
    blocks,
    commit_block,
    comparable_image,
    layout,
    metadata,
    read_image,
    statistics_of,
    stored_tokens,
    write_store,
)


def committed(writer: StoreWriter, stream: int) -> list[int]:
    return writer.streams[stream].table.column("block").tolist()


def start_block(writer: StoreWriter, block: Block) -> Future[CommitRecord]:
    return writer.start_block(block.record, block.arrays, block.table, lambda _: (None, {}))


def attributes(path: str) -> dict:
    return json.loads(Storage.open(path).read("zarr.json"))["attributes"]["activation_store"]


def test_the_arrays_of_a_finished_store_end_with_its_last_row(store_path):
    writer = write_store(store_path, finish=False)
    group = Storage.open(store_path)
    assert group.read("tokens/zarr.json") is None
    writer.finish()
    writer.finish()
    last = [list(blocks(stream))[-1].record for stream in range(NUM_STREAMS)]
    rows = max(layout().first_row(r.stream, r.block) + r.rows for r in last)
    shapes = {name: json.loads(group.read(f"{name}/zarr.json"))["shape"] for name in ("tokens", *WIDTHS)}
    assert shapes == {"tokens": [rows, LENGTH]} | {name: [rows, LENGTH, width] for name, width in WIDTHS.items()}
    assert writer.complete
    assert attributes(store_path)["complete"] is True


def test_finishing_again_writes_missing_arrays(store_path):
    write_store(store_path)
    expected = comparable_image(store_path)
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


def test_another_configuration_is_refused_by_key(store_path):
    write_store(store_path)
    before = comparable_image(store_path)
    with pytest.raises(StoreMismatch) as caught:
        StoreWriter.open(store_path, metadata(batch={"length": 16, "packing": "pack"}), layout())
    assert "batch.length: the store has 8, this run asks for 16" in str(caught.value)
    assert caught.value.exit_code == 2
    assert comparable_image(store_path) == before


def test_an_extended_store_equals_one_that_was_never_truncated(tmp_path):
    path, whole = str(tmp_path / "extended"), str(tmp_path / "whole")
    max_blocks = 1
    write_store(path, max_blocks=max_blocks)
    short = ActivationStore.open(path)
    assert short.complete
    assert short.num_tokens == stored_tokens(max_blocks)
    assert verify_store(path) == []
    write_store(path)
    write_store(whole)
    extended, expected = comparable_image(path), comparable_image(whole)
    earlier = {key for key in extended.keys() - expected.keys() if key.startswith("_summary/blocks-")}
    assert len(earlier) == 1  # which a reader may have opened
    assert {key: content for key, content in extended.items() if key not in earlier} == expected
    assert verify_store(path) == []


@pytest.mark.parametrize("shard_bytes", [None, PART_BYTES, 2 * LENGTH * 12])
def test_zarr_python_and_tensorstore_read_the_written_values_without_the_package(tmp_path, shard_bytes):
    path = str(tmp_path / "store")
    write_store(path, shard_bytes=shard_bytes)
    group = zarr.open_group(path, mode="r")
    ours = ActivationStore.open(path)
    written = [block for stream in range(NUM_STREAMS) for block in blocks(stream)]
    for spec in layout().all_arrays:
        other = group[spec.name]
        assert other.metadata.dimension_names == spec.dimension_names
        assert other.shards == layout(shard_bytes=shard_bytes).shard_shape(spec)
        storage = {"driver": "file", "path": f"{path}/{spec.name}/"}
        alone = ts.open({"driver": "zarr3", "kvstore": storage}).result()
        for array in (other[...], *(array[...].read().result() for array in (alone, ours.arrays[spec.name]))):
            assert array.dtype == written[0].arrays[spec.name].dtype
            for block in written:
                first, size = layout().first_row(block.record.stream, block.record.block), block.record.rows
                np.testing.assert_array_equal(array[first : first + size], block.arrays[spec.name][:size])
    assert group.attrs["activation_store"]["complete"] is True


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
