"""Writing, finishing and extending stores, on local disk and in memory."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tensorstore as ts
import zarr

from pipeline.core.errors import StoreError, StoreInvalid, StoreMismatch
from pipeline.store import ActivationStore
from pipeline.store.check.verifying import verify_store
from pipeline.store.format.arrays import set_rows
from pipeline.store.format.block_table import TABLE_KEY, BlockTable, stream_table_key
from pipeline.store.format.commits import read_stream_records
from pipeline.store.format.layout import MAX_ROWS
from pipeline.store.format.metadata import read_metadata
from pipeline.store.format.problems import Remedy
from pipeline.store.format.statistics import statistics_key
from pipeline.store.io.storage import Storage
from pipeline.store.write.store_writer import StoreWriter
from tests.store.example_store import (
    LENGTH,
    NUM_STREAMS,
    ROWS,
    WIDTHS,
    begin_block,
    blocks,
    commit_block,
    comparable_image,
    copy_store,
    flip,
    layout,
    metadata,
    stored_tokens,
    write_blocks,
    write_store,
)


def open_and_read(path: str) -> StoreWriter:
    """Opens a writer and reads the blocks committed so far."""
    writer = StoreWriter.open(path, metadata(), layout())
    writer.streams.all()
    return writer


def committed(writer: StoreWriter, stream: int) -> list[int]:
    return writer.streams[stream].table.column("block").tolist()


def attributes(path: str) -> dict:
    return json.loads(Storage.open(path).read("zarr.json"))["attributes"]["activation_store"]


def test_a_new_store_is_empty_and_not_complete(store_path):
    assert read_metadata(store_path) is None
    writer = StoreWriter.open(store_path, metadata(), layout())
    assert not any(len(stream.table) for stream in writer.streams.all().values())
    assert not writer.complete
    assert read_metadata(store_path) == metadata()
    assert attributes(store_path)["complete"] is False
    assert verify_store(store_path) == []


def test_stored_arrays_equal_the_written_ones(store_path):
    write_store(store_path)
    stored_arrays = ActivationStore.open(store_path).arrays
    for stream in range(NUM_STREAMS):
        for block in blocks(stream):
            first = layout().first_row(stream, block.record.block)
            rows = slice(0, block.record.rows)
            for name, expected in block.arrays.items():
                stored = stored_arrays[name][first : first + block.record.rows].read().result()
                assert stored.dtype == expected.dtype
                np.testing.assert_array_equal(stored, expected[rows])


def test_a_finished_store_is_trimmed_to_its_last_row(store_path):
    writer = write_store(store_path, finish=False)
    assert ActivationStore.open(store_path).arrays["tokens"].shape == (MAX_ROWS, LENGTH)
    writer.finish()
    writer.finish()
    last = [list(blocks(stream))[-1].record for stream in range(NUM_STREAMS)]
    rows = max(layout().first_row(r.stream, r.block) + r.rows for r in last)
    trimmed = ActivationStore.open(store_path).arrays
    assert trimmed["tokens"].shape == (rows, LENGTH)
    assert {name: trimmed[name].shape for name in WIDTHS} == {n: (rows, LENGTH, w) for n, w in WIDTHS.items()}
    assert writer.complete
    assert attributes(store_path)["complete"] is True
    assert attributes(store_path)["blocks"] == [len(list(blocks(stream))) for stream in range(NUM_STREAMS)]


def test_every_block_of_an_array_is_one_object(store_path):
    write_store(store_path)
    storage = Storage.open(store_path)
    shards = [layout().shard_index(s, b.record.block) for s in range(NUM_STREAMS) for b in blocks(s)]
    for spec in layout().all_arrays:
        zeros = "/0" * (len(spec.dimension_names) - 1)
        assert storage.list_keys(f"{spec.name}/c/") == sorted(f"{spec.name}/c/{shard}{zeros}" for shard in shards)


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_two_stores_have_the_same_bytes(tmp_path, compression):
    for name in "ab":
        write_store(str(tmp_path / name), compression=compression)
    a, b = comparable_image(str(tmp_path / "a")), comparable_image(str(tmp_path / "b"))
    assert a == b
    assert len(a) > 40


def test_an_interrupted_store_ends_with_the_same_bytes(tmp_path):
    """Interrupted after any number of blocks, with the next block's objects written but not committed."""
    write_store(str(tmp_path / "whole"))
    expected = comparable_image(str(tmp_path / "whole"))
    everything = [block for stream in range(NUM_STREAMS) for block in blocks(stream)]
    for done in range(len(everything)):
        path = str(tmp_path / f"interrupted{done}")
        writer = StoreWriter.open(path, metadata(store={"compression": "none"}), layout())
        for block in everything[:done]:
            commit_block(writer, block)
        pending = begin_block(writer, everything[done])
        for future in pending.futures.values():
            future.result()
        del writer
        assert verify_store(path) == []
        assert ActivationStore.open(path).num_tokens == sum(block.record.tokens for block in everything[:done])
        write_store(path)
        assert comparable_image(path) == expected


