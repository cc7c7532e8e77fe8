"""Reads and checks a store's objects: those of one block, those that blocks share, and listings of all."""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from pipeline.core.errors import StoreError, StoreInvalid
from pipeline.store.check.records import StreamRecords
from pipeline.store.check.scope import OpenStore, Scope
from pipeline.store.format.arrays import array_key, parse_rows
from pipeline.store.format.commits import COMMITS_PREFIX, CommitRecord, commit_key, read_commit_records
from pipeline.store.format.keys import index_prefix, parse_key
from pipeline.store.format.layout import ArraySpec, StoreLayout
from pipeline.store.format.statistics import (
    STATISTICS_PREFIX,
    decode_statistics,
    read_stream_statistics,
    statistics_key,
)
from pipeline.store.format.summary import IDS, IDS_BYTES, STATISTICS, summary_key
from pipeline.store.format.tables import TABLES_PREFIX, decode_table, table_key
from pipeline.store.indexes.features import check_index, index_key
from pipeline.store.io.ahead import map_ahead
from pipeline.store.io.local_files import file_problem
from pipeline.store.io.problems import Problem, Remedy, reported
from pipeline.store.io.shards import decoded_chunks, values_digest
from pipeline.store.io.storage import Storage

_MISSING = "is missing, although the block is committed"
_PIECE_BYTES = 64 << 20  # of an object, read at a time
_KINDS_AT_ONCE = 2  # a listing holds the keys of an array

_EXPONENT_ONES = {"bfloat16": 0x7F80, "float16": 0x7C00}
_WITHOUT_SIGN = 0x7FFF
_ROUNDING = 0.01  # by this, rounded outputs may be out of range


def check_listings(store: OpenStore, scope: Scope, streams: Mapping[int, StreamRecords]) -> Iterator[Problem]:
    """Finds missing objects of the scope's blocks that are not read, and objects that belong to no committed block.

    Lists all keys, whatever the scope: a stream has every `num_streams`-th store shard, which no prefix selects.
    """
    layout, encoded = store.layout, store.root.metadata.indexed_features
    kinds: dict[str, Callable[[int, int], list[str]]] = {  # by prefix: the keys of a block's objects
        **{f"{spec.name}/c.": partial(_shard_keys, layout, spec) for spec in layout.all_arrays},
        COMMITS_PREFIX: lambda *place: [commit_key(*place)],
        TABLES_PREFIX: lambda *place: [table_key(*place)],
        **({STATISTICS_PREFIX: lambda *place: [statistics_key(*place)]} if store.root.metadata.has_statistics else {}),
        **{index_prefix(name): lambda *place, name=name: [index_key(name, *place)] for name in encoded},
    }

    def check_kind(prefix: str) -> list[Problem]:
        keys_of, stored, problems = kinds[prefix], set(store.storage.list_keys(prefix)), []
        for stream, records in streams.items():
            for block in records.listed.tolist():
                keys = keys_of(stream, block)
                for key in () if scope.reads_block(stream, block) else set(keys) - stored:
                    what = file_problem(store.storage.directory, key) or _MISSING  # listings omit folders
                    problems.append(Problem(key, what, block=(stream, block)))
                stored.difference_update(keys)
        for key in sorted(stored):
            owner = _owner(key, layout)
            is_own = owner is not None and key in keys_of(*owner)
            if scope.has_stream(owner[0]) if is_own else scope.is_first:
                problems.append(Problem(key, "belongs to no committed block", Remedy.discard))
        return problems

    yield from chain.from_iterable(map_ahead(check_kind, kinds, _KINDS_AT_ONCE))


def _shard_keys(layout: StoreLayout, spec: ArraySpec, stream: int, block: int) -> list[str]:
    """The keys of a block's store shards, in the order of its values."""
    return [layout.shard_key(spec, stream, block, part) for part in range(layout.num_parts(spec))]


def _owner(key: str, layout: StoreLayout) -> tuple[int, int] | None:
    """The stream and block of a block's object, from its key; None for any other key."""
    if (parsed := parse_key(key)) is None:
        return None
    for spec in layout.all_arrays:
        if spec.name == parsed.folder:
            return layout.shard_place(spec, parsed.number, parsed.column)
    return None if parsed.stream is None else (parsed.stream, parsed.number)


def check_arrays(store: OpenStore, num_rows: int | None) -> list[Problem]:
    """Checks the zarr.json of every array, which a store has once it is finished. num_rows: in a complete store, up to
    the last row with tokens."""
    problems: list[Problem] = []
    for spec in store.layout.all_arrays:
        key = array_key(spec.name)

        def parse(key: str, content: bytes | None, spec: ArraySpec = spec) -> int:
            is_unfinished = content is None and not store.root.complete
            return 0 if is_unfinished else parse_rows(content, store.layout, spec, key)

        with reported(problems, key, Remedy.finish):
            [rows] = store.storage.read_checked([key], parse)
            if num_rows is not None and rows != num_rows:
                raise StoreInvalid(f"has {rows} rows, but the last committed row is {num_rows - 1}")
    return problems


