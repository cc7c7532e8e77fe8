"""Blocks that the writer thread writes and commits, also when a write fails."""

import errno
import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from threading import Event
from unittest.mock import patch

import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.config import composing
from pipeline.config.schema import RunConfig
from pipeline.core.errors import StoreError
from pipeline.extraction import block_summaries
from pipeline.extraction.block_writer import BlockWriter
from pipeline.extraction.buffers import BlockBuffers
from pipeline.extraction.job_run import run
from pipeline.extraction.transfer import HostBlock, StepInFlight
from pipeline.job.metrics import Metrics
from pipeline.job.opening import open_job
from pipeline.store.write.store_writer import StoreWriter
from tests.jobs import assert_same_store, lock_file, write_text
from tests.models.sae_files import write_saelens

pytestmark = pytest.mark.usefixtures("cached_steps")
ARRAY = "blocks.2.resid_post"


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"), files=2, documents=60)


def job_config(text: Path, store: Path, streams: int, *more: str) -> RunConfig:
    sizes = ["batch.rows=2", "batch.length=128", "store.shard_mib=0.25", "run.progress=false"]
    return composing.compose([f"data.path={text}", f"store.path={store}", f"data.num_streams={streams}", *sizes, *more])


@contextmanager
def failing_write(config: RunConfig, block: tuple[int, int], until: tuple[int, int] | None = None) -> Iterator[Event]:
    """Creates the store and makes writing an array of `block` (stream, number) fail, once the array of block `until` is
    written or the event is set."""
    job = open_job(config)
    StoreWriter.open(config.store.path, job.metadata, job.layout)
    [spec] = [spec for spec in job.layout.arrays if spec.name == ARRAY]
    shard, awaited = (Path(config.store.path) / job.layout.shard_key(spec, *place) for place in (block, until or block))
    ended, link = Event(), os.link

    def fail(source: str, target: str) -> None:
        if target == os.fspath(shard):
            while not (until and awaited.exists()) and not ended.is_set():
                time.sleep(0.005)
            raise OSError(errno.EIO, "Input/output error")
        link(source, target)

    with patch("os.link", fail):
        yield ended


def committed_blocks(store: Path) -> list[tuple[int, int]]:
    """Stream and number of each block that has a record."""
    found = store.glob("_commits/*/*.json")
    return sorted((int(file.parent.name.split("-")[-1]), int(file.stem.split("-")[-1])) for file in found)


def test_after_a_failed_write_no_later_block_of_the_stream_is_committed(text, tmp_path):
    config = job_config(text, tmp_path / "store", 1)
    with failing_write(config, (0, 0), (0, 1)), pytest.raises(StoreError, match=f"{ARRAY}/c"):
        run(config)
    assert committed_blocks(tmp_path / "store") == []


@pytest.mark.parametrize(
    ("failing", "committed"),
    [
        ((0, 0), [(1, 0), (1, 1), (1, 2)]),
        ((1, 0), [(0, 0), (0, 1)]),
        ((0, 1), [(0, 0), (1, 0), (1, 1), (1, 2)]),
    ],
)
def test_blocks_submitted_before_a_write_failed_are_committed(text, tmp_path, failing, committed):
    """Including blocks that waited for the buffers of the failed one."""
    config = job_config(text, tmp_path / "store", 2)
    config = replace(config, capture=replace(config.capture, statistics=False))
    with failing_write(config, failing) as may_fail:
        job = open_job(config)
        blocks = [job.stream(stream).blocks() for stream in range(2)]
        store = StoreWriter.open(config.store.path, job.metadata, job.layout)
        with closing(Metrics(total_tokens=None, stored_tokens=0, progress=False, interval_s=3600)) as metrics:
            writer = BlockWriter(store, job.plan, metrics)
            for stream in (0, 1, 0, 1, 1):  # there are buffers for two
                block = next(blocks[stream])
                writer.submit(StepInFlight(block, 0, block.num_rows, copies=[], counts=None))
            may_fail.set()
            with pytest.raises(StoreError, match=f"{ARRAY}/c"):
                writer.close()
    assert committed_blocks(tmp_path / "store") == committed


