"""A Stream that also fills a store makes the command's store, byte by byte, however the training was stopped."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import Stream
from pipeline.core.errors import StoreError, StoreMismatch
from pipeline.library import StreamReader
from pipeline.store import ActivationStore
from pipeline.store.check.verifying import verify_store
from pipeline.store.format.commits import commit_key
from tests.jobs import assert_same_store, committed, create_store, objects, run_here, write_text
from tests.token_batches import assert_all_same

pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("cached_steps")]
SIZE = 100
SMALL = ["batch.rows=4", "batch.length=128", "store.rows_per_block=8", "run.progress=false"]  # blocks of two steps
BUFFER = 3072  # slots for tokens: two halves of three steps


@pytest.fixture(scope="module")
def overrides(tmp_path_factory) -> list[str]:
    """Three source shards in two streams. Statistics, an SAE's features and their index are stored too."""
    text = write_text(tmp_path_factory.mktemp("text"), files=3, documents=12, max_characters=1500)
    features = [
        "capture.encode={blocks.4.resid_post: '${assets:tiny-sae}'}",
        "capture.encode_top=8",
        "capture.keep=both",
    ]
    settings = ["data=demo", f"data.path={text}", "model=tiny", "capture.layers=[2,4]", "data.num_streams=2"]
    return [*settings, *features, *SMALL]


@pytest.fixture(scope="module")
def stream(overrides) -> Stream:
    return Stream.from_config(overrides)


@pytest.fixture(scope="module")
def reference(overrides, tmp_path_factory) -> Path:
    """The command's store."""
    path = tmp_path_factory.mktemp("command") / "store"
    run_here(*overrides, f"store.path={path}")
    return path


def batches_of(stream: Stream, **options) -> StreamReader:
    return stream.batches(SIZE, "blocks.2.resid_post", **{"shuffle_buffer_tokens": BUFFER, "seed": 3} | options)


def withdraw(store: Path, stream: int, blocks: int) -> None:
    """Keeps only the stream's first blocks, as if the process had been killed before it committed the others."""
    records = sorted((store / commit_key(stream, 0)).parent.iterdir())
    assert len(records) >= blocks
    for record in records[blocks:]:
        record.unlink()


READS_ONE_BATCH = """
import json, sys, threading
from pipeline import Stream

stream = Stream.from_config(sys.argv[2:])
batches = stream.batches(100, "blocks.2.resid_post", shuffle_buffer_tokens=3072, store=sys.argv[1])
json.batches = batches  # in a module that is cleared late
next(batches)
"""
GOES_ON_IN_A_THREAD = "threading.Thread(target=list, args=[batches]).start()"


@pytest.mark.parametrize("end", ["", GOES_ON_IN_A_THREAD])
def test_a_program_that_ends_without_closing_commits_complete_blocks(overrides, end, tmp_path):
    command = [sys.executable, "-c", READS_ONE_BATCH + end, tmp_path / "store", *overrides]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    assert ("ArgumentError" if end else "") in done.stderr
    assert ("Error" in done.stderr) == bool(end)
    assert committed(tmp_path / "store") > 0


def test_a_stream_writes_the_store_of_the_command(stream, reference, whole, tmp_path):
    batches = batches_of(stream, store=tmp_path / "store")
    assert_all_same(batches, whole)
    assert_same_store(tmp_path / "store", reference)


def test_committed_blocks_are_not_written_again(stream, reference, whole, tmp_path):
    path, stops, resumed, state, times = tmp_path / "store", (1, 40), [], None, {}
    for stop in (*stops, len(whole)):
        batches = batches_of(stream, state=state, store=path)
        resumed += [next(batches) for _ in range(stop - len(resumed))]
        state = json.loads(json.dumps(batches.state()))
        batches.close()
        now = {record: record.stat().st_mtime_ns for record in path.glob("_commits/*/*.json")}
        assert times.items() <= now.items()
        times = now
    assert len(times) == committed(reference)
    assert_all_same(resumed, whole)
    assert ActivationStore.open(path).complete
    assert_same_store(path, reference)


def test_a_store_behind_the_state_gets_the_missing_blocks(stream, reference, whole, tmp_path):
    """Blocks have two steps and halves three, so a half begins within a block."""
    path = tmp_path / "store"
    batches = batches_of(stream, store=path)
    for _ in range(20):
        next(batches)
    state = batches.state()
    assert state["row"] > 0
    batches.close()
    for number, count in enumerate((2, 1)):
        withdraw(path, number, count)
    assert_all_same(batches_of(stream, state=state, store=path), whole[20:])
    assert_same_store(path, reference)


def test_a_state_at_the_end_fills_a_store(stream, reference, ended, tmp_path):
    state = ended[1].state()
    assert not list(batches_of(stream, state=state, store=tmp_path / "store"))
    assert_same_store(tmp_path / "store", reference)


def test_two_readers_fill_one_store(stream, reference, tmp_path):
    path = tmp_path / "store"
    for rank in range(2):
        assert not ActivationStore.open(path).complete if rank else not path.exists()
        assert list(batches_of(stream, rank=rank, world=2, store=path))
    assert_same_store(path, reference)


def test_a_stream_of_fewer_tokens_continues_a_larger_store(stream, reference, overrides, tmp_path):
    path = tmp_path / "store"
    batches = batches_of(stream, store=path)
    while not path.joinpath("zarr.json").exists():  # the store is created with its first block
        next(batches)
    batches.close()
    before = committed(path)
    assert list(batches_of(Stream.from_config([*overrides, "run.max_tokens=5000"]), store=path))
    assert before < committed(path) < committed(reference)
    assert not ActivationStore.open(path).complete
    assert list(batches_of(stream, store=path))
    assert_same_store(path, reference)


def test_a_store_of_another_configuration_is_refused(stream, reference, overrides):
    before = objects(reference)
    other = Stream.from_config([*overrides, "batch.packing=pad"])
    with pytest.raises(StoreMismatch, match="the store has 'pack', this run asks for 'pad'"):
        batches_of(other, store=reference)
    assert objects(reference) == before


def test_a_failed_write_is_raised_where_batches_are_read(stream, whole, overrides, tmp_path):
    path = tmp_path / "store"
    create_store(*overrides, f"store.path={path}")
    in_the_way = path / "_documents"
    in_the_way.write_text("no folder")
    with pytest.raises(StoreError, match="_documents"):
        list(batches_of(stream, store=path))
    batches = batches_of(stream, store=path)
    next(batches)
    with pytest.raises(StoreError, match="_documents"):  # also if the training ends earlier
        batches.close()
    assert committed(path) == 0
    in_the_way.unlink()
    assert list(batches_of(stream, store=path))
    assert not verify_store(str(path))
