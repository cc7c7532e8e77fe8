"""Writes a store: creates, resumes, extends and finishes it. Blocks are written whole, then committed.

Several processes may have a writer for the same store. Any of them, or several, may write a block
(`block_protocol.py`), and call `finish` and `reopen`.
"""

import concurrent.futures
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.store.format.arrays import layout_of
from pipeline.store.format.commits import CommitRecord
from pipeline.store.format.keys import JOBS_PREFIX
from pipeline.store.format.layout import StoreLayout
from pipeline.store.format.metadata import (
    ROOT_KEY,
    Json,
    StoreMetadata,
    StoreRoot,
    change_root,
    require_root,
)
from pipeline.store.format.scaled import scale_name
from pipeline.store.format.statistics import BlockStatistics, encode_statistics, statistics_key
from pipeline.store.format.target import Target, larger, target_of
from pipeline.store.indexes.features import index_keys
from pipeline.store.io.storage import Storage, StorageLike
from pipeline.store.write.block_protocol import NewBlock, Put, PutAnswer, Recent, write_block
from pipeline.store.write.committed_streams import CommittedStreams
from pipeline.store.write.finishing import finish_store
from pipeline.store.write.leases import process_name
from pipeline.store.write.vacancy import require_vacant

_BLOCKS_AT_ONCE = 32

Summarise = Callable[[Collection[str]], tuple[BlockStatistics | None, Mapping[str, bytes]]]


class StoreWriter:
    """Writes one store. Not thread-safe, except for `streams.read_again`.

    storage: holds the store's objects. layout: the geometry of its arrays. root: the store's root as last read or
    written. streams: the committed blocks.
    """

    def __init__(self, storage: Storage, root: StoreRoot, is_new: bool = False) -> None:
        self.path = storage.path
        self.layout = layout_of(root)
        self.streams = CommittedStreams(storage, self.layout.num_streams)
        self.storage = storage
        self.root = root
        self._small = storage.with_own_requests(_BLOCKS_AT_ONCE)  # requests that do not queue behind shards
        self._blocks = ThreadPoolExecutor(_BLOCKS_AT_ONCE, "blocks")
        self._last: dict[int, Future[CommitRecord]] = {}  # by stream: the block that was started last
        self._committing = threading.Lock()  # for `streams`
        self._name = process_name()
        self._is_new = is_new  # not created yet

    @classmethod
    def open(cls, place: StorageLike, metadata: StoreMetadata, layout: StoreLayout) -> "StoreWriter":
        """As `plan`, but creates a new store at once."""
        return cls.plan(place, metadata, layout).create()

    @classmethod
    def plan(cls, place: StorageLike, metadata: StoreMetadata, layout: StoreLayout) -> "StoreWriter":
        """Opens the store at `place` (a local path, `gs://`, `s3://`, `memory://`, or a Storage), or plans a new one,
        which is created with its first block, or by `create`: a run that fails before leaves no store.

        Raises StoreMismatch if the store's fingerprint differs from that of `metadata`, StoreInvalid if the store is
        damaged or the path has other objects, and StoreError.
        """
        storage = Storage.open(place)
        is_new = storage.read(ROOT_KEY) is None and require_vacant(storage)
        root = new_root(metadata, layout) if is_new else require_root(storage)
        root.metadata.require_same(metadata, storage.path)
        return cls(storage, root, is_new)

    def create(self) -> "StoreWriter":
        """Creates the store unless it exists, with what was recorded so far. Raises as `plan`."""
        if self._is_new:
            planned = self.root
            self.storage.put(ROOT_KEY, planned.to_json())
            require_root(self.storage).metadata.require_same(planned.metadata, self.path)  # perhaps of another process
            self._is_new = False  # not before: after an error, the next call tries again
            recorded = {name: getattr(planned, name) for name in ("may_be_not_finite", "weights_error", "cache_error")}
            self.reopen(planned.target)
            self.record(**{name: value for name, value in recorded.items() if value})
        return self

    @classmethod
    def open_existing(cls, place: StorageLike) -> "StoreWriter":
        """Opens an existing store. Raises StoreInvalid if it is missing or damaged, and StoreError."""
        storage = Storage.open(place)
        return cls(storage, require_root(storage))

    @property
    def metadata(self) -> StoreMetadata:
        return self.root.metadata

    @property
    def complete(self) -> bool:
        return self.root.complete

    @property
    def target(self) -> Target:
        """How many tokens the store shall hold, according to the root as last read."""
        return self.root.target

    def record(self, **facts: Json | bool) -> None:
        """Records `weights_error`, `cache_error` or `may_be_not_finite` in the root. See `StoreRoot`."""
        self._change_root(lambda root: replace(root, **facts))

    def reopen(self, target: Target | None = None) -> None:
        """Opens a store, complete or not, for more blocks. No process completes it before it holds `target` tokens."""
        self._change_root(lambda root: replace(root, complete=False, target=larger(root.target, target or root.target)))

    def _change_root(self, change: Callable[[StoreRoot], StoreRoot]) -> None:
        self.root = change(self.root) if self._is_new else change_root(self.storage, change)

    def start_block(
        self,
        record: CommitRecord,
        arrays: Mapping[str, np.ndarray],
        table: pa.Table,
        summarise: Summarise = lambda _: (None, {}),
    ) -> Future[CommitRecord]:
        """Starts writing a block; does not wait. Start the blocks of a stream in order. The future returns the record
        as it is stored; it raises StoreError, also if an earlier block of the stream failed.

        arrays: every array of the layout by name, with its full block shape, padded with fill values. They are not
        copied: do not change them until the future is done. If the store has other values of a float array, which
        another run has written, these are copied into `arrays`.
        summarise: called in another thread when all arrays are stored, with the names of such arrays. Returns the
        block's statistics (None if the store has none) and its indexes by feature, by key.

        Raises StoreError, and ValueError for a complete store. The future also does so for arrays of other dtypes or
        shapes.
        """
        self.create()
        if self.complete:
            raise ValueError(f"the store {self.path} is complete: reopen() it first")
        stream, number = record.stream, record.block
        before = self._last.get(stream)
        before = None if before is None or before.done() else before

        def derive(adopted: Collection[str]) -> tuple[Mapping[str, bytes], Recent]:
            statistics, indexes = summarise(adopted)
            if set(indexes) != (needed := set(index_keys(self.metadata, stream, number))):
                raise ValueError(f"a block needs the indexes {needed}, got {set(indexes)}")
            if before is not None:
                before.result()
            files, recent = self._encode_statistics(record, statistics)
            return {**files, **indexes}, recent

        block = NewBlock(replace(record, written_by=self._name), arrays, table, derive)
        self._last[stream] = started = self._blocks.submit(self._write, block)
        return started

    def _write(self, block: NewBlock) -> CommitRecord:
        record = write_block(self.layout, block, _Objects(self.storage, self._small))
        with self._committing:
            if record.block == len(self.streams[record.stream].table):
                self.streams.append(record)
        return record

    def _encode_statistics(
        self, record: CommitRecord, statistics: BlockStatistics | None
    ) -> tuple[Mapping[str, bytes], Recent]:
        """The file of a block's statistics, by key; none without statistics. And the record's `recent`."""
        stream, number = record.stream, record.block
        with self._committing:
            table = self.streams[stream].table
            if number > len(table):
                raise ValueError(f"stream {stream} has {len(table)} blocks; {number} is not the next")
            recent = table.recent(number)
            if statistics is None:
                return {}, recent
            running = self.streams.add_statistics(stream, number, statistics)
        return {statistics_key(stream, number): encode_statistics(running)}, recent

    def finish(self, force: bool = False) -> bool:
        """Marks the store complete unless it holds less than its target. Returns whether it is complete.

        Call it only when no process has a block left to commit. Reads all streams again, since other processes wrote
        some. See `finish_store`. Raises StoreError.
        """
        self.create()
        root = finish_store(self.storage, self.layout, self.streams.read_all_again, force)
        self.root = self.root if root is None else root
        return root is not None


