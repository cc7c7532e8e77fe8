"""Writing a store: blocks are written whole, then committed; a store is created, resumed, extended and finished.

Several processes may hold a writer of one store at the same time, each for its own streams. `finish` and `reopen` may
be called by any of them, or by several. Should two write the same block all the same, the first record stays.
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
from pipeline.store.format.commits import CONSOLIDATED_KEY, CommitRecord, commit_key, parse_record
from pipeline.store.format.layout import MAX_ROWS, ArraySpec, StoreLayout, is_plain_files
from pipeline.store.format.metadata import (
    ROOT_KEY,
    Json,
    StoreMetadata,
    StoreRoot,
    change_root,
    read_root,
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
from pipeline.store.write.committed_streams import CommittedStreams
from pipeline.store.write.finishing import finish_store
from pipeline.store.write.vacancy import require_vacant

Written = ts.Future | ts.WriteFutures | Future[str]


@dataclass(frozen=True)
class PendingBlock:
    """A block whose objects are being written: its arrays, and from `write_tables` on its tables. `futures` are by the
    object's URL."""

    stream: int
    block: int
    is_committed: bool  # by another run: nothing is written
    futures: Mapping[str, Written]
    digests: Mapping[str, Future[str]]  # by array; none where it is committed
    table_sha256: str = ""
    statistics_sha256: str = ""

    @property
    def has_tables(self) -> bool:
        """Whether they are written, too: the block can be committed."""
        return bool(self.table_sha256)

    @property
    def done(self) -> bool:
        """Whether every object is durable (or has failed): `commit` will not wait."""
        return all(future.done() for future in (*self.futures.values(), *self.digests.values()))

    def wait(self) -> None:
        """Waits until every object is durable, or has failed. Raises StoreError for the first that has, naming it;
        nothing reads the block's arrays any more then."""
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
    """The writing side of one store. Not thread-safe: one thread per writer, but for `streams.read_again`.

    storage: where the store's objects are. layout: of its arrays. arrays: these by name, as TensorStore opened them.
    root: as it was read or written last. streams: their committed blocks.
    """

    def __init__(
        self, storage: Storage, layout: StoreLayout, root: StoreRoot, arrays: dict[str, ts.TensorStore]
    ) -> None:
        self.path = storage.path
        self.layout = layout
        self.streams = CommittedStreams(storage, layout.num_streams)
        self.storage = storage
        self._records_storage = storage.with_own_requests(1)  # a look at a record does not wait for the shards
        self._files: ShardFiles | None = None
        if is_plain_files(storage.path, layout.compression):
            self._files = ShardFiles(Path(storage.directory), storage.file_threads)
        # `memory://` would keep the arrays themselves, which the caller fills again, and free them under its own lock
        # while it waits for the interpreter's: a deadlock.
        self._may_reference = not storage.path.startswith("memory://")
        self.root = root
        self.arrays = arrays

    @classmethod
    def open(cls, place: StorageLike, metadata: StoreMetadata, layout: StoreLayout) -> "StoreWriter":
        """Opens the store at `place` (a local path, `gs://`, `s3://`, `memory://`, or a Storage), or creates it.

        A store whose creation was interrupted is completed. Raises StoreMismatch when the store's fingerprint is not
        `metadata`'s, StoreInvalid when it is damaged or its records have gaps, and StoreError when it cannot be read or
        written.
        """
        if (metadata.num_streams, metadata.rows_per_block) != (layout.num_streams, layout.rows_per_block):
            raise ValueError(f"metadata and layout disagree: {metadata} {layout}")
        storage = Storage.open(place)
        root = create_root(storage, metadata, layout) or _read_root(storage)
        root.metadata.require_same(metadata, storage.path)
        arrays = open_or_create(storage, layout)
        digests = read_array_digests(storage, root.array_names)
        root = change_root(storage, lambda root: replace(root, array_digests=digests))
        return cls(storage, layout, root, arrays)

    @classmethod
    def open_existing(cls, place: StorageLike) -> "StoreWriter":
        """Opens a store as it is, to finish it. Raises StoreInvalid where it is missing or damaged."""
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
    def target(self) -> Target | None:
        """How many tokens the store is to hold, as of its root when that was read last; None where it does not say."""
        return self.root.target

    def record_weights_error(self, errors: Json) -> None:
        """Writes the relative error of each array that int8 weights cause into the store's attributes."""
        self._change_root(weights_error=errors)

    def record_cache_error(self, errors: Json) -> None:
        """Likewise, what int8 keys and values of generation cause."""
        self._change_root(cache_error=errors)

    def allow_not_finite(self) -> None:
        """Writes into the store's attributes that its activations need not be finite."""
        self._change_root(may_be_not_finite=True)

    def begin_block(self, stream: int, block: int, arrays: Mapping[str, np.ndarray]) -> PendingBlock:
        """Starts writing a block's arrays; does not wait. Its tables are next: `write_tables`.

        `arrays` holds every array of the layout by name, each of its full shard shape, with zeros (documents, selected:
        -1) where padded. The arrays are not copied: leave them untouched until `commit` or `PendingBlock.wait` returns.
        A committed block that was truncated loses its record here, since its objects are about to be replaced. Nothing
        is written where another run has committed the block meanwhile.
        """
        if self.complete:
            raise ValueError(f"the store {self.path} is complete: reopen() it first")
        if self.layout.first_row(stream, block) + self.layout.rows_per_block > MAX_ROWS:
            raise StoreInvalid(f"block {block} of stream {stream} is beyond row {MAX_ROWS}, the most a store can have.")
        self._check_arrays(arrays)
        self._withdraw(stream, block)
        is_committed = self._records_storage.read(commit_key(stream, block)) is not None
        futures: dict[str, Written] = {}
        digests: dict[str, Future[str]] = {}
        for spec in () if is_committed else self.layout.all_arrays:
            key = self.layout.shard_key(spec, stream, block)
            written, digests[spec.name] = self._write_shard(spec, key, stream, block, arrays[spec.name])
            futures[self.storage.url(key)] = written
        return PendingBlock(stream, block, is_committed, futures, digests)

    def write_tables(
        self,
        pending: PendingBlock,
        table: pa.Table,
        statistics: BlockStatistics | None = None,
        indexes: Mapping[str, bytes] | None = None,
    ) -> PendingBlock:
        """Starts writing what else a block has: its document table, its statistics (if any) and, by key, its indexes by
        feature (where the store has them); does not wait. Call it for the blocks of a stream in their order.

        Raises StoreError; the arrays are under way then: `pending.wait()` before they are filled again.
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

        Raises StoreError, naming the object, when one could not be written; the block is then not in the store. A
        record that the store has already stays: the block is then committed if the two are the same; else it is a
        StoreError.
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
            digests={name: digest.result() for name, digest in pending.digests.items()} or None,
            blocks_before=self.streams[record.stream].table.digest(),
        )
        self.commit_written(record, pending.is_committed)

    def commit_written(self, record: CommitRecord, is_committed: bool = False) -> None:
        """Commits a block whose objects are durable. `is_committed`: it has its record. Raises as `commit` does."""
        num_blocks = len(self.streams[record.stream].table)
        if record.block < num_blocks:  # by another run, before this one read the stream
            self._require_committed(record)
            return
        if record.block > num_blocks:
            raise ValueError(f"stream {record.stream} has {num_blocks} blocks; {record.block} is not the next")
        if is_committed or not self.storage.write_if_absent(record.key, record.to_json()):
            record = self._require_committed(record)
        self.streams.append(record)

    def _require_committed(self, record: CommitRecord) -> CommitRecord:
        """The stored record, which another run wrote. Raises StoreError unless it says the same."""
        [stored] = self.storage.read_checked([record.key], partial(parse_record, self.storage))
        if stored is None or not (stored.is_same_block(record) and stored.names_same_files(record)):
            raise StoreError(
                f"{self.path}/{record.key} was meanwhile written with different content, by another run on this store. "
                f"It stays. Run the same command again, with the same configuration as the other."
            )
        return stored

    def reopen(self, target: Target | None = None) -> None:
        """Opens a store, complete or not, for more blocks: no process completes it before it holds `target` tokens."""
        # In this order, and when finishing in the other: a store that is not complete never lacks room for a block.
        set_rows(self.storage, self._array_names(), MAX_ROWS)

        def reopened(root: StoreRoot) -> StoreRoot:
            before = root.target
            if before is None and not root.complete:  # of an earlier program
                before = target_of(root.metadata.config)
            wanted = root.target if target is None else larger(before, target)
            return replace(root.unfinished(), target=wanted)

        if self.root.commits_sha256 is not None:
            self.storage.write(CONSOLIDATED_KEY, None)
        self.root = change_root(self.storage, reopened)
        while any(array.shape[0] != MAX_ROWS for array in self.arrays.values()):
            set_rows(self.storage, self._array_names(), MAX_ROWS)  # another process was late to trim them
            self.arrays = open_or_create(self.storage, self.layout)

    def finish(self, force: bool = False) -> bool:
        """Marks the store complete, unless it holds less than its target; says whether it is. See `finish_store`.

        Call it only once no process has a block to commit. All streams are read again, since others wrote some.
        """
        root = finish_store(self.storage, self.layout, self.streams.read_all_again, force)
        self.root = self.root if root is None else root
        return root is not None

    def write_metrics(self, name: str, text: bytes) -> None:
        """Writes (or replaces) `_metrics/<name>`. Raises StoreError, and nothing else; the store is then as before."""
        self.storage.write(metrics_key(name), text)

    def _change_root(self, **changes: object) -> None:
        self.root = change_root(self.storage, lambda root: replace(root, **changes))

    def _array_names(self) -> list[str]:
        return [spec.name for spec in self.layout.all_arrays]

    def _withdraw(self, stream: int, block: int) -> None:
        blocks = self.streams[stream]
        if block >= len(blocks.table):
            return
        record = blocks.last
        if record is None or record.block != block or not record.truncated:
            raise ValueError(f"block {block} of stream {stream} is committed, and was not truncated")

        def read() -> tuple[CommitRecord | None, bytes]:
            [(text, generation)] = self.storage.read_with_generations([record.key])
            return parse_record(self.storage, record.key, text), generation

        stored, generation = self.storage.retry_read(read)
        is_same = stored is None or stored == record
        if is_same and stored is not None and not self.storage.write_if_unchanged(record.key, None, generation):
            is_same = self.storage.read(record.key) is None  # by this request, whose answer was lost
        if not is_same:
            raise StoreError(
                f"{self.path}/{record.key} was replaced by another run on this store. Run the same command again."
            )
        self.streams.withdraw_last(stream)

    def _write_shard(
        self, spec: ArraySpec, key: str, stream: int, block: int, values: np.ndarray
    ) -> tuple[Written, Future[str]]:
        """Starts writing a block of one array. The second future gives the digest of its values."""
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
    """The key of a run's log."""
    return f"_metrics/{name}"


def _read_root(storage: Storage) -> StoreRoot:
    root = read_root(storage)
    if root is None:
        raise StoreError(f"{storage.path}/{ROOT_KEY} was deleted while the store was being created.")
    return root


def create_root(storage: Storage, metadata: StoreMetadata, layout: StoreLayout) -> StoreRoot | None:
    """Creates the root where there is none; None where there is one, or another process was faster.

    The root is written first, so that whatever else is missing can be told from it.
    """
    if storage.read(ROOT_KEY) is not None or not require_vacant(storage):
        return None
    created = datetime.now(UTC).isoformat(timespec="seconds")
    root = StoreRoot(metadata, tuple(spec.name for spec in layout.arrays), created, target=target_of(metadata.config))
    return root if storage.write_if_absent(ROOT_KEY, root.to_json()) else None
