"""Small stores with known content: documents of given lengths, packed greedily, with activations that identify tokens.

Shapes: R rows of a block, T positions of a row.
"""

import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType

import ml_dtypes
import numpy as np
import pyarrow as pa
import tensorstore as ts

from pipeline.core.sites import ActivationKey
from pipeline.data.documents import DOCUMENT_SCHEMA
from pipeline.store import Batch
from pipeline.store.format.commits import CommitRecord
from pipeline.store.format.layout import LARGEST, TOKENS, StoreLayout, activation_spec, scale_name, scale_spec
from pipeline.store.format.metadata import StoreMetadata
from pipeline.store.format.statistics import BlockStatistics, Statistics, token_statistics
from pipeline.store.indexes.ids import index_ids
from pipeline.store.io.parsing import json_digest
from pipeline.store.io.storage import Storage, StorageLike
from pipeline.store.write.store_writer import StoreWriter
from tests.jobs import without_writer

VOCAB_SIZE = 97
NUM_STREAMS = 2
ROWS = 4  # per block
LENGTH = 8
WIDTHS = {"blocks.1.resid_post": 6, "blocks.3.resid_post": 6, "embed": 4}
CAPTURE = {"arrays": list(WIDTHS), "dtype": "bfloat16", "statistics": False}

PART_BYTES = 24
"""`shard_bytes` with which a store shard is half a row of activations or of `documents`, or a row of `tokens`."""

Image = Mapping[str, bytes]
"""The objects of a store, by key."""

# By stream: documents shorter and longer than a row, and longer than a block.
DOCUMENT_LENGTHS = ((5, 3, 20, 1, 8, 60, 2, 7, 9), (30, 4, 4, 11))


@dataclass(frozen=True)
class Block:
    """The writer's input for one block."""

    arrays: dict[str, np.ndarray]
    table: pa.Table
    record: CommitRecord


def layout(compression: str = "none", dtype: str = "bfloat16", shard_bytes: int | None = None) -> StoreLayout:
    keys = map(ActivationKey.parse, WIDTHS)
    specs = tuple(activation_spec(key, key.hook_name(), WIDTHS[key.name], dtype, TOKENS.slots) for key in keys)
    scales = tuple(scale_spec(spec, 1) for spec in specs) if dtype in LARGEST else ()
    return StoreLayout(NUM_STREAMS, ROWS, LENGTH, specs, compression, scales=scales, shard_bytes=shard_bytes)


def metadata(**changes) -> StoreMetadata:
    base = StoreMetadata(
        model={"path": "qwen", "vocab_size": VOCAB_SIZE},
        tokenizer={"sha256": "abc"},
        data={"source": "parquet", "shards": ["a", "b"]},
        batch={"length": LENGTH, "packing": "pack"},
        capture=CAPTURE,
        store={"compression": "none", "path": "/somewhere", "shard_mib": 64.0},
        num_streams=NUM_STREAMS,
        rows_per_block=ROWS,
        config={"run": {"max_tokens": 0}},
    )
    return replace(base, **changes)


def token_ids(document: np.ndarray, token: np.ndarray) -> np.ndarray:
    return (document * 31 + token * 7) % (VOCAB_SIZE - 1) + 1


def activation(name: str, document: np.ndarray, token: np.ndarray, dtype: str = "bfloat16") -> np.ndarray:
    """[..., D]: the token's document, its index there, its id, and the array's width; all are exact in bfloat16."""
    width = WIDTHS[name]
    values = [document % 128 + 1, token % 128, token_ids(document, token), np.full_like(document, width)]
    return np.stack([values[k % 4] for k in range(width)], axis=-1).astype(ml_dtypes.bfloat16).astype(dtype)


def blocks(stream: int, max_blocks: int | None = None, dtype: str = "bfloat16") -> Iterator[Block]:
    """The first blocks of a stream, in order; all if `max_blocks` is None."""
    lengths = DOCUMENT_LENGTHS[stream]
    rows = list(_rows(lengths))
    for block, first in enumerate(range(0, len(rows), ROWS)[:max_blocks]):
        stop = min(first + ROWS, len(rows))
        start, next_cursor = _cursor(rows, first, lengths), _cursor(rows, stop, lengths)
        yield _block(stream, block, rows[first:stop], start, next_cursor, exhausted=stop == len(rows), dtype=dtype)


def statistics_of(block: Block) -> dict[str, Statistics]:
    valid = block.arrays["segments"] > 0
    return {name: token_statistics(block.arrays[name][valid].astype(np.float32)) for name in WIDTHS}


