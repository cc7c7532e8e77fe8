"""Block tables: the counts of commit records in columns, 45 bytes per block, so that not every record has to be read.

A complete store has a table of all its blocks, `_blocks/all.npy`, whose sha256 is in the root. Each stream has a table
of its first blocks, written whenever their number is a multiple of `index_step`, and at the stream's end. It only
repeats the records: later blocks are read from their records, and a table that is missing, damaged or contradicts the
records is ignored.
"""

import hashlib
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, overload

import numpy as np
from jaxtyping import Bool, Int64

from pipeline.core.errors import StoreInvalid
from pipeline.store.format.commits import CommitRecord, read_stream_records
from pipeline.store.io.storage import Storage

PREFIX = "_blocks/"
TABLE_KEY = f"{PREFIX}all.npy"
_MIN_INDEX_STEP, _MAX_INDEX_STEP = 8, 64

_STREAMS_AT_ONCE = 32
_SHA256_BYTES = 32
_MAGIC = b"\x93NUMPY\x01\x00"  # followed by the header's length in two bytes, the header, and the values
_EXHAUSTED, _TRUNCATED, _STATISTICS, _CONTINUES = 1, 2, 4, 8  # flags
_COUNTS = (
    *(("stream", "<u4"), ("block", "<u4"), ("rows", "<u4"), ("tokens", "<u4"), ("activations", "<u4")),
    *(("documents", "<u4"), ("skipped", "<u4"), ("tokens_cut", "<u8"), ("first_document", "<u8")),
)
DTYPE = np.dtype([*_COUNTS, ("flags", "u1")])


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
    truncated: bool
    has_statistics: bool
    continues: bool


class BlockTable(Sequence[Block]):
    """A sequence of blocks, stored as columns: one array [len(self)] per count of `Block`."""

    def __init__(self, values: np.ndarray | None = None) -> None:
        """values: [num_blocks] of dtype DTYPE; None for no blocks."""
        self.values = np.empty(0, DTYPE) if values is None else values

    @classmethod
    def from_records(cls, records: Iterable[CommitRecord]) -> "BlockTable":
        return cls(np.array([_row(record) for record in records], DTYPE))

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
    def has_statistics(self) -> Bool[np.ndarray, " n"]:
        return (self.values["flags"] & _STATISTICS) != 0

    @property
    def continues(self) -> Bool[np.ndarray, " n"]:
        return (self.values["flags"] & _CONTINUES) != 0

    def with_record(self, record: CommitRecord) -> "BlockTable":
        return BlockTable.join([self, BlockTable.from_records([record])])

    def in_row_order(self, num_streams: int) -> "BlockTable":
        """The same blocks, in the order of their rows in the store."""
        return self[np.argsort(self.column("block") * num_streams + self.column("stream"), kind="stable")]

    def digest(self) -> str:
        """The sha256 of the blocks' counts, as hex; the record of a stream's next block contains it."""
        return hashlib.sha256(self.values.tobytes()).hexdigest()

    def encode(self) -> bytes:
        """A .npy file, followed by the sha256 of its bytes."""
        file = io.BytesIO()
        np.lib.format.write_array(file, self.values, version=(1, 0), allow_pickle=False)
        return file.getvalue() + hashlib.sha256(file.getbuffer()).digest()

    @classmethod
    def decode(cls, content: bytes) -> "BlockTable | None":
        """The inverse of `encode`; None for any other content."""
        payload = memoryview(content)[:-_SHA256_BYTES]
        if hashlib.sha256(payload).digest() != content[-_SHA256_BYTES:]:
            return None
        size = int.from_bytes(payload[len(_MAGIC) : len(_MAGIC) + 2], "little")
        header, values = payload[len(_MAGIC) + 2 :][:size], payload[len(_MAGIC) + 2 + size :]
        num_blocks, remainder = divmod(len(values), DTYPE.itemsize)
        is_valid = payload[: len(_MAGIC)] == _MAGIC and bytes(header).strip() == _header(num_blocks) and not remainder
        return cls(np.frombuffer(values, DTYPE)) if is_valid else None


def _header(num_blocks: int) -> bytes:
    """The header of a .npy file. It is compared rather than parsed, since the file may come from anybody."""
    fields = {"descr": np.lib.format.dtype_to_descr(DTYPE), "fortran_order": False, "shape": (num_blocks,)}
    return ("{" + "".join(f"{name!r}: {value!r}, " for name, value in fields.items()) + "}").encode()


def _row(record: CommitRecord) -> tuple[int, ...]:
    flags = _EXHAUSTED * record.exhausted | _TRUNCATED * record.truncated
    flags |= _STATISTICS * bool(record.statistics_sha256) | _CONTINUES * bool(record.start["token"])
    counts = (record.stream, record.block, record.rows, record.tokens, record.activations, record.documents)
    return (*counts, len(record.skipped), record.tokens_cut, record.start["ordinal"], flags)