def test_a_block_whose_table_cannot_be_written_is_not_committed(text, tmp_path):
    """Its arrays are being written at that time."""
    config = job_config(text, tmp_path / "store", 2, "capture.statistics=false")
    job = open_job(config)
    blocks = [job.stream(stream).blocks() for stream in range(2)]
    store = StoreWriter.open(config.store.path, job.metadata, job.layout)
    (tmp_path / "store/_documents").mkdir()
    (tmp_path / "store/_documents/stream-00000").write_bytes(b"")
    with closing(Metrics(total_tokens=None, stored_tokens=0, progress=False, interval_s=3600)) as metrics:
        writer = BlockWriter(store, job.plan, metrics)
        for block in (*islice(blocks[1], 2), next(blocks[0])):
            writer.submit(StepInFlight(block, 0, block.num_rows, copies=[], counts=None))
        with pytest.raises(StoreError, match="_documents/stream-00000"):
            writer.close()
    assert committed_blocks(tmp_path / "store") == [(1, 0), (1, 1)]


def test_arrays_are_written_while_features_are_sorted(text, tmp_path, monkeypatch):
    """Statistics and record follow."""
    may_sort, sort = Event(), block_summaries.by_feature

    def sort_late(*matrix):
        assert may_sort.wait(120)
        return sort(*matrix)

    monkeypatch.setattr(block_summaries, "by_feature", sort_late)
    write_saelens(tmp_path / "sae", "jumprelu", np.random.default_rng(0), num_inputs=128)
    encode = f'capture.encode={{{ARRAY}: "{tmp_path}/sae"}}'
    job = open_job(job_config(text, tmp_path / "store", 1, "capture.layers=[2]", encode))
    store = StoreWriter.open(job.storage, job.metadata, job.layout)
    shards = [tmp_path / "store" / job.layout.shard_key(spec, 0, 0) for spec in job.layout.all_arrays]
    statistics = tmp_path / "store/_statistics/stream-00000/block-000000.parquet"
    leaves = enumerate(BlockBuffers.allocate(job.plan).leaves())
    copies = [HostBlock(n, slice(0, len(leaf)), (), jnp.ones(leaf.shape, leaf.dtype)) for n, leaf in leaves]
    with closing(Metrics(total_tokens=None, stored_tokens=0, progress=False, interval_s=3600)) as metrics:
        writer = BlockWriter(store, job.plan, metrics)
        block = next(job.stream(0).blocks())
        writer.submit(StepInFlight(block, 0, block.num_rows, copies, counts=None))
        deadline = time.monotonic() + 120
        while not all(shard.exists() for shard in shards):
            assert time.monotonic() < deadline, "arrays wait for the features"
            time.sleep(0.005)
        assert not statistics.exists()
        may_sort.set()
        writer.close()
    assert statistics.exists()
    assert committed_blocks(tmp_path / "store") == [(0, 0)]


def test_a_job_resumed_after_a_failed_write_makes_the_same_store(text, tmp_path):
    config = job_config(text, tmp_path / "store", 2, "run.max_tokens=8000")
    with failing_write(config, (0, 1), (0, 2)), pytest.raises(StoreError):
        run(config)
    assert committed_blocks(tmp_path / "store") == [(0, 0)]
    run(config)
    run(job_config(text, tmp_path / "reference", 2, "run.max_tokens=8000"))
    assert_same_store(tmp_path / "store", tmp_path / "reference")


def test_metrics_that_are_slow_to_write_delay_no_commit(text, tmp_path):
    config = job_config(text, tmp_path / "store", 1)
    job = open_job(config)
    store = StoreWriter.open(config.store.path, job.metadata, job.layout)
    with closing(Metrics(total_tokens=None, stored_tokens=0, progress=False, interval_s=0)) as metrics:
        written = tmp_path / "store/_metrics" / metrics.name
        written.parent.mkdir()
        writer = BlockWriter(store, replace(job.plan, step=replace(job.plan.step, statistics=False)), metrics)
        with lock_file(written):
            for block, _ in zip(job.stream(0).blocks(), range(3), strict=False):
                writer.submit(StepInFlight(block, 0, block.num_rows, copies=[], counts=None))
            deadline = time.monotonic() + 120
            while len(committed_blocks(tmp_path / "store")) < 3:
                assert time.monotonic() < deadline, "blocks wait for the metrics"
                time.sleep(0.005)
            assert not written.exists()
        writer.close()
        assert '"blocks": 3' in written.read_text().splitlines()[-1]


def test_metrics_that_cannot_be_written_are_warned_about(text, tmp_path, caplog):
    config = job_config(text, tmp_path / "store", 1, "run.max_tokens=3000")
    job = open_job(config)
    StoreWriter.open(config.store.path, job.metadata, job.layout)
    (tmp_path / "store/_metrics").write_bytes(b"")
    run(config)
    assert "cannot write the run's metrics" in caplog.text
    assert committed_blocks(tmp_path / "store")
