"""With `run.claim`: chooses the stream that a process computes next, and releases streams."""

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

from pipeline.cluster import processes
from pipeline.cluster.preemption import StopRequest
from pipeline.core.errors import Interrupted, StoreError
from pipeline.data.documents import TokenBlock
from pipeline.data.feed import StreamWork
from pipeline.job.metrics import Metrics, Stage
from pipeline.job.opening import Job
from pipeline.store.format.metadata import require_root
from pipeline.store.format.target import larger
from pipeline.store.write.claims import COMPLETION, Claims, Vacancy, delete_marks
from pipeline.store.write.store_writer import StoreWriter

log = logging.getLogger("pipeline")

_POLLS_PER_LEASE = 8
_STOP_POLL_S = 0.2
_COMPLETION_POLL_S = 1.0
_CLAIMS_AT_ONCE = 64  # claims that are read before the process tries to take one over


class UnfinishedStreams:
    """The streams that hold less than this run asks for, as far as this process knows, and its claims on them.

    Streams are claimed in random order, so that workers that join at the same time rarely try the same stream. A
    listing of object names shows which streams are free; claims are read only when every remaining stream has one.
    Marks in the listing show which streams others have finished. Completing the store checks that the marks are right.
    """

    def __init__(self, job: Job, store: StoreWriter, claims: Claims) -> None:
        self._job = job
        self._store = store
        self._claims = claims
        self._random = random.Random(claims.owner)
        self._left = set(range(job.plan.streams.count))
        self._lock = threading.Lock()  # guards `_left`: one thread claims streams, another releases them
        self._free: list[int] = []
        self._claimed: list[int] = []

    def __bool__(self) -> bool:
        return bool(self._left)

    def claim_next(self, should_stop: Callable[[], bool]) -> StreamWork | None:
        """Claims a stream and returns its work; None if others hold all remaining streams, or after `should_stop()`,
        which is called every few requests. Raises StoreError.
        """
        tried: set[int] = set()
        if not self._free:
            self._list()
        while self._free and not should_stop():
            stream = self._free.pop()
            if stream in tried:
                continue
            if work := self._claim(Vacancy(stream)):
                return work
            tried.add(stream)
            self._list()  # another process was faster: the listing is out of date
        for first in range(0, len(self._claimed), _CLAIMS_AT_ONCE):
            if should_stop():
                return None
            for vacancy in self._claims.vacancies(self._claimed[first : first + _CLAIMS_AT_ONCE]):
                if work := self._claim(vacancy):
                    return work
        return None

    def release(self, stream: int) -> None:
        """Releases a claimed stream that has no block in progress, and marks it if it is finished."""
        if not self._is_finished(stream):
            self._claims.release(stream)
            return
        with self._lock:
            self._left.discard(stream)
        self._claims.finish(stream, self._job.plan.streams.target)

    def _claim(self, vacancy: Vacancy) -> StreamWork | None:
        """Claims a stream and returns its work; None if another process claimed it first, or no work is left."""
        stream = vacancy.stream
        if not self._claims.claim(vacancy):
            return None
        # Read after claiming, when no other process commits to the stream.
        work = self._job.stream_work(stream, self._store.streams.read_again(stream))
        if work is None:
            self.release(stream)
        return work

    def _list(self) -> None:
        listed = self._claims.list_streams(self._job.plan.streams.target)
        with self._lock:
            self._left -= listed.finished
            free, claimed = sorted(self._left - listed.claimed), sorted(self._left & listed.claimed)
        self._free = self._random.sample(free, len(free))
        self._claimed = self._random.sample(claimed, len(claimed))

    def _is_finished(self, stream: int) -> bool:
        return self._job.is_stream_done(stream, self._store.streams[stream].table)


def require_finished_streams(job: Job, store: StoreWriter) -> None:
    """Raises StoreError if a stream that is marked as finished is not, because its records were deleted to have its
    blocks computed again. Deletes the marks of such streams, so that the next run computes them. Does nothing if a
    longer run is extending the store.
    """
    target = job.plan.streams.target
    if larger(require_root(store.storage).target, target) != target:
        return
    streams = [stream for stream, blocks in store.streams.all().items() if not job.is_stream_done(stream, blocks.table)]
    lacking = [stream for stream in streams if not job.is_stream_done(stream, store.streams.read_again(stream).table)]
    for stream in lacking:
        delete_marks(store.storage, stream)
    if lacking:
        raise StoreError(
            f"{store.path}: streams {', '.join(map(str, lacking))} were complete but have since lost commit records. "
            "Run the same command again to recompute them."
        )


