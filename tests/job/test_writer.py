"""Blocks that the writer thread copies, writes and commits, also when a write fails."""

import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path
from threading import Event
from unittest.mock import patch

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pipeline.config import composing
from pipeline.config.schema import RunConfig
from pipeline.core.errors import StoreError
from pipeline.data.documents import TokenBlock
from pipeline.job.job import Job
from pipeline.job.metrics import Metrics
from pipeline.job.opening import open_job
from pipeline.job.running import run
from pipeline.job.writing import block_summaries, transfer
from pipeline.job.writing.block_writer import BlockBuffers, BlockWriter
from pipeline.job.writing.transfer import CopyThreads, HostBlock, StepInFlight
from pipeline.store.write.store_writer import StoreWriter
from tests.jobs import assert_same_store, wait_until, write_text
from tests.models.sae_files import write_saelens

pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("cached_steps")]
ARRAY = "blocks.2.resid_post"


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"), files=2, documents=60)


def job_config(text: Path, store: Path, streams: int, *more: str) -> RunConfig:
    sizes = ["batch.rows=2", "batch.length=128", "store.shard_mib=0.25", "run.progress=false"]
    return composing.compose([f"data.path={text}", f"store.path={store}", f"data.num_streams={streams}", *sizes, *more])


@contextmanager
def writing(config: RunConfig) -> Iterator[tuple[Job, BlockWriter, Metrics]]:
    """The job, and a writer for its store, without a model. `write` fills its blocks."""
    job = open_job(config)
    store = StoreWriter.open(config.store.path, job.metadata, job.layout)
    with closing(Metrics()) as metrics:
        yield job, BlockWriter(store, job.plan, metrics), metrics


def write(job: Job, writer: BlockWriter, block: TokenBlock, values: Callable[[tuple[int, ...]], object]) -> None:
    """Submits a block with `values` of each output's shape."""
    rows, copies = slice(0, block.num_rows), []
    for number, leaf in enumerate(BlockBuffers.allocate(job.plan).leaves()):
        array = jnp.asarray(values(leaf[rows].shape), leaf.dtype)
        copies.append(HostBlock(number, rows, (), array))
    writer.submit(StepInFlight(block, 0, block.num_rows, copies, counts=None))


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