def check_summary(store: OpenStore) -> list[Problem]:
    """Checks that the merged statistics and the index of ids are those that the root names."""
    summary, problems = store.root.summary or {}, list[Problem]()
    if sha256 := summary.get(STATISTICS):
        key = summary_key(STATISTICS, sha256)
        with reported(problems, key, Remedy.finish):
            next(store.storage.read_checked([key], lambda key, content: decode_statistics(content, key, sha256)))
    if sha256 := summary.get(IDS):
        with reported(problems, key := summary_key(IDS, sha256), Remedy.finish):
            _require_sha256(store.storage, key, summary[IDS_BYTES], sha256)
    return problems


def _require_sha256(storage: Storage, key: str, size: int, expected: str) -> None:
    """Raises StoreError unless an object's first `size` bytes have this sha256."""
    digest = hashlib.sha256()
    for start in range(0, size, _PIECE_BYTES):  # a range beyond the end is an error
        [content] = storage.read_many([key], [(start, min(start + _PIECE_BYTES, size))])
        digest.update(content or b"")
    if digest.hexdigest() != expected:
        raise StoreInvalid(f"its sha256 is {digest.hexdigest()}, in the root {expected}")


def check_block(store: OpenStore, stream: int, block: int) -> list[Problem]:
    """Reads and checks a block. Returns its problems.

    A block with problems in remote storage is checked a second time, since a service may return half an object, or
    report it as missing, and answer correctly the next time.
    """
    problems = _check_block_once(store, stream, block)
    return _check_block_once(store, stream, block) if problems and store.storage.is_remote else problems


def _check_block_once(store: OpenStore, stream: int, block: int) -> list[Problem]:
    place, storage = (stream, block), store.storage
    try:
        record = next(read_commit_records(storage, [place]))
    except StoreError as error:
        return [Problem(commit_key(*place), str(error), block=place)]
    checks: dict[str, Callable[[], Any]] = {
        table_key(*place): lambda: decode_table(storage.read(table_key(*place)), record)
    }
    if record.statistics_sha256:
        checks[statistics_key(*place)] = lambda: read_stream_statistics(storage, record)
    for sae in store.root.metadata.encoders if store.root.metadata.indexed_features else ():
        checks[index_key(sae["features"], *place)] = partial(_check_index, storage, sae, place)
    problems: list[Problem] = []
    for key, check in checks.items():
        with reported(problems, key, block=place):
            check()
    for spec in store.layout.all_arrays:
        problems += _check_array(store, spec, record)
    return problems


def _check_index(storage: Storage, sae: Mapping[str, Any], place: tuple[int, int]) -> None:
    key = index_key(sae["features"], *place)
    check_index(storage.read(key), sae["width"], np.dtype(sae["dtype"]), key)


def _check_array(store: OpenStore, spec: ArraySpec, record: CommitRecord) -> list[Problem]:
    """What is wrong with a block of an array: its checksums, its digest, or the first chunk of wrong values."""
    format, place = store.layout.shard_format(spec), (record.stream, record.block)
    keys = _shard_keys(store.layout, spec, *place)
    checksums, wrong, damaged = [], [], []
    for key in keys:
        try:
            for values, chunk_checksum in decoded_chunks(partial(_read_part, store.storage, key), format):
                checksums.append(chunk_checksum)
                if values is not None and not wrong:
                    found = _wrong_values(store, spec, values, len(checksums) - 1)
                    wrong = [Problem(key, *found, place)] if found else []
        except (StoreError, ValueError) as error:
            damaged.append(Problem(key, str(error), Remedy.recompute, place))
    digest, expected = values_digest(checksums), record.digests.get(spec.name)
    if damaged or digest == expected:
        return damaged or wrong
    what = f"the digest of the block's values is {digest}, but the block's record has {expected}"
    return [Problem(key, what, Remedy.recompute, place) for key in keys]


def _read_part(storage: Storage, key: str, start: int, stop: int | None) -> bytes:
    """Bytes of a store shard. Raises StoreError."""
    [content] = storage.read_many([key], [(start, stop)])
    if content is None:
        raise StoreInvalid(_MISSING)
    return content


def _wrong_values(store: OpenStore, spec: ArraySpec, values: np.ndarray, number: int) -> tuple[str, Remedy] | None:
    """What is wrong with the values of a chunk of activations or outputs."""
    if spec in store.layout.outputs:
        what, remedy = _wrong_outputs(store, spec, values), Remedy.recompute
    elif spec in (*store.layout.arrays, *store.layout.scales) and not store.root.may_be_not_finite:
        what, remedy = _not_finite(values), Remedy.other_dtype
    else:
        return None
    row = number * values.shape[1] // store.layout.block_shape(spec)[1] * len(values)
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
    if not store.root.may_be_not_finite:
        # The loss is NaN for the last token of a document's window.
        bad |= np.isinf(values) if name == "loss" else ~np.isfinite(values)
    return f"{np.count_nonzero(bad)} values are not within {least:g} to {most:g}" if bad.any() else None
