"""Runs several jobs on one store in a random interleaving.

Each job is a thread, and only one runs at a time. A job yields before each of its requests to storage (`POINTS`), so
others can run between its reads and writes, as other processes would.
"""

import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future
from contextlib import closing
from dataclasses import replace
from functools import cache
from types import FrameType

import ml_dtypes  # noqa: F401  numpy then knows "bfloat16"
import numpy as np

from pipeline.config import composing
from pipeline.config.schema import RunConfig
from pipeline.data.documents import TokenBlock
from pipeline.finalize import finalize
from pipeline.job import running
from pipeline.job.job import Job
from pipeline.job.leasing import UnfinishedStreams
from pipeline.job.opening import open_job
from pipeline.job.writing.block_writer import commit_record, side_arrays
from pipeline.store.format.statistics import token_statistics
from pipeline.store.io.storage import Storage
from pipeline.store.write.leases import Leases
from pipeline.store.write.store_writer import StoreWriter

# Where a job yields: before each request that reads, lists, puts, writes or deletes.
POINTS = frozenset(
    function.__code__
    for function in (
        Storage.read_many,
        Storage.read_with_generations,
        Storage.list_keys,
        Storage.put,
        Storage.write,
    )
)
_WAIT_S = 60.0


class Scheduler:
    """Runs jobs in turns. `errors`: exceptions of failed jobs, by name."""

    def __init__(self, rng: random.Random, jobs: Mapping[str, Callable[[], None]]) -> None:
        self._rng = rng
        self._turn = threading.Semaphore(0)
        self._turns = {name: threading.Semaphore(0) for name in jobs}
        self._running = dict(jobs)
        self._is_over = False
        self.errors: dict[str, BaseException] = {}

    def run(self) -> Iterator[str]:
        """After each turn, yields the name of its job; no job runs meanwhile. Closing the iterator ends the jobs."""
        threads = {name: threading.Thread(target=self._run, args=(name,), daemon=True) for name in self._running}
        for thread in threads.values():
            thread.start()
        try:
            yield from self._take_turns()
        finally:
            self._is_over = True
            for name, thread in threads.items():
                self._turns[name].release()
                thread.join()

    def _take_turns(self) -> Iterator[str]:
        current, left = "", 0
        while self._running:
            if current not in self._running or not left:
                # Turns of different lengths: another job may run whole, or only between two requests.
                current, left = self._rng.choice(sorted(self._running)), self._rng.choice((1, 1, 2, 5, 20, 60))
            left -= 1
            self._turns[current].release()
            if not self._turn.acquire(timeout=_WAIT_S):
                raise TimeoutError(f"{current} neither ended nor made a request")
            if not left or current not in self._running:
                yield current

    def _run(self, name: str) -> None:
        def give_way(frame: FrameType, event: str, _argument: object) -> None:
            if event == "call" and frame.f_code in POINTS and not self._is_over:
                self._turn.release()
                self._turns[name].acquire()
                if self._is_over:
                    raise _Over

        self._turns[name].acquire()
        try:
            if not self._is_over:
                sys.setprofile(give_way)
                self._running[name]()
        except BaseException as error:  # the test checks it
            self.errors[name] = error
        finally:
            sys.setprofile(None)
            del self._running[name]
            self._turn.release()


class _Here(Executor):
    """Runs calls at once, in the caller's thread, so that their requests are points where a job yields."""

    def submit(self, call: Callable, /, *args, **kwargs) -> Future:
        future: Future = Future()
        try:
            future.set_result(call(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class _Over(BaseException):
    """Ends a job that outlives the test."""


def run_job(path: str, *overrides: str, most_streams: int | None = None) -> None:
    """Does what `pipeline.run` does with the store at `path`, but makes activations of the tokens, without a model.

    most_streams: how many streams it fills, as if it were killed then.
    """
    config = _compose(overrides)
    job = open_job(replace(config, store=replace(config.store, path=path)))
    store = running.open_store(job)
    store._blocks = store.storage.put_threads = _Here()
    if running.has_work(job, store):
        _fill(job, store, most_streams)
    if most_streams is None:
        running.complete(job, store)


def finalize_store(path: str, is_forced: bool = False) -> str | None:
    """Does what `pipeline.finalize` does."""
    return finalize(StoreWriter.open_existing(path), is_forced)


@cache
def _compose(overrides: tuple[str, ...]) -> RunConfig:
    return composing.compose(list(overrides))


def _fill(job: Job, store: StoreWriter, most_streams: int | None) -> None:
    """Fills one stream after the other."""
    with closing(Leases(store.path, lease_s=600)) as leases:
        streams = UnfinishedStreams(store, leases, job.plan.streams.local, job.stream_work)
        num_filled = 0
        while streams and num_filled != most_streams:
            work = streams.take_next()
            if work is None:
                continue
            for block in work.blocks(lambda: False):
                _write(job, store, block)
            streams.release(work.stream.stream)
            num_filled += 1


def _write(job: Job, store: StoreWriter, block: TokenBlock) -> None:
    arrays = side_arrays(block, job.layout)
    stored, seeds = arrays["segments"] > 0, arrays["tokens"] * 31 + arrays["positions"] * 7
    if block.selected is not None:
        stored = arrays["selected"] >= 0
        seeds = np.take_along_axis(seeds, np.maximum(arrays["selected"], 0), axis=1)
    for spec in job.layout.arrays:
        values = (seeds[..., None] + np.arange(spec.width, dtype=np.int32)) % 251
        arrays[spec.name] = np.where(stored[..., None], values, 0).astype(spec.dtype)
    statistics = {spec.name: token_statistics(arrays[spec.name][stored]) for spec in job.layout.arrays}
    store.start_block(commit_record(block), arrays, block.table, lambda _: (statistics, {})).result()
