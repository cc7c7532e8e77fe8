"""Writes a store: creates, resumes, extends and finishes it. Blocks are written whole, then committed.

Several processes may have a writer for the same store, each for its own streams. Any of them, or several, may call
`finish` and `reopen`. If two processes write the same block nevertheless, the first commit record stays.
"""

import concurrent.futures
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import tensorstore as ts

from pipeline.core.errors import StoreError, StoreInvalid
from pipeline.store.features.index_file import index_keys
from pipeline.store.format.arrays import (
    open_existing,
    open_or_create,
    read_array_digests,
    require_layout,
    set_rows,
)
from pipeline.store.format.commits import CommitRecord, commit_key, parse_record
from pipeline.store.format.layout import MAX_ROWS, ArraySpec, StoreLayout, is_plain_files
from pipeline.store.format.metadata import (
    ROOT_KEY,
    Json,
    StoreMetadata,
    StoreRoot,
    change_root,
    read_existing_root,
    require_root,
)
from pipeline.store.format.statistics import (
    BlockStatistics,
    encode_statistics,
    statistics_key,
)
from pipeline.store.format.tables import encode_table, table_digest, table_key
from pipeline.store.format.target import Target, larger, target_of
from pipeline.store.io.digests import values_digest
from pipeline.store.io.failures import storage_errors
from pipeline.store.io.shard_files import ShardFiles
from pipeline.store.io.storage import Storage, StorageLike
from pipeline.store.write.claims import TEST_PREFIX, process_name
from pipeline.store.write.committed_streams import CommittedStreams
from pipeline.store.write.finishing import finish_store
from pipeline.store.write.vacancy import require_vacant

Written = ts.Future | ts.WriteFutures | Future[str]


@dataclass(frozen=True)
class PendingBlock:
    """A block whose objects are being written: its arrays and, after `write_tables`, its tables."""

    stream: int
    block: int
    is_committed: bool  # another run has committed it: nothing is written
    futures: Mapping[str, Written]  # by URL of the object
    digests: Mapping[str, Future[str]]  # by array; empty if `is_committed`
    tokens_again: int = 0  # tokens of the truncated block that this one replaces
    table_sha256: str = ""
    statistics_sha256: str = ""

    @property
    def has_tables(self) -> bool:
        """Whether `write_tables` was called, so that the block can be committed."""
        return bool(self.table_sha256)

    @property
    def done(self) -> bool:
        """Whether every object is durable or has failed, so that `commit` will not wait."""
        return all(future.done() for future in (*self.futures.values(), *self.digests.values()))

    def wait(self) -> None:
        """Waits until every object is durable or has failed. The block's arrays may be overwritten afterwards.

        Raises StoreError, naming the object, for the first object that failed.
        """
        failed = None
        for url, future in self.futures.items():
            try:
                with storage_errors(url):
                    future.result()
            except StoreError as error:
                failed = failed or error
        concurrent.futures.wait(self.digests.values())
        if failed is not None:
            raise failed


