"""`verify_store` names every damaged object."""

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from pipeline.store.check.verifying import verify_store
from pipeline.store.format.commits import CommitRecord, commit_key
from pipeline.store.format.layout import SIDE_ARRAYS
from pipeline.store.format.problems import Remedy
from pipeline.store.format.tables import decode_table, encode_table, table_digest, table_key
from pipeline.store.io.storage import Storage
from pipeline.store.write.store_writer import StoreWriter
from tests.store.example_store import (
    CAPTURE,
    NUM_STREAMS,
    VOCAB_SIZE,
    Block,
    blocks,
    commit_block,
    copy_store,
    edit_root,
    flip,
    layout,
    metadata,
    write_blocks,
    write_store,
)

STREAM, BLOCK = 0, 1
ACTIVATIONS = layout().arrays[1]
EVERY_ARRAY = layout().all_arrays


def shard(spec) -> str:
    return layout().shard_key(spec, STREAM, BLOCK)


def edit_record(path: str, **changes) -> None:
    """Edits the record and updates its checksum."""
    storage, key = Storage.open(path), commit_key(STREAM, BLOCK)
    record = replace(CommitRecord.from_json(storage.read(key), key), **changes)
    storage.write(key, record.to_json())


def edit_table(path: str, change: Callable[[pa.Table], pa.Table]) -> None:
    """Edits the document table and updates its digest in the record."""
    storage, key = Storage.open(path), table_key(STREAM, BLOCK)
    record = CommitRecord.from_json(storage.read(commit_key(STREAM, BLOCK)), key)
    content = encode_table(change(decode_table(storage.read(key), record)))
    storage.write(key, content)
    edit_record(path, table_sha256=table_digest(content))


def set_column(name: str, row: int, value: int) -> Callable[[pa.Table], pa.Table]:
    def change(table: pa.Table) -> pa.Table:
        values = table[name].to_pylist()
        values[row] = value
        return table.set_column(table.column_names.index(name), name, pa.array(values, pa.int64()))

    return change


def write_edited(path: str, edit: Callable[[dict[str, np.ndarray]], None]) -> list[str]:
    """Writes a store with wrong arrays in one block. Returns the problems that verify finds."""
    writer = StoreWriter.open(path, metadata(store={"compression": "none"}), layout())
    for stream in range(NUM_STREAMS):
        for block in blocks(stream):
            if (stream, block.record.block) == (STREAM, BLOCK):
                edit(block.arrays)
            commit_block(writer, block)
    writer.finish()
    return [str(problem) for problem in verify_store(path)]


def found(path: str) -> list[str]:
    return [str(problem) for problem in verify_store(path)]


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("max_rows", [None, 0, 3, 4, 6])
@pytest.mark.parametrize("finish", [False, True])
def test_a_sound_store_has_no_problems(store_path, compression, max_rows, finish):
    write_store(store_path, finish=finish, max_rows=max_rows, compression=compression)
    assert found(store_path) == []


def test_a_store_with_unequal_streams_is_sound(store_path):
    writer = StoreWriter.open(store_path, metadata(), layout())
    write_blocks(writer, 1)
    writer.finish()
    assert found(store_path) == []


def test_a_block_without_rows_is_sound(store_path):
    """All documents of the stream are skipped."""
    writer = StoreWriter.open(store_path, metadata(), layout())
    write_blocks(writer, 1)
    empty = next(blocks(0))
    arrays = {name: np.full_like(values, -1 if name == "documents" else 0) for name, values in empty.arrays.items()}
    record = replace(
        empty.record, rows=0, tokens=0, documents=0, next={**empty.record.start, "shard": 1}, exhausted=True
    )
    commit_block(writer, Block(arrays, empty.table[:0], record))
    writer.finish()
    assert found(store_path) == []


def test_progress_counts_blocks(tmp_path):
    copy_store(str(tmp_path))
    calls = []
    verify_store(str(tmp_path), lambda done, total: calls.append((done, total)))
    total = sum(len(list(blocks(stream))) for stream in range(NUM_STREAMS))
    assert calls == [(k, total) for k in range(1, total + 1)]


OFFSETS = [0, 37, -1, -17]  # of values and of the shard's index