def test_a_store_whose_creation_was_interrupted_is_healed(store_path):
    write_store(store_path)
    expected = comparable_image(store_path)
    StoreWriter.open(store_path + "-new", metadata(store={"compression": "none"}), layout())
    new = Storage.open(store_path + "-new")
    for name in ("documents", "embed"):
        new.write(f"{name}/zarr.json", None)
    write_store(store_path + "-new")
    assert comparable_image(store_path + "-new") == expected


def test_several_blocks_of_a_stream_may_be_in_progress(store_path):
    writer = StoreWriter.open(store_path, metadata(), layout())
    expected = list(blocks(0))
    assert len(expected) >= 3
    pending = [begin_block(writer, b) for b in expected]
    with pytest.raises(ValueError, match="1 is not the next"):
        writer.commit(pending[1], expected[1].record)
    for p, block in zip(pending, expected, strict=True):
        writer.commit(p, block.record)
        assert p.done
    bare = [
        replace(record, table_sha256="", digests={}, blocks_before="")
        for record in read_stream_records(writer.storage, 0)
    ]
    assert bare == [block.record for block in expected]
    again = StoreWriter.open(store_path, metadata(), layout())
    assert committed(again, 0) == committed(writer, 0)
    assert again.streams[0].last == writer.streams[0].last


def test_a_record_written_by_another_run_stays(store_path):
    """The same content is accepted, other content is refused, also if a truncated block is to be extended."""
    first, *_ = blocks(0)
    [*_, cut] = blocks(0, max_rows=ROWS - 1)
    a, b, late = (open_and_read(store_path) for _ in range(3))
    for writer in (a, b):
        commit_block(writer, first)
    pending = begin_block(late, cut)
    with pytest.raises(StoreError, match="another run on this store has written .*block-000000.json"):
        late.commit(pending, cut.record)
    assert late.streams.read_again(0).last == a.streams[0].last == b.streams[0].last

    c = StoreWriter.open(store_path, metadata(), layout())
    commit_block(c, next(blocks(1, max_rows=ROWS - 1)))
    d = open_and_read(store_path)
    whole = next(blocks(1))
    commit_block(c, whole)
    with pytest.raises(StoreError, match="was replaced by another run"):
        d.begin_block(1, 0, whole.arrays)
    assert d.streams.read_again(1).last == c.streams[1].last


def test_changing_the_callers_arrays_after_a_commit_changes_nothing(store_path):
    """The caller reuses its arrays once a block is committed."""
    writer = StoreWriter.open(store_path, metadata(), layout())
    block = next(blocks(0))
    commit_block(writer, block)
    for values in block.arrays.values():
        values[...] = 1
    assert verify_store(store_path) == []


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
    max_rows = ROWS + 2
    write_store(path, max_rows=max_rows)
    short = ActivationStore.open(path)
    assert short.complete
    assert short.num_tokens == stored_tokens(max_rows) == NUM_STREAMS * max_rows * LENGTH
    assert verify_store(path) == []
    write_store(path)
    write_store(whole)
    assert comparable_image(path) == comparable_image(whole)
    assert verify_store(path) == []