def _block(row: tuple[int, ...]) -> Block:
    *counts, flags = row
    return Block(*counts, *(bool(flags & flag) for flag in (_EXHAUSTED, _TRUNCATED, _STATISTICS, _CONTINUES)))


class StreamBlocks(NamedTuple):
    """The committed blocks of one stream.

    last: the record of the last block; None if there is no block, or if the last one has just been withdrawn.
    num_indexed: how many blocks the stream's stored block table is known to have.
    """

    table: BlockTable
    last: CommitRecord | None
    num_indexed: int = 0

    @property
    def to_index(self) -> BlockTable:
        """The blocks for the stream's block table: all except a truncated last one, which may be replaced."""
        return self.table[:-1] if len(self.table) and self.table[-1].truncated else self.table

    @property
    def tokens(self) -> int:
        """The number of valid tokens in all blocks."""
        return self.table.total("tokens")

    def with_record(self, record: CommitRecord) -> "StreamBlocks":
        return StreamBlocks(self.table.with_record(record), record, self.num_indexed)

    def without_last(self) -> "StreamBlocks":
        return StreamBlocks(self.table[:-1], None, self.num_indexed)


NO_BLOCKS = StreamBlocks(BlockTable(), None)


def index_step(num_blocks: int) -> int:
    """A stream's block table is written whenever its number of blocks is a multiple of this power of two, 8 to 64.

    From 64 blocks on it is at most an eighth of their number. Opening a store costs one request for each block that the
    tables lack, and a store may have ten thousand streams.
    """
    return min(max(_MIN_INDEX_STEP, 1 << max(0, num_blocks.bit_length() - 4)), _MAX_INDEX_STEP)


def stream_table_key(stream: int) -> str:
    """The key of a stream's block table, relative to the store."""
    return f"{PREFIX}stream-{stream:05d}.npy"


def read_stream(storage: Storage, stream: int, list_all: bool = False) -> StreamBlocks:
    """The committed blocks of a stream, from its block table and the records of the blocks after it.

    `list_all` also detects a gap among the earlier records, at the price of one request per 1,000 of them. Raises
    StoreInvalid for a damaged record or a gap, and StoreError.
    """
    content = storage.read(stream_table_key(stream))
    indexed = (None if content is None else BlockTable.decode(content)) or BlockTable()
    if len(indexed):
        last_indexed = len(indexed) - 1  # its record is read too, and compared
        try:
            records = read_stream_records(storage, stream, last_indexed, list_all)
        except StoreInvalid:
            records = []
        if records and _agree(indexed, records[0]):
            table = BlockTable.join([indexed, BlockTable.from_records(records[1:])])
            return StreamBlocks(table, records[-1], len(indexed))
    records = read_stream_records(storage, stream)
    return StreamBlocks(BlockTable.from_records(records), records[-1] if records else None)


def _agree(indexed: BlockTable, record: CommitRecord) -> bool:
    """Whether a table of a stream's first blocks is consistent with the record of its last block."""
    before = indexed[:-1]
    return (
        indexed[-1] == BlockTable.from_records([record])[0]
        and bool((indexed.values["stream"] == record.stream).all())
        and np.array_equal(indexed.values["block"], np.arange(len(indexed)))
        and record.blocks_before == before.digest()
    )


def read_streams(storage: Storage, streams: Sequence[int], list_all: bool = False) -> dict[int, StreamBlocks]:
    """`read_stream` for several streams, concurrently."""
    with ThreadPoolExecutor(min(_STREAMS_AT_ONCE, max(1, len(streams))), "streams") as pool:
        return dict(zip(streams, pool.map(partial(read_stream, storage, list_all=list_all), streams), strict=True))


def join_streams(streams: Mapping[int, StreamBlocks]) -> BlockTable:
    """One table of all streams' blocks, in row order. The keys of `streams` are 0, 1, 2, ..."""
    return BlockTable.join(stream.table for stream in streams.values()).in_row_order(len(streams))


def split_streams(table: BlockTable, num_streams: int) -> list[BlockTable]:
    """The inverse of `join_streams`."""
    order = np.argsort(table.values["stream"], kind="stable")
    ends = np.searchsorted(table.values["stream"][order], np.arange(num_streams), side="right")
    return [table[part] for part in np.split(order, ends[:-1])]


def read_table(storage: Storage, sha256: str | None) -> BlockTable | None:
    """The table of a complete store's blocks; None if there is none with this sha256. Raises StoreError."""
    content = None if sha256 is None else storage.read(TABLE_KEY)
    if content is None or table_sha256(content) != sha256:
        return None
    return BlockTable.decode(content)


def table_sha256(content: bytes) -> str:
    """The sha256 of an encoded table, as hex, which the root of a complete store contains."""
    return hashlib.sha256(content).hexdigest()
