"""The committed blocks of a store's streams, read on demand by its writer."""

from collections.abc import Sequence

from pipeline.store.format.block_table import BlockTable, StreamBlocks, read_stream, read_streams
from pipeline.store.format.commits import CommitRecord, read_commit_records
from pipeline.store.format.statistics import BlockStatistics, merge_arrays, read_stream_statistics
from pipeline.store.io.storage import Storage

RUNNING_KEPT = 32  # streams whose running statistics stay in memory; others are read again


class CommittedStreams:
    """The committed blocks of each stream: those stored when the stream was read, and those committed here since then.

    Methods raise StoreInvalid for a damaged record or a gap between records, and StoreError.
    """

    def __init__(self, storage: Storage, num_streams: int) -> None:
        self._storage = storage
        self._all = range(num_streams)
        self._read: dict[int, StreamBlocks] = {}
        self._running: dict[tuple[int, int], BlockStatistics] = {}  # (stream, block): of blocks 0..block

    def __getitem__(self, stream: int) -> StreamBlocks:
        return self._read[stream] if stream in self._read else self.read_again(stream)

    def some(self, streams: Sequence[int]) -> dict[int, StreamBlocks]:
        """Several streams; those not read yet are read in parallel."""
        self._read |= read_streams(self._storage, [stream for stream in streams if stream not in self._read])
        return {stream: self._read[stream] for stream in streams}

    def all(self) -> dict[int, StreamBlocks]:
        """All streams, in order."""
        return self.some(self._all)

    def read_again(self, stream: int) -> StreamBlocks:
        """A stream as it is stored now. Any thread may call this unless a block of the stream is being written."""
        self._read[stream] = read_stream(self._storage, stream)
        return self._read[stream]

    def read_all_again(self) -> dict[int, StreamBlocks]:
        """All streams as they are stored now."""
        self._read = {}
        return self.all()

    def append(self, record: CommitRecord) -> None:
        """Adds the next committed block of a stream."""
        tables = [self[record.stream].table, BlockTable.from_records([record])]
        self._read[record.stream] = StreamBlocks(BlockTable.join(tables), record)

    def add_statistics(self, stream: int, block: int, statistics: BlockStatistics) -> BlockStatistics:
        """Merges a block's statistics into those of the blocks before it. Returns those of blocks 0..block."""
        running = statistics
        if block:
            before = self._running.pop((stream, block - 1), None) or self._running_through(stream, block - 1)
            running = merge_arrays(before, statistics)
        self._running[stream, block] = running
        while len(self._running) > RUNNING_KEPT:
            del self._running[next(iter(self._running))]
        return running

    def _running_through(self, stream: int, block: int) -> BlockStatistics:
        record = self[stream].last
        if record is None or record.block != block:
            [record] = read_commit_records(self._storage, [(stream, block)])
        return read_stream_statistics(self._storage, record)
