"""Chooses the stream that a process works on next: its own streams first, then those that others left."""

import random
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from pipeline.store.format.block_table import StreamBlocks, read_streams
from pipeline.store.write.leases import Leases
from pipeline.store.write.store_writer import StoreWriter

_STREAMS_AT_ONCE = (16, 256)  # streams that are read before one of them is leased; more while none is vacant

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
