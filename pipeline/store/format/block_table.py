"""The block table: the counts of the commit records in columns, 45 bytes for each block, without reading each record.

A complete store has one of all blocks, `_blocks/all.npy`, whose sha256 the root names. Each stream has its own, of its
first blocks, which is written whenever these are a multiple of `index_step`, and at the stream's end. It only repeats
the records: what it lacks is read from these, and one that is missing, damaged or does not agree with them is ignored.
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
_INDEX_STEPS = (8, 64)  # least and most

_STREAMS_AT_ONCE = 32
_SHA256_BYTES = 32
_MAGIC = b"\x93NUMPY\x01\x00"  # then the length of the header in two bytes, the header, and the values
_EXHAUSTED, _TRUNCATED, _STATISTICS, _CONTINUES = 1, 2, 4, 8  # flags
_COUNTS = (
    *(("stream", "<u4"), ("block", "<u4"), ("rows", "<u4"), ("tokens", "<u4"), ("activations", "<u4")),
    *(("documents", "<u4"), ("skipped", "<u4"), ("tokens_cut", "<u8"), ("first_document", "<u8")),
)
DTYPE = np.dtype([*_COUNTS, ("flags", "u1")])


class Block(NamedTuple):
    """The counts of one block; see `CommitRecord`.

    activations: tokens whose activations are stored. skipped: documents left out. first_document: the ordinal, in the
    stream, of the first document. continues: the block begins within that document.
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
    """Blocks in some order. Each count of `Block` is also a column, an array [len(self)]."""

    def __init__(self, values: np.ndarray | None = None) -> None:
        """values: of DTYPE; None for no blocks."""
        self.values = np.empty(0, DTYPE) if values is None else values

    @classmethod
    def from_records(cls, records: Iterable[CommitRecord]) -> "BlockTable":
        return cls(np.array([_row(record) for record in records], DTYPE))

    def __len__(self) -> int:
        return len(self.values)

    @overload
    def __getitem__(self, at: int) -> Block: ...
    @overload
    def __getitem__(self, at: slice | np.ndarray) -> "BlockTable": ...
    def __getitem__(self, at):
        return BlockTable(self.values[at]) if isinstance(at, (slice, np.ndarray)) else _block(self.values[at].item())

    def __iter__(self) -> Iterator[Block]:
        return map(_block, self.values.tolist())

    def column(self, name: str) -> Int64[np.ndarray, " n"]:
        """A count of each block."""
        return self.values[name].astype(np.int64)

    def total(self, name: str) -> int:
        """The sum of a count over all blocks."""
        return int(self.values[name].sum(dtype=np.uint64))

    @property
    def has_statistics(self) -> Bool[np.ndarray, " n"]:
        return (self.values["flags"] & _STATISTICS) != 0

    @property
    def continues(self) -> Bool[np.ndarray, " n"]:
        return (self.values["flags"] & _CONTINUES) != 0

    def with_record(self, record: CommitRecord) -> "BlockTable":
        return BlockTable(np.append(self.values, np.array([_row(record)], DTYPE)))

    def in_row_order(self, num_streams: int) -> "BlockTable":
        """The blocks in the order of their rows in the store."""
        return self[np.argsort(self.column("block") * num_streams + self.column("stream"), kind="stable")]

    def digest(self) -> str:
        """sha256, as hex, of the blocks' counts: the record of a stream's next block has it."""
        return hashlib.sha256(self.values.tobytes()).hexdigest()

    def encode(self) -> bytes:
        """The table as a .npy file, followed by the sha256 of its bytes."""
        file = io.BytesIO()
        np.lib.format.write_array(file, self.values, version=(1, 0), allow_pickle=False)
        return file.getvalue() + hashlib.sha256(file.getbuffer()).digest()

    @classmethod
    def decode(cls, content: bytes) -> "BlockTable | None":
        """None unless this is what `encode` returned."""
        payload = memoryview(content)[:-_SHA256_BYTES]
        if hashlib.sha256(payload).digest() != content[-_SHA256_BYTES:]:
            return None
        size = int.from_bytes(payload[len(_MAGIC) : len(_MAGIC) + 2], "little")
        header, values = payload[len(_MAGIC) + 2 :][:size], payload[len(_MAGIC) + 2 + size :]
        num_blocks, rest = divmod(len(values), DTYPE.itemsize)
        is_sound = payload[: len(_MAGIC)] == _MAGIC and bytes(header).strip() == _header(num_blocks) and not rest
        return cls(np.frombuffer(values, DTYPE)) if is_sound else None


