"""The blocks of the streams that a process leases, for the feed."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

from pipeline.data.documents import TokenBlock
from pipeline.data.feed import StreamWork
from pipeline.job.metrics import Metrics, Stage
from pipeline.job.opening import Job
from pipeline.job.unfinished_streams import UnfinishedStreams
from pipeline.store.write.leases import Leases
from pipeline.store.write.store_writer import StoreWriter

_FIRST_POLL_S = 0.25  # doubles up to a part of the lease
_POLLS_PER_LEASE = 8
_STOP_POLL_S = 0.2


class LeasedStreams:
    """The blocks of the streams that this process leases, one stream after the other, each to its end.

    If others hold all remaining streams, it waits until they release them, their leases expire, or the store holds all
    that is asked for. The writer reports each block that is `finished`. A stream is released when all its blocks that
    were read are finished, so that no block is in progress when this process or another one leases the stream again.
    """

    def __init__(self, job: Job, store: StoreWriter, leases: Leases, metrics: Metrics) -> None:
        self._job = job
        self._leases = leases
        self._metrics = metrics
        self._streams = UnfinishedStreams(store, leases, job.plan.streams.local, job.stream_work)
        self._reading: int | None = None
        self._under_way: Counter[int] = Counter()
        self._changed = threading.Condition()
        self._num_released = 0

    def blocks(self, should_stop: Callable[[], bool]) -> Iterator[TokenBlock]:
        """The blocks for the feed. Ends when no stream has work left, or after `should_stop()`."""
        poll_s = _FIRST_POLL_S
        while not should_stop():
            num_released = self._num_released
            work = self._take_next(should_stop)
            if work is not None:
                poll_s = _FIRST_POLL_S
                yield from self._read(work, should_stop)
            elif self._streams:
                self._wait(poll_s, lambda before=num_released: should_stop() or self._num_released != before)
                poll_s = min(2 * poll_s, self._leases.lease_s / _POLLS_PER_LEASE)
            else:
                return

    def holds(self, stream: int) -> bool:
        """Whether this process still holds the stream, so that it should commit its blocks."""
        return self._leases.holds(stream)

    def finished(self, stream: int) -> None:
        """Reports that a block of the stream is committed or dropped."""
        with self._changed:
            self._under_way[stream] -= 1
            is_over = stream != self._reading and not self._under_way[stream]
        if is_over:
            self._release(stream)

    def _read(self, work: StreamWork, should_stop: Callable[[], bool]) -> Iterator[TokenBlock]:
        stream = self._reading = work.stream.stream
        for block in work.blocks(lambda: should_stop() or not self.holds(stream)):
            with self._changed:
                self._under_way[stream] += 1
            yield block
        with self._changed:
            self._reading = None
            is_over = not self._under_way[stream]
        if is_over:
            self._release(stream)

    def _release(self, stream: int) -> None:
        self._streams.release(stream)
        with self._changed:
            self._num_released += 1
            self._changed.notify_all()

    def _take_next(self, should_stop: Callable[[], bool]) -> StreamWork | None:
        def report_and_ask() -> bool:
            self._report_progress()
            return should_stop()

        with self._metrics.stage(Stage.FEED_LEASE):
            return self._streams.take_next(report_and_ask)

    def _wait(self, seconds: float, is_over: Callable[[], bool]) -> None:
        deadline = time.monotonic() + seconds
        with self._metrics.stage(Stage.FEED_LEASE), self._changed:
            while time.monotonic() < deadline and not is_over():
                self._changed.wait(_STOP_POLL_S)
                self._report_progress()

    def _report_progress(self) -> None:
        """Resets the watchdog while this process only searches for a stream. The watchdog keeps watching blocks in
        progress and, with several processes, the steps, which continue meanwhile."""
        with self._changed:
            is_idle = not any(self._under_way.values())
        if is_idle and self._job.plan.mesh.processes == 1:
            self._metrics.last_step = time.monotonic()