@dataclass(frozen=True)
class _Objects:
    """The requests of `write_block`, on a store's storage. small: the same, for requests that wait for no shard."""

    storage: Storage
    small: Storage

    def put(self, puts: Sequence[Put]) -> list[PutAnswer]:
        """When it returns or raises, all puts have ended."""
        if len(puts) == 1:
            return [self._put(self.small, puts[0])]
        answers = [self.storage.put_threads.submit(self._put, self.storage, put) for put in puts]
        concurrent.futures.wait(answers)
        return [answer.result() for answer in answers]

    @staticmethod
    def _put(storage: Storage, put: Put) -> PutAnswer:
        parts, checksums = put.encode()
        return PutAnswer(storage.put(put.key, *parts), checksums)

    def read(self, key: str, check: Callable[[str, bytes | None], Any]) -> Any:
        return next(self.small.read_checked([key], check))


def metrics_key(name: str) -> str:
    """The key of a run's log in the store."""
    return f"{JOBS_PREFIX}{name}"


def new_root(metadata: StoreMetadata, layout: StoreLayout) -> StoreRoot:
    """The root of a new store. Raises ValueError if the layout that follows from it is another one."""
    groups = {spec.name: spec.width for spec in layout.scales}
    arrays = {
        spec.name: {
            "width": spec.width,
            "hook_name": str(spec.attributes["hook_name"]),
            "scale_groups": groups.get(scale_name(spec.name)),
        }
        for spec in layout.arrays
    }
    created = datetime.now(UTC).isoformat(timespec="microseconds")
    root = StoreRoot(metadata, arrays, created, target_of(metadata.config), selected=layout.selected)
    if layout_of(root) != layout:
        raise ValueError(f"metadata and layout disagree: {layout_of(root)} and {layout}")
    return root
