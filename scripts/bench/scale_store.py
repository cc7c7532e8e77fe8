"""Stores of any number of blocks for `gcs_standin`: objects are encoded by the project's code when they are read.

All blocks hold the same tiny activations, one document per row; only numbers differ. So a store of a million blocks is
an array of digests, and its objects are those that `StoreWriter` would write (`tests/scripts/test_scale_store.py`
compares them). A change of the store's format affects `SyntheticStore.record`, `content` and `make_store`.
"""

import bisect
import heapq
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache, cached_property, lru_cache, reduce
from pathlib import Path

import ml_dtypes  # noqa: F401  numpy then knows "bfloat16"
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.config.composing import compose
from pipeline.data.documents import DOCUMENT_SCHEMA
from pipeline.job.opening import Job, open_job
from pipeline.store.format.arrays import grow_rows
from pipeline.store.format.block_table import BlockTable, StreamBlocks, join_streams
from pipeline.store.format.commits import COMMITS_PREFIX, CommitRecord, commit_key, num_recent
from pipeline.store.format.layout import ArraySpec, StoreLayout
from pipeline.store.format.metadata import change_root
from pipeline.store.format.statistics import (
    STATISTICS_PREFIX,
    BlockStatistics,
    block_parts,
    encode_statistics,
    merge_arrays,
    statistics_key,
    token_statistics,
)
from pipeline.store.format.summary import BLOCKS, IDS, IDS_BYTES, STATISTICS, put_summary
from pipeline.store.format.tables import TABLES_PREFIX, encode_table, table_digest, table_key
from pipeline.store.ids.index import block_entries, encode_index
from pipeline.store.io.shards import encode_shard
from pipeline.store.io.storage import Storage
from pipeline.store.write.store_writer import StoreWriter

BUILD = Path("build/bench-scale")
PLACE = "bench-scale/store"  # bucket and store
URL = f"gs://{PLACE}"
ROWS, LENGTH, WIDTH = 4, 8, 128  # the bundled model's width
BLOCK_TOKENS = ROWS * LENGTH
SOURCE, DOCUMENTS = "part-{:05d}.parquet", 1024  # a stream's file, and the documents in it: those of 256 blocks


class State(StrEnum):
    unfinished = "unfinished"
    complete = "complete"


@dataclass(frozen=True)
class StoreShape:
    """B blocks in S streams with equal numbers of blocks. has_ids: the store has indexes of ids."""

    blocks: int
    streams: int
    state: State
    has_ids: bool = False

    @property
    def stream_blocks(self) -> int:
        return self.blocks // self.streams

    @property
    def tokens(self) -> int:
        return self.blocks * BLOCK_TOKENS