def commit_block(writer: StoreWriter, block: Block, statistics: BlockStatistics | None = None) -> CommitRecord:
    return writer.start_block(block.record, block.arrays, block.table, lambda _: (statistics, {})).result()


def write_blocks(writer: StoreWriter, stream: int, max_blocks: int | None = None, dtype: str = "bfloat16") -> None:
    """Writes the stream's blocks that the store lacks."""
    for block in list(blocks(stream, max_blocks, dtype))[len(writer.streams[stream].table) :]:
        commit_block(writer, block)


def write_store(
    place: StorageLike,
    finish: bool = True,
    max_blocks: int | None = None,
    compression: str = "none",
    dtype: str = "bfloat16",
    shard_bytes: int | None = None,
) -> StoreWriter:
    made = metadata(store=store_settings(compression, shard_bytes), capture=CAPTURE | {"dtype": dtype})
    writer = StoreWriter.open(place, made, layout(compression, dtype, shard_bytes))
    if writer.complete:
        writer.reopen()
    for stream in range(NUM_STREAMS):
        write_blocks(writer, stream, max_blocks, dtype)
    if finish:
        writer.finish()
    return writer


def store_settings(compression: str, shard_bytes: int | None) -> dict[str, str | int]:
    return {"compression": compression} | ({} if shard_bytes is None else {"shard_bytes": shard_bytes})


def copy_store(
    path: str, finish: bool = True, max_blocks: int | None = None, compression: str = "none", dtype: str = "bfloat16"
) -> None:
    """Makes the store of `write_store` at an empty path by copying, which takes a tenth of the time."""
    write_image(path, _image(finish, max_blocks, compression, dtype))


@cache
def _image(finish: bool, max_blocks: int | None, compression: str, dtype: str) -> Image:
    with in_memory() as path:
        write_store(path, finish, max_blocks, compression, dtype)
        return read_image(path)


@cache
def full_image(kind: str = "int8") -> Image:
    """The objects of the finished store with statistics and an index of ids. kind: int8; zstd for compressed bfloat16;
    or parts for int8 with several store shards per block."""
    dtype, compression = ("bfloat16", "zstd") if kind == "zstd" else ("int8", "none")
    shard_bytes = PART_BYTES if kind == "parts" else None
    capture = {**CAPTURE, "dtype": dtype, "statistics": True}
    made = metadata(store=store_settings(compression, shard_bytes), capture=capture)
    with in_memory() as path:
        writer = StoreWriter.open(path, made, layout(compression, dtype, shard_bytes))
        complete_full_store(writer)
        index_ids(writer.storage)
        return read_image(path)


def complete_full_store(writer: StoreWriter) -> None:
    """Writes what a store of `full_image` lacks, as its job would."""
    if writer.complete:
        return
    dtype = writer.metadata.capture["dtype"]
    for stream in range(NUM_STREAMS):
        for block in list(blocks(stream, dtype=dtype))[len(writer.streams[stream].table) :]:
            commit_block(writer, block, statistics_of(block))
    writer.finish()


def read_image(path: str) -> Image:
    storage = Storage.open(path)
    keys = storage.list_keys()
    return dict(zip(keys, storage.read_many(keys), strict=True))


def write_image(path: str, image: Image) -> None:
    storage = Storage.open(path)
    for future in [storage.kvstore.write(key, content) for key, content in image.items()]:
        future.result()


@contextmanager
def in_memory(image: Image = MappingProxyType({})) -> Iterator[str]:
    """The path of a store with these objects, which are deleted on exit."""
    path = f"memory://{uuid.uuid4().hex}"
    write_image(path, image)
    try:
        yield path
    finally:
        Storage.open(path).kvstore.delete_range(ts.KvStore.KeyRange()).result()


def comparable_image(path: str) -> Image:
    """Every object of a store, without the time of creation and the writing processes."""
    image = read_image(path)
    root = json.loads(image["zarr.json"])
    del root["attributes"]["activation_store"]["created"]
    del root["attributes"]["activation_store"]["sha256"]
    records = {key: without_writer(content) for key, content in image.items() if key.startswith("_commits/")}
    return {**image, **records, "zarr.json": json.dumps(root).encode()}


def flip(place: StorageLike, key: str, offset: int = -1) -> None:
    """Inverts a byte of an object."""
    storage = Storage.open(place)
    content = bytearray(storage.read(key))
    content[offset] ^= 0xFF
    storage.write(key, bytes(content))


def edit_root(place: StorageLike, edit: Callable[[dict], object]) -> None:
    """Edits the attributes of the root and updates its checksum."""
    storage = Storage.open(place)
    storage.write("zarr.json", edited_root(storage.read("zarr.json"), edit))