def test_a_store_whose_completion_was_interrupted_is_healed(store_path):
    """An interrupted completion or reopening leaves it marked complete with untrimmed arrays."""
    copy_store(store_path, max_rows=ROWS + 2)
    names = [spec.name for spec in layout().all_arrays]
    set_rows(Storage.open(store_path), names, MAX_ROWS)
    assert verify_store(store_path)
    StoreWriter.open(store_path, metadata(), layout()).finish()
    assert verify_store(store_path) == []
    set_rows(Storage.open(store_path), names, MAX_ROWS)
    write_store(store_path)
    assert verify_store(store_path) == []
    assert ActivationStore.open(store_path).num_tokens == stored_tokens()


@contextmanager
def stopped_after(writes: int) -> Iterator[list[str]]:
    """Allows `writes` writes or deletions of objects; the next one raises, as if the process had been killed.

    Yields the keys that were written.
    """
    done: list[str] = []

    def counted(write: Callable) -> Callable:
        def write_counted(storage: Storage, key: str, *arguments: bytes | None) -> bytes | None:
            if len(done) == writes:
                raise KeyboardInterrupt
            result = write(storage, key, *arguments)
            done.append(key)
            return result

        return write_counted

    with pytest.MonkeyPatch.context() as patch:
        for method in ("write", "write_if_unchanged"):
            patch.setattr(Storage, method, counted(getattr(Storage, method)))
        yield done


NUM_ARRAYS = len(layout().all_arrays)


@pytest.mark.parametrize("store_path", ["memory"], indirect=True)
@pytest.mark.parametrize("longer", [False, True])
@pytest.mark.parametrize(
    ("call", "writes"),
    [("finish", writes) for writes in range(NUM_ARRAYS + 2)] + [("reopen", writes) for writes in range(NUM_ARRAYS + 1)],
)
def test_finish_and_reopen_may_be_interrupted_between_any_two_writes(store_path, call, writes, longer):
    """The block table, the root and each array's zarr.json are written one after the other."""
    max_rows = ROWS + 2
    copy_store(store_path, finish=call == "reopen", max_rows=max_rows)
    writer = StoreWriter.open(store_path, metadata(), layout())
    with stopped_after(writes) as done, pytest.raises(KeyboardInterrupt):
        getattr(writer, call)()
    assert len(done) == writes
    problems = verify_store(store_path)
    wrong = {f"{spec.name}/zarr.json" for spec in layout().all_arrays}
    if call == "finish":
        wrong = wrong - set(done) if "zarr.json" in done else set()
    else:
        wrong &= set(done)
    assert {problem.where for problem in problems} == wrong
    assert all("the last committed row is" in problem.what for problem in problems)
    assert ActivationStore.open(store_path).num_tokens == stored_tokens(max_rows)
    write_store(store_path, max_rows=None if longer else max_rows)
    assert verify_store(store_path) == []
    assert ActivationStore.open(store_path).num_tokens == stored_tokens(None if longer else max_rows)


def delete_table(path: str, key: str) -> None:
    Storage.open(path).write(key, None)


def damage_table(path: str, key: str) -> None:
    flip(path, key, -50)


def write_shorter_table(path: str, key: str) -> None:
    """As if two processes finished the store and the slower one had seen fewer blocks."""
    table = BlockTable.decode(Storage.open(path).read(key))
    Storage.open(path).write(key, table[:-1].encode())


@pytest.mark.parametrize("spoil", [delete_table, damage_table, write_shorter_table])
def test_a_block_table_that_does_not_match_the_root_is_not_used(store_path, spoil):
    copy_store(store_path)
    expected = comparable_image(store_path)
    spoil(store_path, TABLE_KEY)
    assert ActivationStore.open(store_path).num_tokens == stored_tokens()
    assert [(problem.where, problem.remedy) for problem in verify_store(store_path)] == [(TABLE_KEY, Remedy.tabulate)]
    StoreWriter.open(store_path, metadata(store={"compression": "none"}), layout()).finish()
    assert comparable_image(store_path) == expected