class SyntheticStore:
    """The objects of a store: a `gcs_standin.Provider`. Keys are relative to the store, except in `content` and
    `keys_from`.

    layout: the layout of its arrays. fixed: the objects that do not depend on a block, by key.
    """

    def __init__(self, shape: StoreShape, layout: StoreLayout, fixed: Mapping[str, bytes]) -> None:
        self.shape = shape
        self.layout = layout
        self._fixed = {f"{PLACE}/{key}": content for key, content in fixed.items()}
        self._fixed_keys = sorted(self._fixed)

    # The Provider.

    def content(self, key: str) -> bytes | None:
        """The bytes of the object `bucket/store/key`."""
        if key in self._fixed:
            return self._fixed[key]
        kind = next((kind for kind in self._kinds if key.startswith(f"{PLACE}/{kind}")), None)
        if kind is None:
            return None
        i = bisect.bisect_left(range(self.shape.blocks), key, key=lambda i: self._key(kind, i))
        if i == self.shape.blocks or self._key(kind, i) != key:
            return None
        place = self._place(kind, i)
        if kind == COMMITS_PREFIX:
            return self.record(*place).to_json()
        if kind == TABLES_PREFIX:
            return encode_table(table(self.shape, *place))
        if kind == STATISTICS_PREFIX:
            return self._statistics.encoded(place[1])
        return self._shard(self._spec(kind.removesuffix("/c.")), *place)

    def keys_from(self, start: str) -> Iterator[str]:
        fixed = itertools.islice(self._fixed_keys, bisect.bisect_left(self._fixed_keys, start), None)
        return heapq.merge(fixed, itertools.chain.from_iterable(self._kind_keys(kind, start) for kind in self._kinds))

    def _kind_keys(self, kind: str, start: str) -> Iterator[str]:
        count = self.shape.blocks
        first = bisect.bisect_left(range(count), start, key=lambda i: self._key(kind, i))
        return (self._key(kind, i) for i in range(first, count))

    @cached_property
    def _kinds(self) -> list[str]:
        """The prefixes of objects of which each block has one, ascending."""
        return sorted(
            [COMMITS_PREFIX, TABLES_PREFIX, STATISTICS_PREFIX, *(f"{spec.name}/c." for spec in self.layout.all_arrays)]
        )

    def _key(self, kind: str, i: int) -> str:
        """The i-th of the sorted keys of one kind."""
        stream, block = self._place(kind, i)
        per_block = {COMMITS_PREFIX: commit_key, TABLES_PREFIX: table_key, STATISTICS_PREFIX: statistics_key}
        if kind in per_block:
            return f"{PLACE}/{per_block[kind](stream, block)}"
        return f"{PLACE}/{self.layout.shard_key(self._spec(kind.removesuffix('/c.')), stream, block)}"

    def _spec(self, name: str) -> ArraySpec:
        return next(spec for spec in self.layout.all_arrays if spec.name == name)

    def _place(self, kind: str, i: int) -> tuple[int, int]:
        """Stream and block of the i-th of the sorted keys of one kind."""
        if kind.startswith("_"):
            return divmod(i, self.shape.stream_blocks)
        block, stream = divmod(int(self._shard_order[i]), self.shape.streams)
        return stream, block

    @cached_property
    def _shard_order(self) -> np.ndarray:
        """The numbers of the store shards in the order of their keys: "." comes before any digit."""
        return np.array(sorted(range(self.shape.blocks), key=str), np.int32)

    # The content of blocks.

    def record(self, stream: int, block: int) -> CommitRecord:
        """A block's commit record."""
        documents = arrays(self.shape, self.layout, stream, block)["documents"]
        _, digest = encode_shard(documents, self.layout.shard_format(self._spec("documents")))
        before = self._counts.copy()
        before["first_document"] = np.arange(block - len(before), block) * ROWS
        return replace(
            record(block, stream),
            documents_sha256=table_digest(encode_table(table(self.shape, stream, block))),
            statistics_sha256=self._statistics.sha256(block),
            digests=self._digests | {"documents": digest},
            recent=tuple(row[2:] for row in before[len(before) - num_recent(block) :].tolist()),
        )

    @cached_property
    def _counts(self) -> np.ndarray:
        """The counts of a thousand blocks, which only differ in their first documents."""
        return self.stream_table(0, 1 << 10).values

    def stream_table(self, stream: int, num_blocks: int) -> BlockTable:
        """The block table of a stream's first blocks."""
        first = replace(record(0, stream), statistics_sha256=self._statistics.sha256(0))
        values = np.repeat(BlockTable.from_records([first]).values, num_blocks)
        values["block"] = np.arange(num_blocks)
        values["first_document"] = values["block"] * ROWS
        return BlockTable(values)

    def ids_index(self) -> bytes:
        """The index of all ids."""
        parts = []
        for stream in range(self.shape.streams):
            entries = block_entries((_id(stream, i) for i in range(self.shape.stream_blocks * ROWS)), 0)
            entries["shard"] = np.arange(len(entries)) // ROWS * self.shape.streams + stream
            parts.append(entries)
        return encode_index(parts, [self.shape.stream_blocks] * self.shape.streams)

    def merged_statistics(self) -> BlockStatistics:
        """The statistics of all blocks."""
        return reduce(merge_arrays, [self._statistics.running(self.shape.stream_blocks - 1)] * self.shape.streams)

    @cached_property
    def _statistics(self) -> "_RunningStatistics":
        return _RunningStatistics(statistics(self.layout))

    @cached_property
    def _digests(self) -> dict[str, str]:
        """The digests of a block's arrays. All blocks have the same ones, except for `documents`."""
        block = arrays(self.shape, self.layout, 0, 0)
        formats = {spec.name: self.layout.shard_format(spec) for spec in self.layout.all_arrays}
        return {name: encode_shard(block[name], format)[1] for name, format in formats.items()}

    def _shard(self, spec: ArraySpec, stream: int, block: int) -> bytes:
        values = arrays(self.shape, self.layout, stream, block)[spec.name]
        return b"".join(encode_shard(values, self.layout.shard_format(spec))[0])


class _RunningStatistics:
    """The statistics files of a stream's blocks, which are the same in each stream."""

    def __init__(self, own: BlockStatistics) -> None:
        self._own = own
        self._last = (0, own)  # a block, and the running statistics through it
        self.sha256 = cache(lambda block: table_digest(self.encoded(block)))

    def running(self, block: int) -> BlockStatistics:
        at, running = self._last if self._last[0] <= block else (0, self._own)
        for _ in range(block - at):
            running = merge_arrays(running, self._own)
        self._last = (block, running)
        return running

    def encoded(self, block: int) -> bytes:
        return encode_statistics(block_parts(block, self._own, self.running(block)))


