"""Block tables: the counts of commit records in columns, 45 bytes per block.

A finished store has a table of its blocks as parquet (`summary.py`). The counts of other blocks come from their
records: each repeats the counts of the blocks before it in its group of 256 blocks of a stream. So a stream's counts
are read from the last record of each group.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import NamedTuple, overload

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Int64

from pipeline.core.errors import StoreInvalid
from pipeline.store.format.commits import BLOCKS_PER_GROUP, CommitRecord, list_blocks, read_commit_records
from pipeline.store.format.layout import StoreLayout
from pipeline.store.io.failures import DAMAGE_REMEDY
from pipeline.store.io.parquet import decode_table_of, encode_table, require_schema
from pipeline.store.io.storage import Storage

_STREAMS_AT_ONCE = 32
_MAX_BLOCKS = 1 << 30
_EXHAUSTED, _CONTINUES = 1, 2  # flags
_COUNTS = (
    *(("stream", "<u4"), ("block", "<u4"), ("rows", "<u4"), ("tokens", "<u4"), ("activations", "<u4")),
    *(("documents", "<u4"), ("skipped", "<u4"), ("tokens_cut", "<u8"), ("first_document", "<u8")),
)
DTYPE = np.dtype([*_COUNTS, ("flags", "u1")])
_SCHEMA = pa.schema([(name, pa.from_numpy_dtype(DTYPE[name])) for name in DTYPE.names])


class Block(NamedTuple):
    """The counts of one block; see `CommitRecord`.

    activations: the number of tokens whose activations are stored. skipped: the number of documents left out.
    first_document: the first document's ordinal in the stream. continues: the block begins within that document.
    """

    stream: int
    block: int
    rows: int
    tokens: int
    activations: int
    documents: int
    skipped: int
    tokens_cut: int
    first_document: int
    exhausted: bool
    continues: bool


class BlockTable(Sequence[Block]):
    """A sequence of blocks, stored as columns: one array [len(self)] per count of `Block`."""

    def __init__(self, values: np.ndarray | None = None) -> None:
        """values: [num_blocks] of dtype DTYPE; None for no blocks."""
        self.values = np.empty(0, DTYPE) if values is None else values

    @classmethod
    def from_records(cls, records: Iterable[CommitRecord]) -> "BlockTable":
        return cls(np.array([(record.stream, record.block, *counts_of(record)) for record in records], DTYPE))

    @classmethod
    def through(cls, record: CommitRecord) -> "BlockTable":
        """The block of a record, after the blocks whose counts it repeats. Raises StoreInvalid for counts that no block
        has."""
        first = record.block - len(record.recent)
        rows = [(record.stream, first + n, *counts) for n, counts in enumerate((*record.recent, counts_of(record)))]
        try:
            return cls(np.array(rows, DTYPE))
        except OverflowError as error:
            raise StoreInvalid(f"{record.key} repeats impossible counts of earlier blocks: {error}.") from error

    @classmethod
    def join(cls, tables: Iterable["BlockTable"]) -> "BlockTable":
        """The blocks of all tables, one table after the other."""
        return cls(np.concatenate([np.empty(0, DTYPE), *(table.values for table in tables)]))

    def __len__(self) -> int:
        return len(self.values)

    @overload
    def __getitem__(self, index: int) -> Block: ...
    @overload
    def __getitem__(self, index: slice | np.ndarray) -> "BlockTable": ...
    def __getitem__(self, index):
        values = self.values[index]
        return BlockTable(values) if isinstance(index, (slice, np.ndarray)) else _block(values.item())

    def __iter__(self) -> Iterator[Block]:
        return map(_block, self.values.tolist())

    def column(self, name: str) -> Int64[np.ndarray, " n"]:
        """The count `name` of each block."""
        return self.values[name].astype(np.int64)

    def total(self, name: str) -> int:
        """The sum of the count `name` over all blocks."""
        return int(self.values[name].sum(dtype=np.uint64))

    @property
    def continues(self) -> Bool[np.ndarray, " n"]:
        return (self.values["flags"] & _CONTINUES) != 0

    def recent(self, block: int) -> tuple[tuple[int, ...], ...]:
        """The counts that the record of a block repeats, from the table of its stream's first blocks."""
        return tuple(row[2:] for row in self.values[block - block % BLOCKS_PER_GROUP : block].tolist())

    def in_row_order(self, num_streams: int) -> "BlockTable":
        """The same blocks, in the order of their rows in the store."""
        return self[np.argsort(self.column("block") * num_streams + self.column("stream"), kind="stable")]

    def per_stream(self, num_streams: int) -> Int64[np.ndarray, " streams"]:
        """The number of blocks of each stream."""
        return np.bincount(self.values["stream"], minlength=num_streams)

    def first_blocks(self, counts: Int64[np.ndarray, " streams"]) -> "BlockTable":
        """The first `counts[s]` blocks of each stream s, in the same order."""
        return self[np.flatnonzero(self.column("block") < np.asarray(counts)[self.values["stream"]])]

    def encode(self) -> bytes:
        """The table as parquet."""
        return encode_table(pa.table([self.values[name] for name in DTYPE.names], schema=_SCHEMA))

    @classmethod
    def decode(cls, content: bytes | None, subject: str, sha256: str, num_streams: int) -> "BlockTable":
        """The inverse of `encode`, for a table in row order. Raises StoreInvalid if it is not one of `num_streams`
        streams' first blocks. sha256: of the content, from the root."""
        table = decode_table_of(content, subject, sha256, "the root", _MAX_BLOCKS)
        require_schema(table, _SCHEMA, subject)
        values = np.empty(table.num_rows, DTYPE)
        for name in DTYPE.names:
            values[name] = table[name].to_numpy()
        blocks = cls(values)
        is_known = not (values["stream"] >= num_streams).any()
        streams = split_streams(blocks, num_streams) if is_known else []
        is_whole = all(np.array_equal(part.values["block"], np.arange(len(part))) for part in streams)
        if not (is_known and is_whole and np.array_equal(blocks.in_row_order(num_streams).values, values)):
            raise StoreInvalid(
                f"{subject} is not a table of the first blocks of {num_streams} streams, in the order of their rows. "
                f"{DAMAGE_REMEDY}"
            )
        return blocks


