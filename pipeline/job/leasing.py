"""The streams that a process leases: its own first, then those that others left, each to its end."""

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

from pipeline.data.documents import TokenBlock
from pipeline.data.feed import StreamWork
from pipeline.job.job import Job
from pipeline.job.metrics import Metrics, Stage
from pipeline.store.format.block_table import StreamBlocks, read_streams
from pipeline.store.write.leases import Leases
from pipeline.store.write.store_writer import StoreWriter

log = logging.getLogger("pipeline")

_STREAMS_AT_ONCE = (16, 256)  # streams that are read before one of them is leased; more while none is vacant
_FIRST_POLL_S = 0.25  # doubles up to a part of the lease
_POLLS_PER_LEASE = 8
_STOP_POLL_S = 0.2

W = TypeVar("W")


class UnfinishedStreams(Generic[W]):
    """The streams that have work left, as far as this process knows, and its leases on them.

    own: this process's streams, which it takes first, in order. It takes other streams in random order, and all of them
    once another process was faster, so that processes rarely try the same one. find_work: the work that is left in a
    stream with these committed blocks; None if there is none.
    """

    def __init__(
        self,
        store: StoreWriter,
        leases: Leases,
        own: Sequence[int],
        find_work: Callable[[int, StreamBlocks], W | None],
    ) -> None:
        self._store = store
        self._leases = leases
        self._own = own
        self._others = sorted(set(range(store.layout.num_streams)) - set(own))
        self._find_work = find_work
        self._finished: set[int] = set()  # one thread takes streams, another may release them
        self._unread: list[int] = []  # of this pass over all streams, the next one last
        self._vacant: list[int] = []  # streams with work that nobody held, the next one last

    def __bool__(self) -> bool:
        return len(self._finished) < self._store.layout.num_streams

    def take_next(self, should_stop: Callable[[], bool] = lambda: False) -> W | None:
        """Leases a stream and returns its work; None if others hold all streams with work, or after `should_stop()`,
        which is called every few requests. Raises StoreInvalid for damaged records, and StoreError."""
        if not self._unread:
            streams = (*random.sample(self._others, len(self._others)), *reversed(self._own))
            self._unread = [stream for stream in streams if stream not in self._finished]
        count, most = _STREAMS_AT_ONCE
        while not should_stop():
            if self._vacant:
                if (work := self._take(self._vacant.pop())) is not None:
                    return work
            elif self._unread:
                self._read([self._unread.pop() for _ in range(min(count, len(self._unread)))])
                count = min(2 * count, most)
            else:
                return None
        return None

    def release(self, stream: int) -> None:
        """Releases a leased stream that has no block in progress."""
        if self._find_work(stream, self._store.streams[stream]) is None:
            self._finished.add(stream)
        self._leases.release(stream)

    def _read(self, streams: Sequence[int]) -> None:
        unfinished = []
        for stream, blocks in read_streams(self._store.storage, streams).items():
            if self._find_work(stream, blocks) is None:
                self._finished.add(stream)
            else:
                unfinished.append(stream)
        self._vacant = self._leases.vacant(unfinished)[::-1]

    def _take(self, stream: int) -> W | None:
        if not self._leases.take(stream):
            self._unread += self._vacant
            self._vacant = []
            random.shuffle(self._unread)
            return None
        # Read after leasing, when no other process commits to the stream.
        work = self._find_work(stream, self._store.streams.read_again(stream))
        if work is None:
            self.release(stream)
        return work


class LeasedStreams:
    """The blocks of the streams that this process leases, one stream after the other, each to its end.

    If others hold all remaining streams, it waits until they release them, their leases expire, or the store holds all
    that is asked for. The writer reports each block that is `finished`. A stream is released when it is read and all
    its blocks are finished, so that no block is in progress when this process or another one leases the stream again.
    """

    def __init__(self, job: Job, store: StoreWriter, leases: Leases, metrics: Metrics) -> None:
        self._job = job
        self._leases = leases
        self._metrics = metrics
        self._streams = UnfinishedStreams(store, leases, job.plan.streams.local, job.stream_work)
        self._in_use: Counter[int] = Counter()  # by stream: blocks in progress, and one while it is read
        self._lock = threading.Lock()
        self._has_released = threading.Event()

    def blocks(self, should_stop: Callable[[], bool]) -> Iterator[TokenBlock]:
        """The blocks for the feed. Ends when no stream has work left, or after `should_stop()`."""
        poll_s, longest_s, has_said = _FIRST_POLL_S, self._leases.lease_s / _POLLS_PER_LEASE, False
        while not should_stop():
            self._has_released.clear()
            work = self._take_next(should_stop)
            if work is not None:
                poll_s, has_said = _FIRST_POLL_S, False
                yield from self._read(work, should_stop)
            elif self._streams:
                if not has_said and 2 * poll_s >= longest_s and self._is_idle():
                    has_said = True
                    log.info(
                        "other processes hold all streams that have work left: waiting until they release them, or "
                        "have been silent for %g s (run.lease_s)",
                        self._leases.lease_s,
                    )
                self._wait(poll_s, should_stop)
                poll_s = min(2 * poll_s, longest_s)
            else:
                return

    def holds(self, stream: int) -> bool:
        """Whether this process still holds the stream, so that it should commit its blocks."""
        return self._leases.holds(stream)

    def finished(self, stream: int) -> None:
        """Reports that a block of the stream is committed or dropped."""
        with self._lock:
            self._in_use[stream] -= 1
            is_over = not self._in_use[stream]
        if is_over:
            self._streams.release(stream)
            self._has_released.set()

    def _read(self, work: StreamWork, should_stop: Callable[[], bool]) -> Iterator[TokenBlock]:
        stream = work.stream.stream
        self._in_use[stream] = 1
        for block in work.blocks(lambda: should_stop() or not self.holds(stream)):
            with self._lock:
                self._in_use[stream] += 1
            yield block
        self.finished(stream)

    def _take_next(self, should_stop: Callable[[], bool]) -> StreamWork | None:
        def report_and_ask() -> bool:
            self._report_progress()
            return should_stop()

        with self._metrics.stage(Stage.FEED_LEASE):
            return self._streams.take_next(report_and_ask)

    def _wait(self, seconds: float, should_stop: Callable[[], bool]) -> None:
        """Waits until this process has released a stream, or for `seconds`."""
        deadline = time.monotonic() + seconds
        with self._metrics.stage(Stage.FEED_LEASE if self._is_idle() else Stage.FEED_FINISH):
            while time.monotonic() < deadline and not should_stop() and not self._has_released.wait(_STOP_POLL_S):
                self._report_progress()

    def _is_idle(self) -> bool:
        """Whether no block of this process is in progress."""
        with self._lock:
            return not any(self._in_use.values())

    def _report_progress(self) -> None:
        """Resets the watchdog while this process only searches for a stream. The watchdog keeps watching blocks in
        progress and, with several processes, the steps, which continue meanwhile."""
        if self._is_idle() and self._job.plan.mesh.processes == 1:
            self._metrics.last_step = time.monotonic()