def arrays(shape: StoreShape, layout: StoreLayout, stream: int, block: int) -> dict[str, np.ndarray]:
    """A block's arrays by name: each row is one document of LENGTH tokens."""
    numbers = (np.arange(ROWS) + block * ROWS) * shape.streams + stream
    return _common_arrays(layout.arrays[0].name) | {
        "documents": np.broadcast_to(numbers[:, None].astype(np.int64), (ROWS, LENGTH))
    }


@cache
def _common_arrays(name: str) -> dict[str, np.ndarray]:
    position = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (ROWS, LENGTH))
    activations = np.arange(ROWS * LENGTH * WIDTH).reshape(ROWS, LENGTH, WIDTH) % 61 - 30
    return {
        "tokens": position + 1,
        "segments": np.ones((ROWS, LENGTH), np.int32),
        "positions": position,
        name: activations.astype("bfloat16"),
    }


def statistics(layout: StoreLayout) -> BlockStatistics:
    """The statistics of every block."""
    name = layout.arrays[0].name
    return {name: token_statistics(_common_arrays(name)[name].reshape(-1, WIDTH).astype(np.float32))}


def _id(stream: int, index: int) -> str:
    return f"{stream}/{index}"


def table(shape: StoreShape, stream: int, block: int) -> pa.Table:
    """A block's document table."""
    index = np.arange(block * ROWS, (block + 1) * ROWS)
    columns = [
        index * shape.streams + stream,
        [_id(stream, i) for i in index],
        [SOURCE.format(stream)] * ROWS,
        index,
        *(np.full(ROWS, value) for value in (LENGTH, 0, 0, LENGTH)),
    ]
    return pa.table(columns, schema=DOCUMENT_SCHEMA)


def record(block: int, stream: int) -> CommitRecord:
    """A block's record as the job passes it to the writer, which adds the digests."""
    start, after = (
        {"shard": 0, "document": (block + k) * ROWS, "token": 0, "ordinal": (block + k) * ROWS} for k in (0, 1)
    )
    return CommitRecord(stream, block, ROWS, BLOCK_TOKENS, ROWS, 0, (), start, after, False)


def open_bench_job(streams: int, max_tokens: int, path: str = URL) -> Job:
    """Opens the job of the store."""
    folder = BUILD / f"data-{streams}-{DOCUMENTS}"
    if not folder.exists():
        folder.mkdir(parents=True)
        documents = {"id": [str(i) for i in range(DOCUMENTS)], "text": ["Some text."] * DOCUMENTS}
        for stream in range(streams):
            pq.write_table(pa.table(documents), folder / SOURCE.format(stream))
    overrides = [
        f"data.path={folder}",
        f"data.num_streams={streams}",
        f"store.path={path}",
        "store.shard_mib=0.001",
        "capture.layers=[0]",
        f"batch.rows={ROWS}",
        f"batch.length={LENGTH}",
        f"run.max_tokens={max_tokens}",
        "run.progress=false",
    ]
    return open_job(compose(overrides))


@lru_cache(maxsize=4)
def make_store(shape: StoreShape, target: int) -> SyntheticStore:
    """Makes a store whose target in the root is `target` tokens."""
    if shape.blocks % shape.streams:
        raise ValueError(f"{shape.blocks} blocks do not divide into {shape.streams} streams")
    path = f"memory://bench-scale-{shape.blocks}-{shape.streams}-{shape.state}-{shape.has_ids}"
    job = open_bench_job(shape.streams, target, path)
    StoreWriter.open(job.storage, job.metadata, job.layout)
    storage, layout = job.storage, job.layout
    store = SyntheticStore(shape, layout, {})
    if shape.state is State.complete:
        _complete(storage, store)
    fixed = {key: storage.read(key) for key in storage.list_keys()}
    for key in fixed:
        storage.write(key, None)
    return SyntheticStore(shape, layout, fixed)


def _complete(storage: Storage, store: SyntheticStore) -> None:
    """Writes what `finish_store` would write, without reading the blocks' objects."""
    shape, layout = store.shape, store.layout
    streams = range(shape.streams)
    tables = (StreamBlocks(store.stream_table(stream, shape.stream_blocks), None) for stream in streams)
    blocks = join_streams(dict(zip(streams, tables, strict=True))).encode()
    summary: dict[str, str | int | None] = {
        BLOCKS: put_summary(storage, BLOCKS, blocks),
        STATISTICS: put_summary(storage, STATISTICS, encode_statistics({0: store.merged_statistics()})),
        IDS: None,
    }
    if shape.has_ids:
        ids = store.ids_index()
        summary |= {IDS: put_summary(storage, IDS, ids), IDS_BYTES: len(ids)}
    change_root(storage, lambda root: replace(root, complete=True, summary=summary))
    grow_rows(storage, layout, shape.blocks * ROWS)
