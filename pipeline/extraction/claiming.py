"""With `run.claim`: which stream a process works on next, and when it lets go of one."""

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
_CLAIMS_AT_ONCE = 64  # read before one of them is tried


class UnfinishedStreams:
    """The streams that hold less than this run wants, as far as this process knows, and its claims on them.

    Streams are claimed in a random order, so that workers that join at the same time rarely try the same one, and by
    the names in a listing: claims are read only when every stream that is left has one. Which streams others have
    finished is known from the marks in the listing; whether these are right is seen when the store is completed.
    """

    def __init__(self, job: Job, store: StoreWriter, claims: Claims) -> None:
        self._job = job
        self._store = store
        self._claims = claims
        self._random = random.Random(claims.owner)
        self._left = set(range(job.plan.streams.count))
        self._lock = threading.Lock()  # of `_left`: streams are released by another thread than claims them
        self._free: list[int] = []
        self._claimed: list[int] = []

    def __bool__(self) -> bool:
        return bool(self._left)

    def claim_next(self, should_stop: Callable[[], bool]) -> StreamWork | None:
        """Claims a stream and returns its work; None where others hold all that are left, or `should_stop` says so,
        which is asked every few requests. Raises StoreError.
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
        """Lets go of a claimed stream, of which no block is under way."""
        if not self._is_finished(stream):
            self._claims.release(stream)
            return
        with self._lock:
            self._left.discard(stream)
        self._claims.finish(stream, self._job.plan.streams.target)

    def _claim(self, vacancy: Vacancy) -> StreamWork | None:
        """The work in a stream that is now this process's; None where another was faster, or nothing is left in it."""
        stream = vacancy.stream
        if not self._claims.claim(vacancy):
            return None
        # Read once it is claimed: nobody else commits to it.
        work = self._job.stream_work(stream, self._store.streams.read_again(stream), self._store.target)
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
    """Raises StoreError where a stream that was taken for finished is not, because its records were deleted to have
    them computed again. Its marks are deleted, so that the next run computes it. A store that a longer run is extending
    is left alone.
    """
    own = job.plan.streams.target
    if larger(require_root(store.storage).target, own) != own:
        return
    streams = [stream for stream, blocks in store.streams.all().items() if not job.is_stream_done(stream, blocks.table)]
    lacking = [stream for stream in streams if not job.is_stream_done(stream, store.streams.read_again(stream).table)]
    for stream in lacking:
        delete_marks(store.storage, stream)
    if lacking:
        raise StoreError(
            f"{store.path}: streams {', '.join(map(str, lacking))} were complete but have since lost commit records. "
            "Run the same command again, which computes them."
        )


def complete_by_one(job: Job, store: StoreWriter, stop: StopRequest, complete: Callable[[], None]) -> None:
    """Calls `complete` on one of the workers that have come to the end of the streams. The others wait until it has
    ended; if it stops renewing its claim, one of them takes over.

    All processes of a worker call this, and all stop together; the first one claims. Raises Interrupted after a stop
    request, and StoreError.
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
    """Completing the store, by this worker or another."""

    def __init__(self, store: StoreWriter, claims: Claims, complete: Callable[[], None]) -> None:
        self._store = store
        self._claims = claims
        self._complete = complete
        self._has_waited = False

    def is_over(self) -> bool:
        """Whether the store is completed; calls `complete` where no other worker does."""
        for vacancy in self._claims.vacancies([COMPLETION]):
            if self._has_waited and vacancy.expired is None and require_root(self._store.storage).complete:
                log.info("%s is completed by another worker", self._store.path)
                return True
            if self._claims.claim(vacancy):
                self._complete()
                self._claims.withdraw(COMPLETION)
                return True
        self._has_waited = True
        return False


class ClaimedStreams:
    """The blocks of streams that this process claims, one stream after the other, each to its end.

    Where others hold all the streams that are left, it waits until one of them falls silent, or the store has all that
    is asked for. The writer says which blocks are `finished`. A stream is released when all of its blocks that were
    read are, so that nothing of it is under way when it is claimed again, by this process or another.
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
        """What the feed hands out. Ends when no stream is left, or `should_stop` says so."""
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
        """Whether a block of the stream may be committed."""
        return self._claims.holds(stream)

    def finished(self, stream: int) -> None:
        """A block of the stream is committed, or dropped."""
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
        """Until it is worth looking for a stream again: for a moment, or until one is released here."""
        deadline = time.monotonic() + self._claims.lease_s / _POLLS_PER_LEASE
        with self._metrics.stage(Stage.FEED_CLAIM), self._changed:
            while time.monotonic() < deadline and self._streams and not is_over():
                self._changed.wait(_STOP_POLL_S)
                self._report_progress()

    def _report_progress(self) -> None:
        """Tells the watchdog that this process has nothing to do but to look for a stream. It watches blocks that are
        under way, and with several processes the steps, which continue meanwhile."""
        with self._changed:
            is_idle = not any(self._under_way.values())
        if is_idle and self._job.plan.mesh.processes == 1:
            self._metrics.last_step = time.monotonic()
