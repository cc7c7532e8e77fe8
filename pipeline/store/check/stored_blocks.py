"""Reads and checks one block of a store."""

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from pipeline.core.errors import StoreError, StoreInvalid
from pipeline.store.check.scope import OpenStore
from pipeline.store.check.stored_objects import MISSING
from pipeline.store.features.index_file import check_index, index_key
from pipeline.store.format.commits import CommitRecord
from pipeline.store.format.layout import ArraySpec
from pipeline.store.format.statistics import read_block_statistics, statistics_key
from pipeline.store.format.tables import decode_table, table_key
from pipeline.store.io.problems import Problem, Remedy
from pipeline.store.io.shards import (
    ABSENT,
    CHECKSUM_BYTES,
    ShardFormat,
    checksum,
    decode_chunk,
    decode_index,
    values_digest,
)

_PIECE_BYTES = 64 << 20  # of a store shard, read at a time

_EXPONENT_ONES = {"bfloat16": 0x7F80, "float16": 0x7C00}
_WITHOUT_SIGN = 0x7FFF
_ROUNDING = 0.01  # by this, rounded outputs may be out of range


@dataclass(frozen=True)
class CheckedBlock:
    """The problems of a block, and its document table; None if that cannot be read."""

    record: CommitRecord
    problems: list[Problem]
    documents: pa.Table | None


def check_block(store: OpenStore, record: CommitRecord) -> CheckedBlock:
    """Reads and checks a block.

    A block with problems in remote storage is checked a second time, since a service may return half an object, or
    report it as missing, and answer correctly the next time.
    """
    first = _check_block_once(store, record)
    return _check_block_once(store, record) if first.problems and store.storage.is_remote else first


def _check_block_once(store: OpenStore, record: CommitRecord) -> CheckedBlock:
    place = (record.stream, record.block)
    problems: list[Problem] = []
    documents = None
    try:
        documents = decode_table(store.storage.read(table_key(*place)), record)
    except StoreError as error:
        problems.append(Problem(table_key(*place), str(error), block=place))
    if record.statistics_sha256:
        try:
            read_block_statistics(store.storage, record)
        except StoreError as error:
            problems.append(Problem(statistics_key(*place), str(error), block=place))
    for spec in store.layout.all_arrays:
        for what, remedy in _check_array(store, spec, record):
            problems.append(Problem(store.layout.shard_key(spec, *place), what, remedy, place))
    for sae in store.root.metadata.encoders:
        if sae["features"] in store.root.metadata.indexed_features:
            key = index_key(sae["features"], *place)
            try:
                check_index(store.storage.read(key), sae["width"], np.dtype(sae["dtype"]), key)
            except StoreError as error:
                problems.append(Problem(key, str(error), block=place))
    return CheckedBlock(record, problems, documents)


def _check_array(store: OpenStore, spec: ArraySpec, record: CommitRecord) -> Iterator[tuple[str, Remedy]]:
    """Yields what is wrong with a block of an array: its checksums, its digest, or the first chunk of wrong values."""
    format = store.layout.shard_format(spec)
    key = store.layout.shard_key(spec, record.stream, record.block)
    absent = checksum(format.fill_chunk)
    checksums, wrong = [], None
    try:
        for number, stored in enumerate(_read_chunks(store, key, format)):
            if stored is None:
                checksums.append(absent)
                continue
            values = decode_chunk(stored, format)
            is_plain = format.compression == "none"
            checksums.append(
                bytes(stored[-CHECKSUM_BYTES:]) if is_plain else checksum(memoryview(values.reshape(-1).view(np.uint8)))
            )
            wrong = wrong or _wrong_values(store, spec, values, number)
    except (StoreError, ValueError) as error:
        yield str(error), Remedy.recompute
        return
    digest, expected = values_digest(checksums), record.digests.get(spec.name)
    if digest != expected:
        yield f"the digest of its values is {digest}, but the block's record has {expected}", Remedy.recompute
    elif wrong:
        yield wrong


def _read_chunks(store: OpenStore, key: str, format: ShardFormat) -> Iterator[memoryview | None]:
    """The stored chunks of a store shard in order, None for one of fill values. Raises ValueError for a damaged index,
    and StoreError."""
    [tail] = store.storage.read_many([key], [(-format.index_bytes, None)])
    if tail is None:
        raise StoreInvalid(MISSING)
    index = decode_index(tail, format).tolist()
    piece, start = memoryview(b""), 0  # the bytes of some chunks, and their offset in the shard
    stops = [offset + size for offset, size in index if size != ABSENT]
    for offset, size in index:
        if size == ABSENT:
            yield None
            continue
        if offset + size > start + len(piece):
            fitting = bisect_right(stops, offset + _PIECE_BYTES)
            stop = max(offset + size, stops[fitting - 1] if fitting else 0)
            [content] = store.storage.read_many([key], [(offset, stop)])
            if content is None or len(content) != stop - offset:
                raise StoreInvalid("changed while it was read")
            piece, start = memoryview(content), offset
        yield piece[offset - start : offset - start + size]


def _wrong_values(store: OpenStore, spec: ArraySpec, values: np.ndarray, number: int) -> tuple[str, Remedy] | None:
    """What is wrong with the values of a chunk, if they are finite activations or outputs in their range."""
    if spec in store.layout.outputs:
        what, remedy = _wrong_outputs(store, spec, values), Remedy.recompute
    elif spec in (*store.layout.arrays, *store.layout.scales) and not store.root.allows_not_finite:
        what, remedy = _not_finite(values), Remedy.other_dtype
    else:
        return None
    row = number * values.shape[1] // store.layout.shard_shape(spec)[1] * len(values)
    return what and (f"rows {row} to {row + len(values) - 1} of the block: {what}", remedy)


def _not_finite(values: np.ndarray) -> str | None:
    if values.dtype.itemsize == 2:  # compares bits, since np.isfinite takes many times as long
        magnitude = np.bitwise_and(values.view(np.uint16), _WITHOUT_SIGN)
        is_finite = magnitude.max(initial=0) < _EXPONENT_ONES[values.dtype.name]
    else:
        is_finite = values.dtype.kind == "i" or np.isfinite(values).all()
    return None if is_finite else f"{np.count_nonzero(~np.isfinite(values.astype(np.float32)))} non-finite values"


def _wrong_outputs(store: OpenStore, spec: ArraySpec, values: np.ndarray) -> str | None:
    """What is wrong if values of `capture.outputs`, or the errors of an SAE's reconstruction, are out of range."""
    vocab_size = store.root.metadata.model.get("vocab_size")
    ranges = {
        "loss": (0, math.inf),
        "entropy": (0, math.log(vocab_size) if type(vocab_size) is int and vocab_size > 0 else math.inf),
        "top_logprobs": (-math.inf, 0),
        "squared_error": (0, math.inf),
        "cosine": (-1, 1),
    }
    name = spec.name.rpartition(".")[2]
    if name not in ranges:
        return None
    least, most = ranges[name]
    bad = (values < least - _ROUNDING) | (values > most + _ROUNDING)
    if not store.root.allows_not_finite:
        # The loss is NaN for the last token of a document's window.
        bad |= np.isinf(values) if name == "loss" else ~np.isfinite(values)
    return f"{np.count_nonzero(bad)} values are not within {least:g} to {most:g}" if bad.any() else None
