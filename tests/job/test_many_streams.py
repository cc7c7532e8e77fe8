"""Many processes lease many streams: each stream is computed once, takes few requests, and no lease is lost."""

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorstore as ts

from pipeline.config import composing
from pipeline.data.documents import TokenBlock
from pipeline.job import running
from pipeline.job.job import Job
from pipeline.job.leasing import LeasedStreams, UnfinishedStreams
from pipeline.job.metrics import Metrics
from pipeline.job.opening import open_job, open_storage
from pipeline.job.running import complete, has_work
from pipeline.job.writing.block_writer import commit_record
from pipeline.store.format.commits import commit_key
from pipeline.store.format.keys import LEASES_PREFIX
from pipeline.store.format.metadata import require_root
from pipeline.store.write.leases import Leases
from pipeline.store.write.store_writer import StoreWriter

pytestmark = pytest.mark.heavy
SETTINGS = ("batch.rows=1", "batch.length=32", "capture.layers=[0]", "data.id_column=null")


@pytest.fixture
def text(tmp_path) -> Path:
    return make_text(tmp_path / "text", 80)


def make_text(folder: Path, num_files: int) -> Path:
    folder.mkdir()
    for number in range(num_files):
        pq.write_table(pa.table({"text": [f"document {number}"]}), folder / f"{number:06}.parquet")
    return folder


def make_job(text: Path, path: str, *overrides: str) -> Job:
    """One stream for each file, of one block with one row."""
    num_streams = f"data.num_streams={len(list(text.iterdir()))}"
    return open_job(composing.compose([f"data.path={text}", f"store.path={path}", num_streams, *SETTINGS, *overrides]))


def open_store(job: Job) -> StoreWriter:
    return StoreWriter.open(job.storage, job.metadata, job.layout)


def share(job: Job, index: int, count: int) -> Job:
    """The job of one of `count` processes."""
    streams = replace(job.plan.streams, local=tuple(range(index, job.plan.streams.count, count)))
    return replace(job, plan=replace(job.plan, streams=streams))


class Processes:
    """Threads that lease a job's streams as processes do, and commit blocks as soon as they are read, without a model.

    The processes are those of one job, or jobs of one process each. `computed`: for each, how often it computed each
    stream.
    """

    def __init__(self, job: Job, count: int, *, is_one_job: bool) -> None:
        self._jobs = [share(job, index, count) if is_one_job else job for index in range(count)]
        self._barrier = threading.Barrier(count)
        self.computed: list[Counter[int]] = [Counter() for _ in range(count)]

    def run(self) -> None:
        """Returns when all blocks are committed."""
        open_store(self._jobs[0])
        with ThreadPoolExecutor(len(self.computed)) as pool:
            list(pool.map(self._extract, self._jobs, self.computed))

    def _extract(self, job: Job, computed: Counter[int]) -> None:
        job = replace(job, storage=open_storage(job.config.store))
        store = open_store(job)
        self._barrier.wait(300)
        with closing(Metrics()) as metrics, closing(Leases(job.storage, 60)) as leases:
            leased = LeasedStreams(job, store, leases, metrics)
            for block in leased.blocks(lambda: False):
                commit(store, block)
                assert leased.holds(block.stream), "lost"
                computed[block.stream] += 1
                leased.finished(block.stream)


def commit(store: StoreWriter, block: TokenBlock) -> None:
    """Commits a block without its other objects."""
    record = replace(commit_record(block), recent=store.streams[block.stream].table.recent(block.index))
    store.storage.put(record.key, record.to_json())
    store.streams.append(record)


def num_requests() -> int:
    """The number of this process's requests to local files; a listing counts as one."""
    prefix = "/tensorstore/kvstore/file/"
    kinds = {f"{prefix}{kind}" for kind in ("read", "write", "list")}
    metrics = ts.experimental_collect_matching_metrics(prefix)
    return sum(metric["values"][0]["value"] for metric in metrics if metric["name"] in kinds)