@pytest.mark.parametrize(
    ("spec", "offset", "store_path"),
    [
        (spec, OFFSETS[(number + shift) % len(OFFSETS)], place)
        for number, spec in enumerate(EVERY_ARRAY)
        for shift, place in ((0, "local"), (2, "memory"))
    ],
    ids=str,
    indirect=["store_path"],
)
def test_a_flipped_byte_in_a_shard_is_reported(store_path, spec, offset):
    copy_store(store_path)
    flip(store_path, shard(spec), offset)
    problems = found(store_path)
    assert len(problems) == 1
    assert problems[0].startswith(f"{shard(spec)}: ")
    assert "mismatch" in problems[0] or "Error reading shard" in problems[0]


@pytest.mark.parametrize("spec", EVERY_ARRAY, ids=lambda spec: spec.name)
def test_a_truncated_shard_is_reported(store_path, spec):
    copy_store(store_path)
    storage = Storage.open(store_path)
    storage.write(shard(spec), storage.read(shard(spec))[:-8])
    assert any(problem.startswith(f"{shard(spec)}: ") for problem in found(store_path))


@pytest.mark.parametrize("spec", [*SIDE_ARRAYS, *layout().arrays], ids=lambda spec: spec.name)
def test_a_deleted_shard_is_reported(store_path, spec):
    copy_store(store_path)
    Storage.open(store_path).write(shard(spec), None)
    assert found(store_path) == [f"{shard(spec)}: is missing, although the block is committed"]


@pytest.mark.parametrize("offset", [0, 40, 200, -1, -30, -300])
def test_a_flipped_byte_in_a_document_table_is_reported(store_path, offset):
    copy_store(store_path)
    flip(store_path, table_key(STREAM, BLOCK), offset)
    assert any(problem.startswith(table_key(STREAM, BLOCK)) for problem in found(store_path))


def test_a_deleted_document_table_is_reported(store_path):
    copy_store(store_path)
    Storage.open(store_path).write(table_key(STREAM, BLOCK), None)
    (problem,) = found(store_path)
    assert problem.startswith(f"{table_key(STREAM, BLOCK)}: ")
    assert "is missing, although the block is committed" in problem


@pytest.mark.parametrize(
    ("name", "row", "value", "message"),
    [
        ("document", 0, 88, "not in strictly ascending order"),
        ("document", -1, 88, "the array and the table have different documents"),
        ("last_token", 0, 1, "tokens in the arrays"),
        ("n_cut", 0, 2, "the record has 0 cut tokens, the table has 2"),
    ],
)
def test_an_edited_document_table_is_reported(store_path, name, row, value, message):
    copy_store(store_path)
    edit_table(store_path, set_column(name, row, value))
    assert any(message in problem for problem in found(store_path))


def test_a_document_table_without_a_document_is_reported(store_path):
    copy_store(store_path)
    edit_table(store_path, lambda table: table[:-1])
    assert any("the table has" in problem for problem in found(store_path))


@pytest.mark.parametrize("offset", [5, 60, 150, -3, -50])
def test_a_flipped_byte_in_a_record_is_reported(store_path, offset):
    copy_store(store_path)
    flip(store_path, commit_key(STREAM, BLOCK), offset)
    assert any(problem.startswith(commit_key(STREAM, BLOCK)) for problem in found(store_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": 3}, "the first 3 rows have tokens"),
        ({"tokens": 1}, "the record has 1 tokens"),
        ({"documents": 9}, "the record has 9 documents"),
        ({"tokens_cut": 9}, "the record has 9 cut tokens"),
        ({"exhausted": True}, "is exhausted, but the stream has block 2"),
        ({"truncated": True}, "is truncated, but the stream has block 2"),
        ({"start": {"shard": 0, "document": 0, "token": 0, "ordinal": 0}}, "but the previous block ends at"),
        ({"next": {"shard": 0, "document": 0, "token": 0, "ordinal": 0}}, "but the previous block ends at"),
        ({"stream": 1}, "is the record of block 1 of stream 1"),
    ],
)
def test_an_edited_record_is_reported(store_path, changes, message):
    copy_store(store_path)
    edit_record(store_path, **changes)
    assert any(message in problem for problem in found(store_path))


@pytest.mark.parametrize("block", range(3))
def test_a_deleted_record_is_reported(store_path, block):
    """Even a stream's last record, since a complete store knows their number."""
    copy_store(store_path)
    Storage.open(store_path).write(commit_key(STREAM, block), None)
    assert any(f"stream-{STREAM:05d}" in problem for problem in found(store_path))


def test_a_foreign_object_among_the_records_is_reported(store_path):
    copy_store(store_path)
    Storage.open(store_path).write("_commits/stream-00000/notes.txt", b"")
    assert found(store_path) == ["_commits/stream-00000/notes.txt: is not a commit record"]