@pytest.mark.parametrize("spoil", [delete_table, damage_table, write_shorter_table])
def test_the_block_table_of_a_stream_only_saves_requests(store_path, spoil):
    write_store(store_path, finish=False)
    expected = [block.record.block for block in blocks(0)]
    spoil(store_path, stream_table_key(0))
    problems = [(problem.where, problem.remedy) for problem in verify_store(store_path)]
    assert problems == ([(stream_table_key(0), Remedy.tabulate)] if spoil is damage_table else [])
    assert ActivationStore.open(store_path).num_tokens == stored_tokens()
    assert committed(StoreWriter.open(store_path, metadata(), layout()), 0) == expected
    write_store(store_path)
    assert ActivationStore.open(store_path).num_tokens == stored_tokens()


def test_the_block_table_of_another_stream_is_not_used(store_path):
    write_store(store_path, finish=False)
    storage = Storage.open(store_path)
    storage.write(stream_table_key(0), storage.read(stream_table_key(1)))
    assert [problem.where for problem in verify_store(store_path)] == [stream_table_key(0)]
    assert ActivationStore.open(store_path).num_tokens == stored_tokens()
    writer = StoreWriter.open(store_path, metadata(), layout())
    assert set(writer.streams[0].table.column("stream")) == {0}


def test_a_run_trusts_the_records_and_not_the_block_tables(store_path):
    """A user deleted only records, as pipeline.verify says for repairing a store."""
    copy_store(store_path)
    expected = comparable_image(store_path)
    for block in list(blocks(0))[1:]:
        Storage.open(store_path).write(block.record.key, None)
    assert TABLE_KEY in {problem.where for problem in verify_store(store_path)}
    writer = StoreWriter.open(store_path, metadata(store={"compression": "none"}), layout())
    assert committed(writer, 0) == [0]
    write_store(store_path)
    assert comparable_image(store_path) == expected


def test_the_block_table_is_not_used_while_a_store_is_extended(store_path):
    write_store(store_path, max_rows=ROWS)
    write_store(store_path, finish=False)
    assert Storage.open(store_path).read(TABLE_KEY) is not None
    assert ActivationStore.open(store_path).num_tokens == stored_tokens()
    assert verify_store(store_path) == []


def test_objects_of_a_killed_longer_run_are_reported_in_a_finished_store(store_path):
    """Its second block was written but not committed when a shorter run finished the store."""
    write_store(store_path, finish=False, max_rows=ROWS)
    writer = StoreWriter.open(store_path, metadata(), layout())
    write_blocks(writer, 0)
    killed = list(blocks(1))[1]
    for future in begin_block(writer, killed).futures.values():
        future.result()
    writer.storage.write(statistics_key(1, 1), b"left")
    assert verify_store(store_path) == []
    StoreWriter.open(store_path, metadata(), layout()).finish()
    left = {layout().shard_key(spec, 1, 1) for spec in layout().all_arrays}
    problems = verify_store(store_path)
    assert {problem.where for problem in problems} == left | {
        f"{folder}/stream-00001/block-000001.parquet" for folder in ("_documents", "_stats")
    }
    assert {problem.remedy for problem in problems} == {Remedy.discard}
    rows = ActivationStore.open(store_path).rows
    assert not np.isin(np.arange(ROWS) + layout().first_row(1, 1), rows).any()
    for problem in problems:
        Storage.open(store_path).write(problem.where, None)
    assert verify_store(store_path) == []
    write_store(store_path)
    assert verify_store(store_path) == []


def test_finishing_does_not_disturb_a_worker_that_still_writes(store_path):
    """As if one of two workers had a larger `run.max_tokens`."""
    shorter, longer = (StoreWriter.open(store_path, metadata(), layout()) for _ in range(2))
    write_blocks(shorter, 0, max_rows=ROWS)
    write_blocks(longer, 1, max_rows=ROWS)
    block = list(blocks(1))[1]
    pending = begin_block(longer, block)
    for future in pending.futures.values():
        future.result()
    shorter.finish()
    longer.commit(pending, block.record)
    longer.finish()
    assert verify_store(store_path) == []
    assert len(ActivationStore.open(store_path).rows) == ROWS + ROWS + block.record.rows