def complete_by_one(job: Job, store: StoreWriter, stop: StopRequest, complete: Callable[[], None]) -> None:
    """Calls `complete` on one of the workers that have finished all streams. The others wait until it returns. If that
    worker stops renewing its claim, another one takes over.

    All processes of a worker call this and stop together; the first process holds the claim. Raises Interrupted after a
    stop request, and StoreError.
    """
    completion = None
    with ExitStack() as stack:
        if processes.is_first():
            claims = stack.enter_context(closing(Claims(store.storage, job.config.run.lease_s)))
            completion = _Completion(store, claims, complete)
        while not processes.any_process(completion is not None and completion.is_over()):
            time.sleep(_COMPLETION_POLL_S)
            if stop.before_step():
                raise Interrupted(
                    f"stopped by {stop.signal_name} while another worker completes {store.path}. Run the same command "
                    "again."
                )


class _Completion:
    """The completion of the store, by this worker or another one."""

    def __init__(self, store: StoreWriter, claims: Claims, complete: Callable[[], None]) -> None:
        self._store = store
        self._claims = claims
        self._complete = complete
        self._has_waited = False

    def is_over(self) -> bool:
        """Whether the store is complete. Calls `complete` if no other worker is doing so."""
        for vacancy in self._claims.vacancies([COMPLETION]):
            if self._has_waited and vacancy.expired is None and require_root(self._store.storage).complete:
                log.info("another worker has completed %s", self._store.path)
                return True
            if self._claims.claim(vacancy):
                self._complete()
                self._claims.withdraw(COMPLETION)
                return True
        self._has_waited = True
        return False


class ClaimedStreams:
    """The blocks of the streams that this process claims, one stream after the other, each to its end.

    If others hold all remaining streams, it waits until a lease expires or the store holds all that is asked for. The
    writer reports each block that is `finished`. A stream is released when all its blocks that were read are finished,
    so that no block is in progress when this process or another one claims the stream again.
    """

    def __init__(self, job: Job, store: StoreWriter, claims: Claims, metrics: Metrics) -> None:
        self._job = job
        self._claims = claims
        self._metrics = metrics
        self._streams = UnfinishedStreams(job, store, claims)
        self._reading: int | None = None
        self._under_way: Counter[int] = Counter()
        self._changed = threading.Condition()
        self._num_released = 0

    def blocks(self, should_stop: Callable[[], bool]) -> Iterator[TokenBlock]:
        """The blocks for the feed. Ends when no stream is left, or after `should_stop()`."""
        while self._streams and not should_stop():
            num_released = self._num_released
            work = self._claim_next(should_stop)
            if work is None:
                self._wait(lambda before=num_released: should_stop() or self._num_released != before)
                continue
            stream = self._reading = work.stream.stream
            for block in work.blocks(lambda stream=stream: should_stop() or not self.holds(stream)):
                with self._changed:
                    self._under_way[stream] += 1
                yield block
            with self._changed:
                self._reading = None
                is_over = not self._under_way[stream]
            if is_over:
                self._release(stream)

    def holds(self, stream: int) -> bool:
        """Whether this process still holds the stream, and may commit its blocks."""
        return self._claims.holds(stream)

    def finished(self, stream: int) -> None:
        """Reports that a block of the stream is committed or dropped."""
        with self._changed:
            self._under_way[stream] -= 1
            is_over = stream != self._reading and not self._under_way[stream]
        if is_over:
            self._release(stream)

    def _release(self, stream: int) -> None:
        self._streams.release(stream)
        with self._changed:
            self._num_released += 1
            self._changed.notify_all()

    def _claim_next(self, should_stop: Callable[[], bool]) -> StreamWork | None:
        def report_and_ask() -> bool:
            self._report_progress()
            return should_stop()

        with self._metrics.stage(Stage.FEED_CLAIM):
            return self._streams.claim_next(report_and_ask)

    def _wait(self, is_over: Callable[[], bool]) -> None:
        """Waits before the next search for a stream: a part of the lease, or until this process releases a stream."""
        deadline = time.monotonic() + self._claims.lease_s / _POLLS_PER_LEASE
        with self._metrics.stage(Stage.FEED_CLAIM), self._changed:
            while time.monotonic() < deadline and self._streams and not is_over():
                self._changed.wait(_STOP_POLL_S)
                self._report_progress()

    def _report_progress(self) -> None:
        """Resets the watchdog while this process only searches for a stream. The watchdog keeps watching blocks in
        progress and, with several processes, the steps, which continue meanwhile."""
        with self._changed:
            is_idle = not any(self._under_way.values())
        if is_idle and self._job.plan.mesh.processes == 1:
            self._metrics.last_step = time.monotonic()
