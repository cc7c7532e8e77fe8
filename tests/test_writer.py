"""What the writer thread commits when a write fails: real writes, held by a lock and made to fail by a directory."""

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipeline import cli
from pipeline.config import RunConfig
from pipeline.errors import StoreError
from pipeline.job import open_job
from pipeline.run import run
from pipeline.store.shard_files import _lock
from pipeline.store.writing import StoreWriter
from tests.jobs import assert_same_store, write_text

ARRAY = "blocks.2.resid_post"


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"), files=2, documents=60)


def job_config(text: Path, store: Path, streams: int) -> RunConfig:
    sizes = ["batch.rows=4", "batch.length=128", "store.shard_mib=0.25", "run.progress=false"]
    return cli.compose([f"data.path={text}", f"store.path={store}", f"data.num_streams={streams}", *sizes])


@contextmanager
def failing_write(config: RunConfig, block: tuple[int, int], until: tuple[int, int]) -> Iterator[None]:
    """While entered, an array of this block (stream, number) cannot be written, which shows only once the array of
    another is. The store is created before."""
    job = open_job(config)
    StoreWriter.open(config.store.path, job.metadata, job.layout)
    [spec] = [spec for spec in job.layout.arrays if spec.name == ARRAY]
    shard, awaited = (Path(config.store.path) / job.layout.shard_key(spec, *place) for place in (block, until))
    shard.mkdir(parents=True)  # no file can be renamed to a directory
    is_locked, ended = threading.Event(), threading.Event()

    def hold_lock() -> None:
        with shard.with_name(f"{shard.name}.__lock").open("ab") as file:
            _lock(file)
            is_locked.set()
            while not awaited.exists() and not ended.is_set():
                time.sleep(0.005)

    thread = threading.Thread(target=hold_lock)
    thread.start()
    is_locked.wait()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        shutil.rmtree(shard)


def committed_blocks(store: Path) -> list[tuple[int, int]]:
    """Stream and number of each block that has a record."""
    found = store.glob("_commits/*/*.json")
    return sorted((int(file.parent.name.split("-")[-1]), int(file.stem.split("-")[-1])) for file in found)


@pytest.mark.parametrize(
    ("streams", "failing", "awaited", "committed"),
    [
        (2, (0, 0), (1, 0), [(1, 0)]),  # another stream's block, whose write was under way
        (1, (0, 0), (0, 1), []),  # nothing behind a failed block of the same stream
    ],
)
def test_a_failed_write_takes_no_other_streams_block_with_it(text, tmp_path, streams, failing, awaited, committed):
    config = job_config(text, tmp_path / "store", streams)
    with failing_write(config, failing, awaited), pytest.raises(StoreError, match=f"{ARRAY}/c"):
        run(config)
    assert committed_blocks(tmp_path / "store") == committed


def test_after_a_failed_write_the_job_ends_in_the_same_store(text, tmp_path):
    config = job_config(text, tmp_path / "store", 2)
    with failing_write(config, (0, 1), (1, 1)), pytest.raises(StoreError):
        run(config)
    assert committed_blocks(tmp_path / "store") == [(0, 0), (1, 0), (1, 1)]
    run(config)
    run(job_config(text, tmp_path / "reference", 2))
    assert_same_store(tmp_path / "store", tmp_path / "reference")