@pytest.mark.parametrize("is_one_job", [True, False])
def test_every_stream_is_computed_once_and_then_nothing_is_left(text, tmp_path, is_one_job):
    job = make_job(text, str(tmp_path / "store"))
    processes = Processes(job, 3, is_one_job=is_one_job)
    processes.run()
    assert sum(processes.computed, Counter()) == dict.fromkeys(range(80), 1)
    assert all(processes.computed)
    assert job.storage.list_keys(LEASES_PREFIX) == []
    store = open_store(job)
    assert not has_work(job, store)
    complete(job, store)
    assert require_root(job.storage).complete


def test_a_start_takes_requests_for_the_own_streams_only(text, tmp_path):
    """A process leases its own streams in order, and reads others only after these."""
    job = share(make_job(text, str(tmp_path / "store")), 3, 20)
    store = open_store(job)
    before = num_requests()
    assert has_work(job, store)
    with closing(Leases(job.storage, 60)) as leases:
        streams = UnfinishedStreams(store, leases, job.plan.streams.local, job.stream_work)
        assert finish_streams(streams, store, 4) == [3, 23, 43, 63]
        # Reads the records and the leases of a batch of 16 streams, and leases, reads, commits and releases four.
        assert num_requests() - before <= 16 * 3 + 4 * 8
        finish_streams(streams, store, 76)
        assert streams.take_next() is None
        assert not streams


def finish_streams(streams: UnfinishedStreams, store: StoreWriter, count: int) -> list[int]:
    """Leases and computes as many streams, and returns them."""
    finished = []
    for _ in range(count):
        [block] = streams.take_next().blocks(lambda: False)
        commit(store, block)
        streams.release(block.stream)
        finished.append(block.stream)
    return finished


def test_a_stream_whose_records_were_deleted_is_computed_again(text, tmp_path):
    job = make_job(text, str(tmp_path / "store"))
    processes = Processes(job, 1, is_one_job=True)
    processes.run()
    complete(job, open_store(job))
    job.storage.write(commit_key(5, 0), None)
    store = running.open_store(job)
    assert not store.complete
    processes.run()
    assert processes.computed[0] == dict.fromkeys(range(80), 1) | {5: 2}
    complete(job, store)
    assert require_root(job.storage).complete


def test_waiting_for_a_stream_counts_as_a_stall_only_while_a_block_is_in_progress(text, tmp_path):
    job = make_job(text, str(tmp_path / "store"))
    store, polls = open_store(job), iter(range(12))
    with (
        closing(Metrics()) as metrics,
        closing(Leases(job.storage, 600)) as others,
        closing(Leases(job.storage, 8)) as leases,
    ):
        assert all(map(others.take, others.vacant(range(1, 80))))
        leased = LeasedStreams(job, store, leases, metrics)
        blocks = leased.blocks(lambda: next(polls, None) is None)
        block = next(blocks)
        began = metrics.last_step = time.monotonic()
        assert next(blocks, None) is None, "it has looked for another stream until it was asked to stop"
        assert metrics.last_step == began
        commit(store, block)
        leased.finished(block.stream)
        polls = iter(range(3))
        assert next(leased.blocks(lambda: next(polls, None) is None), None) is None
        assert metrics.last_step > began


@pytest.mark.slow
def test_64_processes_on_10_000_streams(tmp_path):
    """No lease is lost. Each process reads the records of every stream once, to know that the store has all of them."""
    job = make_job(make_text(tmp_path / "text", 10_000), str(tmp_path / "store"))
    processes = Processes(job, 64, is_one_job=True)
    before = num_requests()
    processes.run()
    requests = num_requests() - before
    assert sum(processes.computed, Counter()) == dict.fromkeys(range(10_000), 1)
    assert requests <= 64 * 10_000 * 3 + 10_000 * 10