def edited_root(text: bytes, edit: Callable[[dict], object]) -> bytes:
    root = json.loads(text)
    attributes = root["attributes"]["activation_store"]
    edit(attributes)
    del attributes["sha256"]
    attributes["sha256"] = json_digest(root)
    return json.dumps(root).encode()


def stored_tokens(max_blocks: int | None = None) -> int:
    return sum(block.record.tokens for stream in range(NUM_STREAMS) for block in blocks(stream, max_blocks))


def tokens_of(batches: Iterable[Batch]) -> list[tuple[int, int]]:
    """(document, token id) of every token of the batches, as in `all_tokens`."""
    return [pair for b in batches for pair in zip(b.documents.tolist(), b.tokens.tolist(), strict=True)]


def all_tokens() -> list[tuple[int, int]]:
    """(document, token id) of every stored token, in the order of their rows."""
    found = []
    order = {layout().first_row(s, b.record.block): b for s in range(NUM_STREAMS) for b in blocks(s)}
    for shard in sorted(order):
        arrays = order[shard].arrays
        valid = arrays["segments"] > 0
        found += zip(arrays["documents"][valid].tolist(), arrays["tokens"][valid].tolist(), strict=True)
    return found


def _rows(lengths: Sequence[int]) -> Iterator[list[tuple[int, int, int]]]:
    """Rows as lists of (ordinal, first token, last token). A document continues in the next row."""
    row: list[tuple[int, int, int]] = []
    room = LENGTH
    for ordinal, length in enumerate(lengths):
        first = 0
        while first < length:
            last = min(length, first + room)
            row.append((ordinal, first, last))
            room -= last - first
            first = last
            if not room:
                yield row
                row, room = [], LENGTH
    if row:
        yield row


def _cursor(rows: list[list[tuple[int, int, int]]], row: int, lengths: Sequence[int]) -> dict[str, int]:
    if row == len(rows):
        return {"shard": 1, "document": 0, "token": 0, "ordinal": len(lengths)}
    ordinal, first, _ = rows[row][0]
    return {"shard": 0, "document": ordinal, "token": first, "ordinal": ordinal}


def _block(
    stream: int,
    block: int,
    rows: list[list[tuple[int, int, int]]],
    start: dict[str, int],
    next_cursor: dict[str, int],
    exhausted: bool,
    dtype: str,
) -> Block:
    shape = (ROWS, LENGTH)
    arrays = {name: np.zeros(shape, np.int32) for name in ("tokens", "segments", "positions")}
    arrays["documents"] = np.full(shape, -1, np.int64)
    arrays |= {name: np.zeros((*shape, width), dtype) for name, width in WIDTHS.items()}
    if dtype in LARGEST:
        arrays |= {scale_name(name): np.ones((*shape, 1), np.float32) for name in WIDTHS}
    ranges: dict[int, tuple[int, int]] = {}
    for r, row in enumerate(rows):
        column = 0
        for segment, (ordinal, first, last) in enumerate(row, 1):
            place = (r, slice(column, column + last - first))
            token = np.arange(first, last)
            document = np.full_like(token, ordinal * NUM_STREAMS + stream)
            arrays["tokens"][place] = token_ids(document, token)
            arrays["segments"][place] = segment
            arrays["positions"][place] = token - first
            arrays["documents"][place] = document
            for name in WIDTHS:
                arrays[name][place] = activation(name, document, token, dtype)
            column += last - first
            ranges[ordinal] = (ranges.get(ordinal, (first, 0))[0], last)
    table = pa.table(
        {
            "document": [ordinal * NUM_STREAMS + stream for ordinal in ranges],
            "id": [f"stream {stream} document {ordinal}" for ordinal in ranges],
            "source": [f"file {stream}"] * len(ranges),
            "index": list(ranges),
            "n_tokens": [DOCUMENT_LENGTHS[stream][ordinal] for ordinal in ranges],
            "n_cut": [0] * len(ranges),
            "first_token": [first for first, _ in ranges.values()],
            "last_token": [last for _, last in ranges.values()],
            "url": [f"https://example.org/{ordinal}" for ordinal in ranges],
        },
        schema=DOCUMENT_SCHEMA.append(pa.field("url", pa.string())),
    )
    tokens = int(np.count_nonzero(arrays["segments"]))
    record = CommitRecord(
        stream=stream,
        block=block,
        rows=len(rows),
        tokens=tokens,
        activations=tokens,
        documents=table.num_rows,
        tokens_cut=0,
        skipped=({"source": "file", "index": 3, "reason": "empty"},) if block == 0 else (),
        start=start,
        next=next_cursor,
        exhausted=exhausted,
    )
    return Block(arrays, table, record)