@pytest.mark.parametrize("dtype", ["float32", "int8", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
@pytest.mark.parametrize("cores", [1, 32])
def test_copies_do_not_depend_on_the_number_of_threads_and_fail_alone(monkeypatch, cores, dtype):
    monkeypatch.setattr(transfer, "_PIECE_BYTES", 64)  # a few rows
    monkeypatch.setattr(transfer, "num_cores", lambda: cores)
    threads, rng = CopyThreads(), np.random.default_rng(0)
    sources = [rng.integers(1, 100, shape).astype(dtype) for shape in [(0, 4), (1, 3), (7, 5, 6), (16, 2, 3)]]
    memories = [np.zeros((len(source) + 2, *source.shape[1:-1], 9), dtype) for source in sources]
    read_only = np.zeros((4, 3), dtype)
    read_only.flags.writeable = False
    with pytest.raises(ValueError, match="shape"):
        threads.start(read_only, read_only[:3])
    threads.start(read_only, np.ones((4, 3), dtype))
    for memory, source in zip(memories, sources, strict=True):  # between other rows and columns
        threads.start(memory[1:-1, ..., 2 : 2 + source.shape[-1]], source)
    with pytest.raises(ValueError, match="read-only"):
        threads.finish()
    threads.finish()  # the failure is not raised again
    for memory, source in zip(memories, sources, strict=True):
        expected = np.zeros_like(memory)
        expected[1:-1, ..., 2 : 2 + source.shape[-1]] = source
        np.testing.assert_array_equal(memory.view(np.uint8), expected.view(np.uint8))


def test_the_writer_waits_for_all_copies(monkeypatch, text, tmp_path):
    """Blocks that one thread copies and blocks that several copy are the same."""
    monkeypatch.setattr(transfer, "_PIECE_BYTES", 1000)
    for cores in (1, 32):
        monkeypatch.setattr(transfer, "num_cores", lambda cores=cores: cores)
        rng = np.random.default_rng(0)
        with writing(job_config(text, tmp_path / str(cores), 1)) as (job, writer, _):
            for block in islice(job.stream(0).blocks(), 3):
                write(job, writer, block, rng.random)
            writer.close()
    assert len(committed_blocks(tmp_path / "1")) == 3
    assert_same_store(tmp_path / "32", tmp_path / "1")


def test_an_output_that_does_not_fit_ends_the_writer(text, tmp_path):
    with writing(job_config(text, tmp_path / "store", 1)) as (job, writer, _):
        block = next(job.stream(0).blocks())
        narrow = HostBlock(0, slice(0, 2), (slice(None), slice(None)), jnp.zeros((2, 128, 7), jnp.bfloat16))
        writer.submit(StepInFlight(block, 0, block.num_rows, [narrow], counts=None))
        with pytest.raises(ValueError, match="shape"):
            writer.close()
    assert committed_blocks(tmp_path / "store") == []


def test_after_a_failed_write_no_later_block_of_the_stream_is_committed(text, tmp_path):
    """And a job that is resumed makes the same store."""
    config = job_config(text, tmp_path / "store", 2, "run.max_tokens=8000")
    with failing_write(config, (0, 1), (0, 2)), pytest.raises(StoreError, match=f"{ARRAY}/c"):
        run(config)
    assert committed_blocks(tmp_path / "store") == [(0, 0)]
    run(config)
    run(job_config(text, tmp_path / "reference", 2, "run.max_tokens=8000"))
    assert_same_store(tmp_path / "store", tmp_path / "reference")


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
    with failing_write(config, failing) as may_fail, writing(config) as (job, writer, _):
        blocks = [job.stream(stream).blocks() for stream in range(2)]
        for stream in (0, 1, 0, 1, 1):  # there are buffers for two
            write(job, writer, next(blocks[stream]), np.ones)
        may_fail.set()
        with pytest.raises(StoreError, match=f"{ARRAY}/c"):
            writer.close()
    assert committed_blocks(tmp_path / "store") == committed


def test_a_block_whose_table_cannot_be_written_is_not_committed(text, tmp_path):
    """Its arrays are being written at that time."""
    with writing(job_config(text, tmp_path / "store", 2)) as (job, writer, _):
        blocks = [job.stream(stream).blocks() for stream in range(2)]
        (tmp_path / "store/_documents").mkdir()
        (tmp_path / "store/_documents/stream-00000").write_bytes(b"")
        for block in (*islice(blocks[1], 2), next(blocks[0])):
            write(job, writer, block, np.ones)
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
    statistics = tmp_path / "store/_statistics/stream-00000/block-000000.parquet"
    with writing(job_config(text, tmp_path / "store", 1, "capture.layers=[2]", encode)) as (job, writer, _):
        shards = [tmp_path / "store" / job.layout.shard_key(spec, 0, 0) for spec in job.layout.all_arrays]
        write(job, writer, next(job.stream(0).blocks()), np.ones)
        wait_until(lambda: all(shard.exists() for shard in shards), None, "arrays without their features")
        assert not statistics.exists()
        may_sort.set()
        writer.close()
    assert statistics.exists()
    assert committed_blocks(tmp_path / "store") == [(0, 0)]


def test_metrics_that_cannot_be_written_are_warned_about(text, tmp_path, caplog):
    with writing(job_config(text, tmp_path / "store", 1)) as (job, writer, metrics):
        (tmp_path / "store/_jobs" / metrics.name).mkdir(parents=True)
        write(job, writer, next(job.stream(0).blocks()), np.ones)
        writer.close()
    assert "cannot write the run's metrics" in caplog.text
    assert committed_blocks(tmp_path / "store") == [(0, 0)]