def _header(num_blocks: int) -> bytes:
    """The header of a .npy file, which is compared rather than parsed: anybody may have written it."""
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

    last: the record of the last one; None where there is no block, or the last one has just been withdrawn.
    num_indexed: how many blocks the stream's own block table has, as far as is known.
    """

    table: BlockTable
    last: CommitRecord | None
    num_indexed: int = 0

    @property
    def to_index(self) -> BlockTable:
        """What the stream's own block table has at the end: all blocks but a truncated one, which may be replaced."""
        return self.table[:-1] if len(self.table) and self.table[-1].truncated else self.table

    @property
    def tokens(self) -> int:
        """Valid tokens of all blocks."""
        return self.table.total("tokens")

    def with_record(self, record: CommitRecord) -> "StreamBlocks":
        return StreamBlocks(self.table.with_record(record), record, self.num_indexed)

    def without_last(self) -> "StreamBlocks":
        return StreamBlocks(self.table[:-1], None, self.num_indexed)


NO_BLOCKS = StreamBlocks(BlockTable(), None)


def index_step(num_blocks: int) -> int:
    """A stream's own block table is written when its blocks are a multiple of this power of two: 8 to 64, an eighth of
    them or less. What it lacks takes a request for each block and stream, of ten thousand young streams as well."""
    least, most = _INDEX_STEPS
    return min(max(least, 1 << max(0, num_blocks.bit_length() - 4)), most)


def stream_table_key(stream: int) -> str:
    """The key, relative to the store, of a stream's own block table."""
    return f"{PREFIX}stream-{stream:05d}.npy"


def read_stream(storage: Storage, stream: int, list_all: bool = False) -> StreamBlocks:
    """The committed blocks of a stream, from its block table and the records that this lacks.

    With `list_all` a gap among the earlier records is noticed, at one request for each 1,000 of them. Raises
    StoreInvalid for a damaged record, and for a gap, and StoreError.
    """
    content = storage.read(stream_table_key(stream))
    indexed = (None if content is None else BlockTable.decode(content)) or BlockTable()
    if len(indexed):
        known = len(indexed) - 1  # its last block is compared with its record
        try:
            records = read_stream_records(storage, stream, known, list_all)
        except StoreInvalid:
            records = []
        if records and _agree(indexed, records[0]):
            rest = BlockTable.from_records(records[1:])
            return StreamBlocks(BlockTable(np.concatenate([indexed.values, rest.values])), records[-1], len(indexed))
    records = read_stream_records(storage, stream)
    return StreamBlocks(BlockTable.from_records(records), records[-1] if records else None)


def _agree(indexed: BlockTable, record: CommitRecord) -> bool:
    """Whether a table of a stream's first blocks ends with the block of a record."""
    before = indexed[:-1]
    return (
        indexed[-1] == BlockTable.from_records([record])[0]
        and bool((indexed.values["stream"] == record.stream).all())
        and np.array_equal(indexed.values["block"], np.arange(len(indexed)))
        and record.blocks_before in (None, before.digest())
    )


def read_streams(storage: Storage, streams: Sequence[int], list_all: bool = False) -> dict[int, StreamBlocks]:
    """`read_stream` of several streams, many at once."""
    with ThreadPoolExecutor(min(_STREAMS_AT_ONCE, max(1, len(streams))), "streams") as pool:
        return dict(zip(streams, pool.map(partial(read_stream, storage, list_all=list_all), streams), strict=True))


def join_streams(streams: Mapping[int, StreamBlocks]) -> BlockTable:
    """One table of all streams' blocks, in the order of their rows. The keys are the streams 0, 1, 2, ..."""
    values = [np.empty(0, DTYPE), *(stream.table.values for stream in streams.values())]
    return BlockTable(np.concatenate(values)).in_row_order(len(streams))


def split_streams(table: BlockTable, num_streams: int) -> list[BlockTable]:
    """The inverse of `join_streams`."""
    order = np.argsort(table.values["stream"], kind="stable")
    ends = np.searchsorted(table.values["stream"][order], np.arange(num_streams), side="right")
    return [table[part] for part in np.split(order, ends[:-1])]


def read_table(storage: Storage, sha256: str | None) -> BlockTable | None:
    """The table of a complete store's blocks; None where there is none with this sha256. Raises StoreError."""
    content = None if sha256 is None else storage.read(TABLE_KEY)
    if content is None or table_sha256(content) != sha256:
        return None
    return BlockTable.decode(content)


def table_sha256(content: bytes) -> str:
    """sha256, as hex, of an encoded table: the root of a complete store names it."""
    return hashlib.sha256(content).hexdigest()
