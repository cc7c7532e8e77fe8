"""Stores filled by different workers are merged into the store of a single run."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.config.composing import compose
from pipeline.core.errors import StoreInvalid
from pipeline.extraction.job_run import run
from pipeline.merge import main
from pipeline.store import ActivationStore
from pipeline.store.format.layout import MIB, ArraySpec
from pipeline.store.format.metadata import require_root
from pipeline.store.io.storage import Storage
from pipeline.store.write.merging import _num_copies, merge_stores
from pipeline.store.write.store_writer import StoreWriter
from tests.jobs import assert_same_store, write_text
from tests.jobs import run as run_command
from tests.store.emulators import new_bucket
from tests.store.example_store import LENGTH, ROWS, blocks, layout, metadata, stored_tokens, write_blocks, write_store


def write_streams(path: Path | str, streams: Sequence[int], **changes) -> StoreWriter:
    """The store's target is all of the data."""
    changes = {"store": {"compression": "none"}, "config": {"run": {"max_tokens": None}}} | changes
    writer = StoreWriter.open(str(path), metadata(**changes), layout())
    for stream in streams:
        write_blocks(writer, stream)
    return writer


@pytest.fixture
def halves(tmp_path) -> list[str]:
    """A store per stream, as arguments."""
    for stream in range(2):
        write_streams(tmp_path / str(stream), [stream])
    return [f"from={tmp_path / str(stream)}" for stream in range(2)]


@pytest.fixture
def whole(tmp_path) -> Path:
    write_streams(tmp_path / "whole", range(2)).finish()
    return tmp_path / "whole"


def test_stores_of_two_workers_merge_into_that_of_one(tmp_path, capsys):
    text = write_text(tmp_path / "text", files=2, documents=25)
    job = [f"data.path={text}", "data.num_streams=2", "batch.rows=4", "batch.length=128", "capture.layers=[1]"]
    job += ["store.shard_mib=0.25", "run.progress=false", "capture.dtype=int8", "capture.positions=last"]
    run(compose([*job, f"store.path={tmp_path / 'one'}"]))
    for worker in range(2):
        share = [f"run.worker_index={worker}", "run.worker_count=2", f"store.path={tmp_path / str(worker)}"]
        run(compose([*job, *share]))
        assert not ActivationStore.open(tmp_path / str(worker)).complete
    command = ["from=" + str(tmp_path / "0"), "from=" + str(tmp_path / "1"), f"store.path={tmp_path / 'merged'}"]
    result = run_command(*command, module="pipeline.merge")
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith(f"merged: sound\n{tmp_path / 'merged'}: complete\n")
    assert_same_store(tmp_path / "merged", tmp_path / "one")
    assert len(list((tmp_path / "merged" / "_metrics").iterdir())) == 2
    capsys.readouterr()


def test_an_interrupted_merge_resumes_and_may_be_repeated(tmp_path, halves, whole, capsys):
    copied = []

    def interrupt(done: int, total: int) -> None:
        copied.append(total)
        if done == 2:
            raise KeyboardInterrupt

    merged = tmp_path / "merged"
    with pytest.raises(KeyboardInterrupt):
        merge_stores([half.removeprefix("from=") for half in halves], str(merged), interrupt)
    assert main([*halves, f"store.path={merged}"]) == 0
    assert_same_store(merged, whole)
    merge_stores([half.removeprefix("from=") for half in halves], str(merged), lambda done, total: copied.append(total))
    assert copied == [len(list(blocks(0))) + len(list(blocks(1)))] * 2
    assert main([*halves, f"store.path={merged}"]) == 0
    assert_same_store(merged, whole)
    capsys.readouterr()


def test_blocks_of_a_stream_may_come_from_several_stores(tmp_path, whole, monkeypatch):
    """Each stream's first block comes from one store, the others from another. Records are read a few at a time."""
    monkeypatch.setattr("pipeline.store.write.merging._RECORDS_AT_ONCE", 2)
    write_store(str(tmp_path / "first"), finish=False, max_rows=ROWS)
    store = merge_stores([str(tmp_path / "first"), str(whole)], str(tmp_path / "merged"))
    assert store.finish()
    assert_same_store(tmp_path / "merged", whole)


@pytest.mark.parametrize("interrupted_after", [1, 3, 5])
def test_blocks_are_committed_in_order_although_several_are_copied_at_once(tmp_path, whole, interrupted_after):
    def interrupt(done: int, _total: int) -> None:
        if done == interrupted_after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge_stores([str(whole)], str(tmp_path / "merged"), interrupt)
    keys = [block.record.key for stream in range(2) for block in blocks(stream)]
    stored = [key for key in keys if (tmp_path / "merged" / key).exists()]
    assert stored == keys[:interrupted_after]


@pytest.mark.parametrize("done_before", [1, 3])
def test_blocks_committed_by_another_run_during_a_merge_are_kept(tmp_path, halves, whole, done_before):
    merged, sources = tmp_path / "merged", [half.removeprefix("from=") for half in halves]

    def merge_too(done: int, _total: int) -> None:
        if done == done_before:
            merge_stores([str(whole)], str(merged))

    store = merge_stores(sources, str(merged), merge_too)
    assert store.finish()
    assert_same_store(merged, whole)


