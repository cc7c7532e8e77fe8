"""Copies made by several threads, compared with NumPy's, and jobs that use them."""

from contextlib import closing

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pipeline.config import composing
from pipeline.extraction import draining
from pipeline.extraction.block_writer import BlockWriter
from pipeline.extraction.buffers import BlockBuffers
from pipeline.extraction.draining import CopyThreads, num_copy_threads
from pipeline.extraction.transfer import HostBlock, StepInFlight
from pipeline.job.metrics import Metrics
from pipeline.job.opening import open_job
from pipeline.store.write.store_writer import StoreWriter
from tests.jobs import assert_same_store, committed, write_text

SHAPES = [(0, 4), (1, 3), (7, 5, 6), (16, 2, 3)]


@pytest.mark.parametrize("dtype", ["float32", "int8", "int32", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_number_of_threads_does_not_change_what_is_copied(monkeypatch, count, dtype):
    monkeypatch.setattr(draining, "_PIECE_BYTES", 64)  # a few rows
    threads, rng = CopyThreads(count), np.random.default_rng(0)
    sources = [rng.integers(1, 100, shape).astype(dtype) for shape in SHAPES]
    memories = [np.zeros((len(source) + 2, *source.shape[1:-1], 9), dtype) for source in sources]
    for memory, source in zip(memories, sources, strict=True):  # between other rows and columns
        threads.start(memory[1:-1, ..., 2 : 2 + source.shape[-1]], source)
    threads.finish()
    for memory, source in zip(memories, sources, strict=True):
        expected = np.zeros_like(memory)
        expected[1:-1, ..., 2 : 2 + source.shape[-1]] = source
        np.testing.assert_array_equal(memory.view(np.uint8), expected.view(np.uint8))


def copy_all(threads: CopyThreads, target: np.ndarray, values: np.ndarray) -> None:
    threads.start(target, values)
    threads.finish()


@pytest.mark.parametrize("count", [1, 2])
def test_a_failed_copy_is_raised_once_and_the_others_are_made(count):
    threads, memory = CopyThreads(count), np.zeros((4, 3), np.float32)
    read_only = np.zeros((4, 3), np.float32)
    read_only.flags.writeable = False
    threads.start(memory, np.ones((4, 3), np.float32))
    with pytest.raises(ValueError, match="read-only"):
        copy_all(threads, read_only, memory)
    assert memory.all()
    copy_all(threads, memory, np.zeros((4, 3), np.float32))  # the failure is not raised again
    assert not memory.any()


@pytest.mark.parametrize("count", [1, 2])
def test_rows_that_do_not_fit_are_refused(count):
    with pytest.raises(ValueError, match="shape"):
        CopyThreads(count).start(np.zeros((4, 3), np.float32), np.ones((3, 3), np.float32))


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (15, 1), (16, 2), (24, 3), (64, 8), (224, 8)])
def test_the_number_of_threads_follows_the_cores(monkeypatch, cores, threads):
    monkeypatch.setattr(draining, "num_cores", lambda: cores)
    assert num_copy_threads() == threads


@pytest.fixture
def overrides(tmp_path) -> list[str]:
    text = write_text(tmp_path / "text", files=1, documents=20)
    sizes = ["batch.rows=4", "batch.length=128", "store.shard_mib=0.25", "capture.dtype=bfloat16", "run.progress=false"]
    return [f"data.path={text}", *sizes]


def test_the_writer_waits_for_all_copies(monkeypatch, tmp_path, overrides):
    """Blocks that one thread copies and blocks that several copy are the same."""
    monkeypatch.setattr(draining, "_PIECE_BYTES", 1000)
    for cores in (1, 32):
        monkeypatch.setattr(draining, "num_cores", lambda cores=cores: cores)
        job = open_job(composing.compose([*overrides, f"store.path={tmp_path / str(cores)}"]))
        store, rng = StoreWriter.open(job.config.store.path, job.metadata, job.layout), np.random.default_rng(0)
        with closing(Metrics(total_tokens=None, stored_tokens=0, progress=False, interval_s=3600)) as metrics:
            writer = BlockWriter(store, job.plan, metrics)
            for block in job.stream(0).blocks():
                rows = slice(0, block.num_rows)
                leaves = [leaf[rows] for leaf in BlockBuffers.allocate(job.plan).leaves()]
                values = [jnp.asarray(rng.random(leaf.shape), leaf.dtype) for leaf in leaves]
                copies = [HostBlock(number, rows, (), array) for number, array in enumerate(values)]
                writer.submit(StepInFlight(block, 0, block.num_rows, copies, counts=None))
            writer.close()
    assert committed(tmp_path / "1") > 1
    assert_same_store(tmp_path / "32", tmp_path / "1")


@pytest.mark.parametrize("cores", [1, 32])
def test_an_output_that_does_not_fit_ends_the_writer(monkeypatch, tmp_path, overrides, cores):
    monkeypatch.setattr(draining, "num_cores", lambda: cores)
    job = open_job(composing.compose([*overrides, f"store.path={tmp_path / 'store'}"]))
    store = StoreWriter.open(job.config.store.path, job.metadata, job.layout)
    block = next(job.stream(0).blocks())
    narrow = HostBlock(0, slice(0, 4), (slice(None), slice(None)), jnp.zeros((4, 128, 7), jnp.bfloat16))
    with closing(Metrics(total_tokens=None, stored_tokens=0, progress=False, interval_s=3600)) as metrics:
        writer = BlockWriter(store, job.plan, metrics)
        writer.submit(StepInFlight(block, 0, block.num_rows, [narrow], counts=None))
        with pytest.raises(ValueError, match="shape"):
            writer.close()
    assert not [*(tmp_path / "store").glob("_commits/*/*.json")]