class StoreWriter:
    """Writes one store. Not thread-safe, except for `streams.read_again`.

    storage: holds the store's objects. layout: the geometry of its arrays. arrays: the open TensorStore arrays by name.
    root: the store's root as last read or written. streams: the committed blocks.
    """

    def __init__(
        self, storage: Storage, layout: StoreLayout, root: StoreRoot, arrays: dict[str, ts.TensorStore]
    ) -> None:
        self.path = storage.path
        self.layout = layout
        self.streams = CommittedStreams(storage, layout.num_streams)
        self.storage = storage
        self._records_storage = storage.with_own_requests(1)  # so that reading a record does not queue behind shards
        self._files: ShardFiles | None = None
        if is_plain_files(storage.path, layout.compression):
            self._files = ShardFiles(Path(storage.directory), storage.file_threads)
        # `memory://` would keep references to the arrays, which the caller reuses. It would also release them while it
        # holds its lock and waits for the GIL: a deadlock.
        self._may_reference = not storage.path.startswith("memory://")
        self.root = root
        self.arrays = arrays
        self._exists = True

    @classmethod
    def open_or_plan(cls, storage: Storage, metadata: StoreMetadata, layout: StoreLayout) -> "StoreWriter":
        """As `open`, but a new store is created with its first block, or by `create`, so that a run that fails before
        leaves no store. Writes and deletes an object, to notice now if the storage cannot be written."""
        if storage.read(ROOT_KEY) is not None or not require_vacant(storage):
            return cls.open(storage, metadata, layout)
        key = f"{TEST_PREFIX}{process_name()}"
        for content in (b"{}", None):
            storage.write(key, content)
        planned = cls(storage, layout, new_root(metadata, layout), {})
        planned._exists = False
        return planned

    def create(self) -> None:
        """Creates the store unless it exists, with what was recorded so far. Raises as `open`."""
        if self._exists:
            return
        planned, opened = self.root, StoreWriter.open(self.storage, self.metadata, self.layout)
        self.root, self.arrays, self._exists = opened.root, opened.arrays, True
        self.reopen(planned.target)
        recorded = {name: getattr(planned, name) for name in ("may_be_not_finite", "weights_error", "cache_error")}
        self.record(**{name: value for name, value in recorded.items() if value})

    @classmethod
    def open(cls, place: StorageLike, metadata: StoreMetadata, layout: StoreLayout) -> "StoreWriter":
        """Opens the store at `place` (a local path, `gs://`, `s3://`, `memory://`, or a Storage), or creates it.

        Completes an interrupted creation. Raises StoreMismatch if the store's fingerprint differs from that of
        `metadata`, StoreInvalid if the store is damaged or its records have gaps, and StoreError if it cannot be read
        or written.
        """
        if (metadata.num_streams, metadata.rows_per_block) != (layout.num_streams, layout.rows_per_block):
            raise ValueError(f"metadata and layout disagree: {metadata} {layout}")
        storage = Storage.open(place)
        root = create_root(storage, metadata, layout) or read_existing_root(storage)[0]
        root.metadata.require_same(metadata, storage.path)
        arrays = open_or_create(storage, layout)
        digests = read_array_digests(storage, root.array_names)
        root = change_root(storage, lambda root: replace(root, array_digests=digests))
        return cls(storage, layout, root, arrays)

    @classmethod
    def open_existing(cls, place: StorageLike) -> "StoreWriter":
        """Opens an existing store. Raises StoreInvalid if it is missing or damaged, and StoreError."""
        storage = Storage.open(place)
        root = require_root(storage)
        arrays = open_existing(storage, root.array_names)
        return cls(storage, require_layout(root, arrays, storage.path), root, arrays)

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

        def recorded(root: StoreRoot) -> StoreRoot:
            return replace(root, **facts)

        self.root = change_root(self.storage, recorded) if self._exists else recorded(self.root)

    def begin_block(self, stream: int, block: int, arrays: Mapping[str, np.ndarray]) -> PendingBlock:
        """Starts writing a block's arrays; does not wait. Call `write_tables` next.

        `arrays` contains every array of the layout by name, with its full shard shape, padded with zeros (documents and
        selected: -1). The arrays are not copied: do not change them until `commit` or `PendingBlock.wait` returns. If
        the block is committed but truncated, its record is deleted, because its objects are about to be replaced. If
        another run has committed the block meanwhile, nothing is written.

        Raises StoreInvalid for a block beyond the last row that a store can have, StoreError, and ValueError for arrays
        that do not match the layout, a complete store, or a committed block that is not truncated.
        """
        self.create()
        if self.complete:
            raise ValueError(f"the store {self.path} is complete: reopen() it first")
        if self.layout.first_row(stream, block) + self.layout.rows_per_block > MAX_ROWS:
            raise StoreInvalid(f"block {block} of stream {stream} is beyond row {MAX_ROWS}, the limit of a store.")
        self._check_arrays(arrays)
        tokens_again = self._withdraw(stream, block)
        is_committed = self._records_storage.read(commit_key(stream, block)) is not None
        futures: dict[str, Written] = {}
        digests: dict[str, Future[str]] = {}
        for spec in () if is_committed else self.layout.all_arrays:
            key = self.layout.shard_key(spec, stream, block)
            written, digests[spec.name] = self._write_shard(spec, key, stream, block, arrays[spec.name])
            futures[self.storage.url(key)] = written
        return PendingBlock(stream, block, is_committed, futures, digests, tokens_again)

    def write_tables(
        self,
        pending: PendingBlock,
        table: pa.Table,
        statistics: BlockStatistics | None = None,
        indexes: Mapping[str, bytes] | None = None,
    ) -> PendingBlock:
        """Starts writing a block's document table, its statistics (if any) and its feature indexes, which are given by
        key (empty if the store has none). Does not wait. Call it for the blocks of a stream in order.

        Raises StoreError. The arrays are then still being written: call `pending.wait()` before you reuse them.
        """
        stream, block, indexes = pending.stream, pending.block, indexes or {}
        if set(indexes) != (needed := set(index_keys(self.metadata, stream, block))):
            raise ValueError(f"a block needs the indexes {needed}, got {set(indexes)}")
        tables = {table_key(stream, block): encode_table(table)}
        if statistics is not None:
            running = self.streams.add_statistics(stream, block, statistics)
            tables[statistics_key(stream, block)] = encode_statistics(statistics, block, running if block else None)
        table_sha256, statistics_sha256, *_ = (*map(table_digest, tables.values()), "")
        contents = {} if pending.is_committed else tables | indexes
        futures = {self.storage.url(key): self.storage.start_write(key, content) for key, content in contents.items()}
        return replace(
            pending,
            futures={**pending.futures, **futures},
            table_sha256=table_sha256,
            statistics_sha256=statistics_sha256,
        )

    def commit(self, pending: PendingBlock, record: CommitRecord) -> None:
        """Waits until every object of the block is durable, then writes the record.

        Raises StoreError, naming the object, if one could not be written; the block is then not in the store. If the
        store already has a record of the block, that record stays. Raises StoreError if the two records differ.
        """
        if (record.stream, record.block) != (pending.stream, pending.block):
            raise ValueError(f"record of {record.stream, record.block} for {pending.stream, pending.block}")
        if not pending.has_tables:
            raise ValueError(f"block {pending.block} of stream {pending.stream} needs its tables: write_tables")
        pending.wait()
        record = replace(
            record,
            table_sha256=pending.table_sha256,
            statistics_sha256=pending.statistics_sha256,
            digests={name: digest.result() for name, digest in pending.digests.items()},
            blocks_before=self.streams[record.stream].table.digest(),
        )
        self.commit_written(record, pending.is_committed)

    def commit_written(self, record: CommitRecord, is_committed: bool = False) -> None:
        """Commits a block whose objects are durable. is_committed: the store has its record. Raises as `commit`."""
        num_blocks = len(self.streams[record.stream].table)
        if record.block < num_blocks:  # committed by another run before this one read the stream
            self._require_committed(record)
            return
        if record.block > num_blocks:
            raise ValueError(f"stream {record.stream} has {num_blocks} blocks; {record.block} is not the next")
        if is_committed or not self.storage.write_if_absent(record.key, record.to_json()):
            record = self._require_committed(record)
        self.streams.append(record)

    def _require_committed(self, record: CommitRecord) -> CommitRecord:
        """The stored record, which another run wrote. Raises StoreError unless it equals `record`, whose digests are
        not known if nothing was written for it."""
        [stored] = self.storage.read_checked([record.key], partial(parse_record, self.storage))
        if stored is not None and not record.digests:
            record = replace(record, digests=stored.digests)
        if stored is None or not (stored.is_same_block(record) and stored.names_same_files(record)):
            raise StoreError(
                f"another run on this store has written {self.path}/{record.key} with different content, which is "
                f"kept. Run the same command again, with the other run's configuration."
            )
        return stored

    def reopen(self, target: Target | None = None) -> None:
        """Opens a store, complete or not, for more blocks. No process completes it before it holds `target` tokens."""
        if not self._exists:
            self.root = replace(self.root, target=target)
            return
        # Grow the arrays first, then change the root; finishing does the reverse. So an incomplete store always has
        # room for a block.
        set_rows(self.storage, self.root.array_names, MAX_ROWS)

        def reopened(root: StoreRoot) -> StoreRoot:
            return replace(root.unfinished(), target=larger(root.target, target or root.target))

        self.root = change_root(self.storage, reopened)
        while any(array.shape[0] != MAX_ROWS for array in self.arrays.values()):
            # A process that was still finishing the store has trimmed them.
            set_rows(self.storage, self.root.array_names, MAX_ROWS)
            self.arrays = open_or_create(self.storage, self.layout)

    def finish(self, force: bool = False) -> bool:
        """Marks the store complete unless it holds less than its target. Returns whether it is complete.

        Call it only when no process has a block left to commit. Reads all streams again, since other processes wrote
        some. See `finish_store`. Raises StoreError.
        """
        self.create()
        root = finish_store(self.storage, self.layout, self.streams.read_all_again, force)
        self.root = self.root if root is None else root
        return root is not None

    def write_metrics(self, name: str, text: bytes) -> None:
        """Writes or replaces `_metrics/<name>`. Raises only StoreError; the store is then unchanged."""
        self.storage.write(metrics_key(name), text)

    def _withdraw(self, stream: int, block: int) -> int:
        """Deletes the record of a truncated block that is about to be replaced. Returns its number of tokens."""
        blocks = self.streams[stream]
        if block >= len(blocks.table):
            return 0
        record = blocks.last
        if record is None or record.block != block or not record.truncated:
            raise ValueError(f"block {block} of stream {stream} is committed, and was not truncated")

        def read() -> tuple[CommitRecord | None, bytes]:
            [(text, generation)] = self.storage.read_with_generations([record.key])
            return parse_record(self.storage, record.key, text), generation

        stored, generation = self.storage.retry_read(read)
        is_same = stored is None or stored == record
        if is_same and stored is not None and not self.storage.write_if_unchanged(record.key, None, generation):
            is_same = self.storage.read(record.key) is None  # this request deleted it, but its answer was lost
        if not is_same:
            raise StoreError(
                f"{self.path}/{record.key} was replaced by another run on this store. Run the same command again."
            )
        self.streams.withdraw_last(stream)
        return record.tokens

    def _write_shard(
        self, spec: ArraySpec, key: str, stream: int, block: int, values: np.ndarray
    ) -> tuple[Written, Future[str]]:
        """Starts writing one array's part of a block. The second future returns the digest of its values."""
        chunk_shape = self.layout.chunk_shape(spec)
        if self._files is not None:
            written = self._files.write(key, values, chunk_shape, spec.fill)
            return written, written
        digest = self.storage.file_threads.submit(values_digest, values, chunk_shape)
        first = self.layout.first_row(stream, block)
        shard = self.arrays[spec.name][first : first + self.layout.rows_per_block]
        return shard.write(values, can_reference_source_data_indefinitely=self._may_reference), digest

    def _check_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
        given = {name: (array.dtype.name, array.shape) for name, array in arrays.items()}
        expected = {s.name: (s.dtype, self.layout.shard_shape(s)) for s in self.layout.all_arrays}
        if given != expected:
            raise ValueError(f"a block needs the arrays {expected}, got {given}")


def metrics_key(name: str) -> str:
    """The key of a run's log in the store."""
    return f"_metrics/{name}"


def new_root(metadata: StoreMetadata, layout: StoreLayout) -> StoreRoot:
    """The root of a new store."""
    created = datetime.now(UTC).isoformat(timespec="seconds")
    return StoreRoot(metadata, tuple(spec.name for spec in layout.arrays), created, target=target_of(metadata.config))


def create_root(storage: Storage, metadata: StoreMetadata, layout: StoreLayout) -> StoreRoot | None:
    """Creates the root of a new store. Returns None if there is a root already, or another process creates it first.

    The root is written before all other objects, so that an interrupted creation can be completed from it. Raises
    StoreInvalid if the path is not empty, and StoreError.
    """
    if storage.read(ROOT_KEY) is not None or not require_vacant(storage):
        return None
    root = new_root(metadata, layout)
    return root if storage.write_if_absent(ROOT_KEY, root.to_json()) else None