def value(name: str, index, new) -> Callable[[dict[str, np.ndarray]], None]:
    def edit(arrays: dict[str, np.ndarray]) -> None:
        arrays[name][index] = new

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (value("segments", (0, 7), 0), "documents are not -1 exactly where segments are 0"),
        (value("segments", (0, 3), 0), "tokens follow padding"),
        (value("segments", (0, 0), -1), "segments are negative"),
        (value("segments", (1, slice(None)), 2), "segments are not numbered 1, 2, 3"),
        (value("positions", (2, 5), 0), "positions do not restart at 0 and count up"),
        (value("documents", (0, 4), 50), "the document changes within a segment"),
        (value("tokens", (3, 3), VOCAB_SIZE), f"tokens are outside the vocabulary of {VOCAB_SIZE}"),
        (value("tokens", (3, 3), -5), f"tokens are outside the vocabulary of {VOCAB_SIZE}: at 1 slots, first row 11"),
        (value("blocks.3.resid_post", (2, 1, 3), np.nan), "1 slots have non-finite values"),
        (value("embed", (0, 0, 0), np.inf), "non-finite values, the first in row 0 at position 0"),
    ],
)
def test_wrong_values_are_reported(store_path, edit, message):
    assert any(message in problem for problem in write_edited(store_path, edit))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_values_in_padding_are_reported(tmp_path, dtype):
    capture = CAPTURE | {"dtype": dtype}
    writer = StoreWriter.open(str(tmp_path), metadata(capture=capture), layout(dtype=dtype))
    for block in blocks(1, dtype=dtype):
        if block.record.exhausted:
            assert block.arrays["segments"][-1, -1] == 0
            block.arrays["embed"][-1, -1, 0] = -1
        commit_block(writer, block)
    assert [p.split(": ")[2] for p in found(str(tmp_path))] == ["is not zero in padding"]


def test_computing_again_is_no_remedy_for_values_that_are_not_finite(tmp_path):
    capture = CAPTURE | {"dtype": "float16"}
    writer = StoreWriter.open(str(tmp_path), metadata(capture=capture), layout(dtype="float16"))
    block = next(blocks(0, dtype="float16"))
    block.arrays["embed"][0, 0, 0] = np.inf
    commit_block(writer, block)
    (problem,) = verify_store(str(tmp_path))
    assert problem.remedy is Remedy.other_dtype
    assert "non-finite" in problem.what


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda root: root.update(complete=False), "complete is False, but the number of blocks"),
        (lambda root: root.pop("blocks"), "complete is True, but the number of blocks"),
        (lambda root: root.update(num_streams=4), "its fingerprint does not match its content"),
        (lambda root: root.update(blocks=[1, 1]), "the store was completed with 1 block of this stream"),
        (lambda root: root.update(version=3), "format version 3"),
    ],
)
def test_an_edited_root_is_reported(store_path, edit, message):
    copy_store(store_path)
    edit_root(store_path, edit)
    assert any(message in problem for problem in found(store_path))


@pytest.mark.parametrize("name", ["tokens", "blocks.1.resid_post"])
def test_deleted_and_edited_array_metadata_is_reported(store_path, name):
    copy_store(store_path)
    storage, key = Storage.open(store_path), f"{name}/zarr.json"
    zarr_json = json.loads(storage.read(key))
    zarr_json["shape"][0] -= 1
    storage.write(key, json.dumps(zarr_json).encode())
    assert any(
        problem.startswith(f"{key}: has 26 rows, but the last committed row is 26") for problem in found(store_path)
    )
    zarr_json["chunk_grid"]["configuration"]["chunk_shape"][0] *= 2
    storage.write(key, json.dumps(zarr_json).encode())
    assert any(problem.startswith(f"{key}: has dtype, shape and store shards") for problem in found(store_path))
    storage.write(key, None)
    assert [problem.split(":")[0] for problem in found(store_path)] == [key]


def test_a_repaired_store_equals_the_undamaged_one(tmp_path):
    """The remedy: delete the records from the damaged block on, and run again."""
    path, whole = str(tmp_path / "repaired"), str(tmp_path / "whole")
    copy_store(path)
    copy_store(whole)
    flip(path, shard(ACTIVATIONS), 5)
    storage = Storage.open(path)
    for key in storage.list_keys(f"_commits/stream-{STREAM:05d}/")[BLOCK:]:
        storage.write(key, None)
    write_store(path)
    assert found(path) == []
    assert storage.read(shard(ACTIVATIONS)) == Storage.open(whole).read(shard(ACTIVATIONS))