@pytest.mark.parametrize(("shard_mib", "copies"), [(512, 4), (64, 16), (1, 32)])
def test_concurrent_copies_are_limited_by_memory(shard_mib, copies):
    wide = ArraySpec("embed", "float32", width=shard_mib * MIB // (4 * ROWS * LENGTH))
    assert _num_copies(replace(layout(), arrays=(wide,))) == copies


def test_stores_may_be_merged_one_by_one(tmp_path, halves, whole, capsys):
    target = f"store.path={tmp_path / '0'}"
    assert main([halves[0], target]) == 0
    assert "not complete: streams 1 are unfinished" in capsys.readouterr().out
    assert main([halves[1], target]) == 0
    assert_same_store(tmp_path / "0", whole)


def test_a_complete_store_can_be_extended_by_a_merge(tmp_path, whole, capsys):
    write_store(str(tmp_path / "part"), max_rows=ROWS)
    assert main([f"from={whole}", f"store.path={tmp_path / 'part'}"]) == 0
    assert_same_store(tmp_path / "part", whole)
    capsys.readouterr()


def test_objects_that_a_killed_job_left_are_replaced_or_deleted(tmp_path, halves, whole, capsys):
    target = write_streams(tmp_path / "merged", [])
    keys = [target.layout.shard_key(spec, 0, 0) for spec in target.layout.all_arrays]
    for key in keys:
        (tmp_path / "merged" / key).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "merged" / key).write_bytes(b"left")
    assert main([*halves, f"store.path={tmp_path / 'merged'}"]) == 0
    assert_same_store(tmp_path / "merged", whole)
    capsys.readouterr()


def test_stores_are_merged_to_and_from_object_storage(tmp_path, halves, whole, gcs, capsys):
    remote = f"{new_bucket('gs', gcs.backend)}/store"
    assert main([*halves, f"store.path={remote}"]) == 0
    assert main([f"from={remote}", f"store.path={tmp_path / 'back'}"]) == 0
    assert_same_store(tmp_path / "back", whole)
    assert ActivationStore.open(remote).num_tokens == stored_tokens()
    capsys.readouterr()


def other_configuration(path: Path) -> str:
    write_streams(path, [1], tokenizer={"sha256": "other"})
    return "tokenizer.sha256: 'abc' and 'other'"


def other_block(path: Path) -> str:
    write_store(str(path), finish=False, max_rows=ROWS + 1)
    return "block 1 of stream 0 differs between .* and .*. Only stores that computed different streams"


def other_chunks(path: Path) -> str:
    write_streams(path, [])
    file = path / "embed" / "zarr.json"
    content = json.loads(file.read_text())
    content["codecs"][0]["configuration"]["chunk_shape"][0] //= 2
    file.write_text(json.dumps(content))
    return "embed/zarr.json: .* and "


def no_store(path: Path) -> str:
    return "there is no activation store at .*/other"


@pytest.mark.parametrize(
    ("make_other", "as_target"),
    [
        *itertools.product([other_configuration, other_block, other_chunks], [False, True]),
        (no_store, False),
    ],
)
def test_stores_that_do_not_match_are_refused_before_copying(tmp_path, halves, make_other, as_target):
    message = make_other(tmp_path / "other")
    arguments = [halves[0].removeprefix("from="), *([] if as_target else [str(tmp_path / "other")])]
    target = tmp_path / ("other" if as_target else "merged")
    before = sorted(target.rglob("*"))
    with pytest.raises(Exception, match=message.replace("in .*/0 and in .*/other", "in .* and in .*")) as caught:
        merge_stores(arguments, str(target))
    assert caught.value.exit_code == 2
    assert sorted(target.rglob("*")) == before


def test_a_target_that_lost_its_root_is_not_changed(tmp_path, halves, whole):
    (whole / "zarr.json").unlink()
    before = {file: file.read_bytes() for file in whole.rglob("*") if file.is_file()}
    with pytest.raises(StoreInvalid, match=r"zarr\.json is missing"):
        merge_stores([half.removeprefix("from=") for half in halves], str(whole))
    assert {file: file.read_bytes() for file in whole.rglob("*") if file.is_file()} == before


def test_errors_of_int8_are_taken_from_the_source_that_has_them(tmp_path, halves):
    sources = [half.removeprefix("from=") for half in halves]
    StoreWriter.open_existing(sources[1]).record_weights_error({"embed": 0.01})
    StoreWriter.open_existing(sources[0]).record_cache_error({"final_norm": 0.02})
    write_streams(tmp_path / "merged", [])  # as an interrupted merge leaves it
    root = merge_stores(sources, str(tmp_path / "merged")).root
    assert (root.weights_error, root.cache_error) == ({"embed": 0.01}, {"final_norm": 0.02})


@pytest.mark.parametrize(
    ("key", "content", "message"),
    [
        ("embed/c/1/0/0", None, "is missing, although the block is committed"),
        ("tokens/c/1/0", None, "is missing, although the block is committed"),
        ("_documents/stream-00001/block-000000.parquet", None, "is missing, although the block is committed"),
        ("_documents/stream-00001/block-000000.parquet", b"PAR1", "does not match its commit record"),
    ],
)
def test_a_block_with_missing_objects_is_not_committed(tmp_path, halves, whole, capsys, key, content, message):
    file, merged = tmp_path / "1" / key, f"store.path={tmp_path / 'merged'}"
    before = file.read_bytes()
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    assert main([*halves, merged]) == 2
    assert f"{file} {message}" in capsys.readouterr().err
    assert not require_root(Storage.open(tmp_path / "merged")).complete
    file.write_bytes(before)
    assert main([*halves, merged]) == 0
    assert_same_store(tmp_path / "merged", whole)


def test_damage_is_reported(tmp_path, halves, capsys):
    (tmp_path / "1" / "embed" / "c" / "1" / "0" / "0").write_bytes(b"damaged")
    assert main([*halves, f"store.path={tmp_path / 'merged'}"]) == 1
    assert "embed/c/1/0/0" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [[], ["from=/a"], ["store.path=/a"], ["from=", "store.path=/a"], ["from=/a", "x=1"]]
)
def test_wrong_arguments_print_the_usage(arguments, capsys):
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith("usage: python -m pipeline.merge from=...")
