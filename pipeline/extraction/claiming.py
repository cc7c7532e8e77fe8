"""With `run.claim`: which stream a process works on next, and when it lets go of one."""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

from pipeline.data.documents import TokenBlock
from pipeline.data.feed import StreamWork
from pipeline.job.metrics import Metrics, Stage
from pipeline.job.opening import Job
from pipeline.store.write.claims import Claims
from pipeline.store.write.store_writer import StoreWriter

_POLLS_PER_LEASE = 8
_STOP_POLL_S = 0.2


class ClaimedStreams:
    """The blocks of streams that this process claims, one stream after the other, each to its end.

    Where others hold all the streams that are left, it waits until one of them falls silent, or the store has all that
    is asked for. The writer says which blocks are `finished`. A stream is released when all of its blocks that were
    read are, so that nothing of it is under way when it is claimed again, by this process or another.
    """

    def __init__(self, job: Job, store: StoreWriter, claims: Claims, metrics: Metrics) -> None:
        self._job = job
        self._store = store
        self._claims = claims
        self._metrics = metrics
        first = random.Random(claims.owner).randrange(job.plan.streams.count)  # so that workers do not all try the same
        self._left = [*range(first, job.plan.streams.count), *range(first)]
        self._reading: int | None = None
        self._under_way: Counter[int] = Counter()
        self._changed = threading.Condition()
        self._num_released = 0

    def blocks(self, should_stop: Callable[[], bool]) -> Iterator[TokenBlock]:
        """What the feed hands out. Ends when no stream is left, or `should_stop` says so."""
        while self._left and not should_stop():
            num_released = self._num_released
            work = self._claim_next()
            if work is None:
                self._wait(lambda before=num_released: should_stop() or not self._left or self._num_released != before)
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
        self._claims.release(stream)
        with self._changed:
            self._num_released += 1
            self._changed.notify_all()

    def _claim_next(self) -> StreamWork | None:
        for vacancy in self._claims.vacancies(self._left):
            stream = vacancy.stream
            work = self._job.stream_work(stream, self._store.streams.read_again(stream), self._store.target)
            if work is None:
                self._left.remove(stream)
            elif self._claims.claim(vacancy):  # so nobody has committed to it since it was found vacant
                return work
        return None

    def _wait(self, is_over: Callable[[], bool]) -> None:
        """Until it is worth looking for a stream again: for a moment, or until one is released here."""
        deadline = time.monotonic() + self._claims.lease_s / _POLLS_PER_LEASE
        with self._metrics.stage(Stage.FEED_CLAIM), self._changed:
            while time.monotonic() < deadline and not is_over():
                self._changed.wait(_STOP_POLL_S)
                if self._job.plan.mesh.processes == 1:  # several go on stepping, and their watchdogs watch the steps
                    self._metrics.last_step = time.monotonic()