def test_a_truncated_block_leaves_the_store_while_it_is_rewritten(store_path):
    copy_store(store_path, max_rows=ROWS + 2)
    writer = StoreWriter.open(store_path, metadata(), layout())
    writer.reopen()
    longer = list(blocks(0))[1]
    pending = begin_block(writer, longer)
    assert committed(StoreWriter.open(store_path, metadata(), layout()), 0) == [0]
    assert verify_store(store_path) == []
    writer.commit(pending, longer.record)
    assert verify_store(store_path) == []


def test_two_writers_share_a_store(store_path):
    """Like two processes: each writes its own streams, both reopen and finish."""
    copy_store(store_path, max_rows=ROWS)
    writers = [open_and_read(store_path) for _ in range(2)]
    for stream, writer in enumerate(writers):
        writer.reopen()
        write_blocks(writer, stream)
    assert len(writers[0].streams[1].table) == 1
    writers[0].streams.read_all_again()
    assert len(writers[0].streams[1].table) == len(list(blocks(1)))
    for writer in writers:
        writer.finish()
    assert verify_store(store_path) == []
    assert ActivationStore.open(store_path).num_tokens == stored_tokens()


@pytest.mark.parametrize(
    ("stream", "block", "edit", "message"),
    [
        (0, 0, lambda arrays: arrays.pop("embed"), "a block needs the arrays"),
        (0, 0, lambda arrays: arrays.update(tokens=arrays["tokens"][:2]), "a block needs the arrays"),
        (0, 0, lambda arrays: arrays.update(tokens=arrays["tokens"].astype(np.int64)), "a block needs the arrays"),
        (1, 0, lambda arrays: None, "is committed, and was not truncated"),
    ],
)
def test_wrong_arrays_and_committed_blocks_are_refused(tmp_path, stream, block, edit, message):
    writer = StoreWriter.open(str(tmp_path), metadata(), layout())
    write_blocks(writer, 1)
    example = next(blocks(stream))
    edit(example.arrays)
    with pytest.raises(ValueError, match=message):
        writer.begin_block(stream, block, example.arrays)


def test_a_block_is_not_committed_without_its_tables(tmp_path):
    writer, block = StoreWriter.open(str(tmp_path), metadata(), layout()), next(blocks(0))
    pending = writer.begin_block(0, 0, block.arrays)
    with pytest.raises(ValueError, match="needs its tables"):
        writer.commit(pending, block.record)
    writer.commit(writer.write_tables(pending, block.table), block.record)
    assert committed(writer, 0) == [0]


def test_a_complete_store_must_be_reopened(tmp_path):
    writer = write_store(str(tmp_path))
    example = next(blocks(0))
    with pytest.raises(ValueError, match="reopen"):
        writer.begin_block(0, 0, example.arrays)


def test_metrics_are_written(store_path):
    writer = StoreWriter.open(store_path, metadata(), layout())
    writer.write_metrics("process-0.jsonl", b"{}\n")
    assert Storage.open(store_path).read("_metrics/process-0.jsonl") == b"{}\n"


def test_metrics_that_cannot_be_written_are_a_store_error(tmp_path):
    writer = StoreWriter.open(str(tmp_path), metadata(), layout())
    (tmp_path / "_metrics").write_bytes(b"")
    with pytest.raises(StoreError, match="_metrics/process-0"):
        writer.write_metrics("process-0.jsonl", b"{}\n")
    assert verify_store(str(tmp_path)) == []


