"""Many workers claim many streams: each stream is computed once, takes few requests, and no claim is lost."""

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorstore as ts

from pipeline.cluster.preemption import StopRequest
from pipeline.config import composing
from pipeline.core.errors import StoreError
from pipeline.extraction.block_writer import commit_record
from pipeline.extraction.claiming import ClaimedStreams, UnfinishedStreams, complete_by_one
from pipeline.extraction.job_run import complete
from pipeline.job.metrics import Metrics
from pipeline.job.opening import Job, open_job, open_storage
from pipeline.store.format.arrays import open_existing, set_rows
from pipeline.store.format.commits import commit_key
from pipeline.store.format.layout import MAX_ROWS
from pipeline.store.format.metadata import require_root
from pipeline.store.write.claims import COMPLETION, Claims, _Claim, claim_key, held_claims
from pipeline.store.write.store_writer import StoreWriter
from tests.conftest import MEASURED

SETTINGS = ("batch.rows=1", "batch.length=32", "capture.layers=[0]", "run.claim=true", "data.id_column=null")


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


class Workers:
    """Threads that claim a job's streams as processes do, and commit blocks as soon as they are read, without a model.
    `computed`: for each worker, how often it computed each stream."""

    def __init__(self, job: Job, count: int, lease_s: float = 60.0) -> None:
        self._job = job
        self._lease_s = lease_s
        self._barrier = threading.Barrier(count)
        self.computed: list[Counter[int]] = [Counter() for _ in range(count)]

    def run(self) -> None:
        """Returns when all blocks are committed."""
        open_store(self._job)
        with ThreadPoolExecutor(len(self.computed)) as pool:
            for worker in [pool.submit(self._extract, counter) for counter in self.computed]:
                worker.result()

    def _are_done(self) -> bool:
        return sum(map(len, self.computed)) >= self._job.plan.streams.count

    def _extract(self, computed: Counter[int]) -> None:
        job = replace(self._job, storage=open_storage(self._job.config.store, 1))
        store = open_store(job)
        self._barrier.wait(300)
        with (
            closing(Metrics(total_tokens=None, stored_tokens=0, progress=False, interval_s=3600)) as metrics,
            closing(Claims(job.storage, self._lease_s)) as claims,
        ):
            claimed = ClaimedStreams(job, store, claims, metrics)
            for block in claimed.blocks(self._are_done):
                store.commit_written(commit_record(block))
                assert claimed.holds(block.stream), "lost"
                computed[block.stream] += 1
                claimed.finished(block.stream)


def num_requests() -> int:
    """The number of this process's requests to local files; a listing counts as one."""
    prefix = "/tensorstore/kvstore/file/"
    kinds = {f"{prefix}{kind}" for kind in ("read", "write", "list")}
    metrics = ts.experimental_collect_matching_metrics(prefix)
    return sum(metric["values"][0]["value"] for metric in metrics if metric["name"] in kinds)


def test_every_stream_is_computed_once_for_few_requests(text, tmp_path):
    job = make_job(text, str(tmp_path / "store"))
    workers = Workers(job, 2)
    before = num_requests()
    workers.run()
    requests, num_streams = num_requests() - before, job.plan.streams.count
    assert sum(workers.computed, Counter()) == dict.fromkeys(range(num_streams), 1)
    assert not held_claims(job.storage)
    # Per stream: claim, list the records, commit, mark and delete the claim, and perhaps renew it on a slow disk; a
    # write, a read and a listing if the other worker's claim came first. 60 to open and create the store.
    assert requests <= num_streams * (6 + 3) + 60


def finish_streams(streams: UnfinishedStreams, store: StoreWriter, count: int) -> list[int]:
    """Claims and computes as many streams, and returns them."""
    finished = []
    for _ in range(count):
        [block] = streams.claim_next(lambda: False).blocks(lambda: False)
        store.commit_written(commit_record(block))
        streams.release(block.stream)
        finished.append(block.stream)
    return finished


def test_streams_finished_by_others_take_no_requests(text, tmp_path):
    job = make_job(text, str(tmp_path / "store"))
    stores = [open_store(job) for _ in range(3)]
    with ExitStack() as stack:
        claims = [stack.enter_context(closing(Claims(job.storage, 60))) for _ in range(3)]
        first, second, third = map(UnfinishedStreams, [job] * 3, stores, claims)
        assert second.claim_next(lambda: True) is None, "it has only listed the streams"
        finish_streams(first, stores[0], 79)
        held = first.claim_next(lambda: False).stream.stream
        # The listing and the held claim. The second may first try a stream that was free when it listed them, and opens
        # the store, which was not there when it began.
        for late, requests in ((second, 2 + 8), (third, 2)):
            before = num_requests()
            assert late.claim_next(lambda: False) is None
            assert 2 <= num_requests() - before <= requests
        first.release(held)
        assert second.claim_next(lambda: False).stream.stream == held