def counts_of(record: CommitRecord) -> tuple[int, ...]:
    """A block's counts without its stream and number, in the order of `Block`, the last two as flags."""
    flags = _EXHAUSTED * record.exhausted | _CONTINUES * bool(record.start["token"])
    counts = (record.rows, record.tokens, record.activations, record.documents, len(record.skipped))
    return (*counts, record.tokens_cut, record.start["ordinal"], flags)


def num_rows(table: BlockTable, layout: StoreLayout) -> int:
    """The number of a store's rows up to the last one of these blocks that has tokens."""
    shards = table.column("block") * layout.num_streams + table.column("stream")
    return int((shards * layout.rows_per_block + table.column("rows")).max(initial=0))


def impossible_counts(table: BlockTable, layout: StoreLayout) -> Iterator[tuple[Block, str]]:
    """The blocks of a table that have more rows, tokens or documents than a block of the store can have."""
    rows, tokens = table.column("rows"), table.column("tokens")
    limits = {
        "rows": np.full(len(table), layout.rows_per_block),
        "tokens": rows * layout.length,
        "activations": np.minimum(tokens, rows * layout.slots),
        "documents": tokens,
    }
    for name, most in limits.items():
        for index in np.flatnonzero(table.column(name) > most):
            what = f"has {table.column(name)[index]} {name}, but a block has at most {most[index]}"
            yield table[int(index)], what


def _block(row: tuple[int, ...]) -> Block:
    *counts, flags = row
    return Block(*counts, *(bool(flags & flag) for flag in (_EXHAUSTED, _CONTINUES)))


class StreamBlocks(NamedTuple):
    """The committed blocks of one stream, and the record of the last one; None if there is no block."""

    table: BlockTable
    last: CommitRecord | None

    @property
    def tokens(self) -> int:
        """The number of valid tokens in all blocks."""
        return self.table.total("tokens")


NO_BLOCKS = StreamBlocks(BlockTable(), None)


def read_stream(storage: Storage, stream: int, known: BlockTable = NO_BLOCKS.table) -> StreamBlocks:
    """The committed blocks of a stream. known: its first blocks, whose records are not read again, except the last one.

    Lists the keys of the other records (a request per 1,000), and reads one per group. Raises StoreInvalid for a
    damaged record or a gap, and StoreError.
    """
    count = max(len(known), list_blocks(storage, stream, max(0, len(known) - 1)).stop)
    if not count:
        return NO_BLOCKS
    first = min(len(known), count - 1) // BLOCKS_PER_GROUP * BLOCKS_PER_GROUP
    wanted = [*range(first + BLOCKS_PER_GROUP - 1, count - 1, BLOCKS_PER_GROUP), count - 1]
    records = list(read_commit_records(storage, [(stream, block) for block in wanted]))
    return StreamBlocks(BlockTable.join([known[:first], *map(BlockTable.through, records)]), records[-1])


def read_streams(
    storage: Storage, streams: Sequence[int], known: Mapping[int, BlockTable] = MappingProxyType({})
) -> dict[int, StreamBlocks]:
    """`read_stream` for several streams, concurrently. known: by stream."""

    def read(stream: int) -> StreamBlocks:
        return read_stream(storage, stream, known.get(stream, NO_BLOCKS.table))

    with ThreadPoolExecutor(min(_STREAMS_AT_ONCE, max(1, len(streams))), "streams") as pool:
        return dict(zip(streams, pool.map(read, streams), strict=True))


def join_streams(streams: Mapping[int, StreamBlocks]) -> BlockTable:
    """One table of all streams' blocks, in row order. The keys of `streams` are 0, 1, 2, ..."""
    return BlockTable.join(stream.table for stream in streams.values()).in_row_order(len(streams))


def split_streams(table: BlockTable, num_streams: int) -> list[BlockTable]:
    """The inverse of `join_streams`."""
    order = np.argsort(table.values["stream"], kind="stable")
    ends = np.searchsorted(table.values["stream"][order], np.arange(num_streams), side="right")
    return [table[part] for part in np.split(order, ends[:-1])]