def test_zarr_python_and_tensorstore_read_the_store_without_the_package(tmp_path):
    path = str(tmp_path / "store")
    write_store(path)
    group = zarr.open_group(path, mode="r")
    ours = ActivationStore.open(path)
    for spec in layout().all_arrays:
        stored = ours.arrays[spec.name][...].read().result()
        other = group[spec.name]
        assert other.metadata.dimension_names == spec.dimension_names
        assert other.shards == layout().shard_shape(spec)
        np.testing.assert_array_equal(other[...], stored)
        storage = {"driver": "file", "path": f"{path}/{spec.name}/"}
        alone = ts.open({"driver": "zarr3", "kvstore": storage}).result()
        np.testing.assert_array_equal(alone[...].read().result(), stored)
    assert group.attrs["activation_store"]["complete"] is True


def test_an_unknown_kind_of_storage_is_refused():
    with pytest.raises(StoreInvalid, match="unsupported URL scheme"):
        StoreWriter.open("nosuch://bucket/store", metadata(), layout())


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


def test_a_path_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreInvalid, match=r"hoose a different store\.path"):
        StoreWriter.open(str(tmp_path / "file" / "store"), metadata(), layout())


@pytest.mark.parametrize("part", ["", '"d":4'])
def test_deeply_nested_metadata_does_not_reach_tensorstore(store_path, part):
    """TensorStore parses and compares it recursively: 200,000 levels crash the process, 3,000 do not."""
    write_store(store_path, finish=False)
    storage, key, deep = Storage.open(store_path), "embed/zarr.json", b"[" * 3000 + b"]" * 3000
    sound = storage.read(key)
    edited = sound.replace(part.encode(), b'"d":' + deep) if part else deep
    assert edited != sound
    storage.write(key, edited)
    with pytest.raises(StoreInvalid, match=r"embed/zarr\.json is JSON nested") as caught:
        StoreWriter.open(store_path, metadata(), layout())
    assert len(str(caught.value)) < 400


def test_an_array_of_another_dtype_is_refused(tmp_path):
    write_store(str(tmp_path))
    zarr_json = tmp_path / "embed" / "zarr.json"
    zarr_json.write_text(zarr_json.read_text().replace("bfloat16", "float32"))
    with pytest.raises(StoreInvalid, match=r"delete its zarr\.json \(the next run writes a new one"):
        StoreWriter.open(str(tmp_path), metadata(), layout())
    zarr_json.unlink()
    write_store(str(tmp_path))
    assert verify_store(str(tmp_path)) == []


@pytest.mark.parametrize("path", [Path("~/stores/a"), "~/stores/a", Path("stores/a"), "stores/a/"])
def test_a_local_path_may_be_relative_or_in_the_home_directory(tmp_path, monkeypatch, path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    write_store(os.fspath(path))
    assert (tmp_path / "stores" / "a" / "zarr.json").is_file()
    assert ActivationStore.open(path).num_tokens == stored_tokens()
    assert read_metadata(os.fspath(path)).fingerprint() == metadata().fingerprint()
    assert verify_store(os.fspath(path)) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_without_permission_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(StoreError, match="Grant this user the permission"):
        StoreWriter.open(str(tmp_path / "store"), metadata(), layout())


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB."""
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], capture_output=True)
    if made.returncode != 0:
        pytest.skip("only root can mount a file system")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_full_disk_loses_nothing_that_was_committed(small_disk):
    path = str(small_disk / "store")
    writer = StoreWriter.open(path, metadata(store={"compression": "none"}), layout())
    block, second = list(blocks(0))[:2]
    commit_block(writer, block)
    ballast = small_disk / "ballast"
    subprocess.run(["dd", "if=/dev/zero", f"of={ballast}", "bs=4k"], capture_output=True)  # until the disk is full
    with pytest.raises(StoreError, match="Free space, then run the same command again"):
        commit_block(writer, second)
    assert verify_store(path) == []
    assert ActivationStore.open(path).num_tokens == block.record.tokens
    ballast.unlink()
    write_store(path)
    assert verify_store(path) == []
    assert ActivationStore.open(path).num_tokens == stored_tokens()


def test_a_read_only_file_system_is_reported(small_disk):
    path = str(small_disk / "store")
    writer = StoreWriter.open(path, metadata(), layout())
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    block = next(blocks(0))
    with pytest.raises(StoreError, match=r"Choose a different store\.path"):
        commit_block(writer, block)