def test_a_finished_stream_whose_records_were_deleted_is_computed_again(text, tmp_path):
    job = make_job(text, str(tmp_path / "store"))
    with closing(Claims(job.storage, 60)) as claims:
        store = open_store(job)
        [stream] = finish_streams(UnfinishedStreams(job, store, claims), store, 1)
        assert claims.list_streams("all").finished == {stream}
        job.storage.write(commit_key(stream, 0), None)
        store = open_store(job)
        others = UnfinishedStreams(job, store, claims)
        finish_streams(others, store, 79)
        assert not others
        with pytest.raises(
            StoreError, match=f"streams {stream} were complete but have since lost commit records"
        ) as caught:
            complete(job, store)
        assert caught.value.exit_code == 1
        assert claims.list_streams("all").finished == {*range(80)} - {stream}
        store = open_store(job)
        assert finish_streams(UnfinishedStreams(job, store, claims), store, 1) == [stream]
        complete(job, store)
        assert store.complete


def test_waiting_for_a_stream_counts_as_a_stall_only_while_a_block_is_in_progress(text, tmp_path):
    job = make_job(text, str(tmp_path / "store"), "run.lease_s=8")  # so a process looks again every second
    store, polls = open_store(job), iter(range(12))
    with (
        closing(Metrics(total_tokens=None, stored_tokens=0, progress=False, interval_s=3600)) as metrics,
        closing(Claims(job.storage, 600)) as others,
        closing(Claims(job.storage, 8)) as claims,
    ):
        assert all(others.claim(vacancy) for vacancy in others.vacancies(range(1, 80)))
        claimed = ClaimedStreams(job, store, claims, metrics)
        blocks = claimed.blocks(lambda: next(polls, None) is None)
        block = next(blocks)
        began = metrics.last_step = time.monotonic()
        assert next(blocks, None) is None, "it has looked for another stream until it was asked to stop"
        assert metrics.last_step == began
        store.commit_written(commit_record(block))
        claimed.finished(block.stream)
        polls = iter(range(3))
        assert next(claimed.blocks(lambda: next(polls, None) is None), None) is None
        assert metrics.last_step > began


@pytest.mark.slow
def test_64_workers_on_10_000_streams(tmp_path, record_property):
    """No lease is lost."""
    job = make_job(make_text(tmp_path / "text", 10_000), str(tmp_path / "store"))
    workers = Workers(job, 64)
    before, began = num_requests(), time.monotonic()
    workers.run()
    requests, seconds = num_requests() - before, time.monotonic() - began
    assert sum(workers.computed, Counter()) == dict.fromkeys(range(10_000), 1)
    assert requests <= 10_000 * 15
    record_property(MEASURED, f"64 workers, 10,000 streams: {requests} requests, {seconds:.0f} s")


def test_a_shorter_run_leaves_the_streams_of_an_extension_alone(text, tmp_path):
    job = make_job(text, str(tmp_path / "store"), "run.max_tokens=80")
    with closing(Claims(job.storage, 60)) as claims:
        store = open_store(job)
        finish_streams(UnfinishedStreams(job, store, claims), store, 80)
        late = open_store(job)
        late.reopen("all")
        job.storage.write(commit_key(3, 0), None)  # as a longer run does to compute the block again
        complete(job, store)
        assert claims.list_streams(80).finished == {*range(80)}
        assert not require_root(job.storage).complete


def test_only_one_of_many_workers_that_end_together_completes_the_store(text, tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.extraction.claiming._COMPLETION_POLL_S", 0.01)
    job = make_job(text, str(tmp_path / "store"))
    store = open_store(job)
    with closing(Claims(job.storage, 60)) as claims:
        finish_streams(UnfinishedStreams(job, store, claims), store, 80)
    workers, barrier, completed = 4, threading.Barrier(4), []

    def end() -> bool:
        late = open_store(job)
        barrier.wait(300)
        complete_by_one(job, late, StopRequest(), lambda: completed.append(late.finish()))
        return require_root(job.storage).complete

    with ThreadPoolExecutor(workers) as pool:
        assert all(worker.result() for worker in [pool.submit(end) for _ in range(workers)])
    assert completed == [True]
    assert job.storage.list_keys("_claims/") == []


def test_a_worker_that_dies_while_it_completes_the_store_is_replaced(text, tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.extraction.claiming._COMPLETION_POLL_S", 0.01)
    job = make_job(text, str(tmp_path / "store"), "run.lease_s=1")
    store = open_store(job)
    number = job.plan.streams.count
    with closing(Claims(job.storage, 60)) as claims:
        finish_streams(UnfinishedStreams(job, store, claims), store, 80)
    for has_written_the_root in (False, True):
        dead = _Claim("a dead worker", held=True, lease_s=0.2, number=int(has_written_the_root))
        job.storage.write(claim_key(COMPLETION), dead.to_json())
        set_rows(job.storage, ["tokens"], MAX_ROWS)
        complete_by_one(job, store, StopRequest(), lambda: complete(job, store))
        assert store.complete
        assert job.storage.list_keys("_claims/") == []
        assert open_existing(job.storage, ["tokens"])["tokens"].shape[0] == job.layout.first_row(number - 1, 0) + 1
