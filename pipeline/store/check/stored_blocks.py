"""Reads and checks one block of a store."""

import math
from collections import deque
from collections.abc import Collection, Generator, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import tensorstore as ts

from pipeline.core.errors import StoreError
from pipeline.store.check.block_checks import (
    check_features,
    check_finite,
    check_ids,
    check_output,
    check_padding,
    check_reconstruction,
    check_selected,
    check_selected_of_documents,
    check_side_arrays,
    check_statistics,
    check_table,
    next_in_window,
)
from pipeline.store.features.block_statistics import feature_statistics
from pipeline.store.features.index_file import by_feature, check_index, encode_index, index_key
from pipeline.store.format.commits import CommitRecord
from pipeline.store.format.layout import FEATURE_PARTS, OUTPUT_NAMES, StoreLayout, feature_parts
from pipeline.store.format.metadata import Json, StoreRoot
from pipeline.store.format.problems import Problem, Remedy
from pipeline.store.format.scaled import scale_name
from pipeline.store.format.statistics import (
    BlockStatistics,
    Statistics,
    decode_statistics,
    merge,
    piece_statistics,
    statistics_key,
)
from pipeline.store.format.tables import decode_table, table_key
from pipeline.store.io.digests import ValuesDigest
from pipeline.store.io.storage import Storage
from pipeline.store.read.rows import READS_AHEAD, RowRead, at_selected, slot_side_arrays


@dataclass(frozen=True)
class OpenStore:
    """A store whose root and arrays are readable."""

    storage: Storage
    root: StoreRoot
    layout: StoreLayout
    arrays: Mapping[str, ts.TensorStore]
    num_rows: int  # of the shortest array: an interrupted run may have trimmed only some arrays
    vocab_size: int | None

    @property
    def generates(self) -> bool:
        """Whether documents have completions (data=generate)."""
        return self.root.metadata.data.get("source") == "generate"


@dataclass(frozen=True)
class CheckedBlock:
    """The problems of a block, and those of its parts that could be read (else None).

    table: the document table. statistics: {} if the block has none. running: None also if the block has none.
    """

    record: CommitRecord
    problems: list[Problem]
    table: pa.Table | None
    statistics: BlockStatistics | None
    running: BlockStatistics | None


def check_block(store: OpenStore, record: CommitRecord, missing: Collection[str], only_checksums: bool) -> CheckedBlock:
    """Reads and checks a block.

    A block with problems in remote storage is checked a second time, since a service may return half an object, or
    report it as missing, and answer correctly the next time.

    missing: arrays whose object is known to be missing. only_checksums: do not check whether the arrays' values agree
    with each other.
    """
    first = _check_block_once(store, record, missing, only_checksums)
    is_doubtful = first.problems and store.storage.is_remote
    return _check_block_once(store, record, missing, only_checksums) if is_doubtful else first


def _check_block_once(
    store: OpenStore, record: CommitRecord, missing: Collection[str], only_checksums: bool
) -> CheckedBlock:
    problems: list[Problem] = []
    table, statistics, running = None, {}, None
    try:
        table = decode_table(store.storage.read(table_key(record.stream, record.block)), record)
    except StoreError as error:
        problems.append(Problem(table_key(record.stream, record.block), str(error)))
    if record.statistics_sha256:
        key = statistics_key(record.stream, record.block)
        try:
            statistics, running = decode_statistics(store.storage.read(key), record)
        except StoreError as error:
            problems.append(Problem(key, str(error)))
            statistics = None
    if only_checksums:
        problems += _check_checksums(store, record, missing)
    else:
        problems += _check_arrays(store, record, missing, table, statistics or {})
    return CheckedBlock(record, problems, table, statistics, running)


def _check_checksums(store: OpenStore, record: CommitRecord, missing: Collection[str]) -> Iterator[Problem]:
    """Checks the chunks' checksums, and the digests of a block's arrays."""
    for spec in store.layout.all_arrays:
        if spec.name in missing:
            continue
        key, digest = store.layout.shard_key(spec, record.stream, record.block), _digest(store, spec.name)
        try:
            deque(_read_block(store, spec.name, record, digest), maxlen=0)
        except StoreError as error:
            yield Problem(key, str(error))
            continue
        yield from (Problem(key, what) for what in _compare_digest(record, spec.name, digest))
    for sae in store.root.metadata.encoders if store.root.metadata.indexed_features else ():
        key = index_key(sae["features"], record.stream, record.block)
        value_type = store.arrays[f"{sae['features']}.value"].dtype.numpy_dtype
        try:
            check_index(store.storage.read(key), sae["width"], value_type, key)
        except StoreError as error:
            yield Problem(key, str(error))


def _check_arrays(
    store: OpenStore,
    record: CommitRecord,
    missing: Collection[str],
    table: pa.Table | None,
    statistics: Mapping[str, Statistics],
) -> Iterator[Problem]:
    """Checks a block's arrays, and whether they agree with each other."""
    keys = {spec.name: store.layout.shard_key(spec, record.stream, record.block) for spec in store.layout.all_arrays}
    sides: dict[str, np.ndarray] = {}
    for name in (spec.name for spec in store.layout.side_arrays if spec.name not in missing):
        if (values := (yield from _read_array(store, name, keys[name], record))) is not None:
            sides[name] = values
    if len(sides) < len(store.layout.side_arrays):
        return  # the other arrays cannot be checked without them
    first_row = store.layout.first_row(record.stream, record.block)
    for what in check_side_arrays(sides, record, first_row, store.vocab_size):
        yield Problem(record.key, what)
    if table is not None:
        for what in check_table(table, sides["documents"], record, store.layout.num_streams):
            yield Problem(table_key(record.stream, record.block), what)
    valid, has_next = sides["segments"] > 0, next_in_window(sides["segments"])
    if store.layout.selected is not None:
        wrong = [Problem(keys["selected"], what) for what in check_selected(sides["selected"], valid, record)]
        yield from wrong
        if table is not None and not wrong:
            for what in check_selected_of_documents(table, slot_side_arrays(sides)["documents"]):
                yield Problem(table_key(record.stream, record.block), what)
        valid = sides["selected"] >= 0
        has_next = None if wrong else at_selected(has_next, sides["selected"], fill=0)
    covered = {scale_name(name) for name in statistics}  # statistics count tokens with non-finite scales, too
    for name in (spec.name for spec in (*store.layout.arrays, *store.layout.scales) if spec.name not in missing):
        may_be_not_finite = store.root.allows_not_finite or name in covered
        yield from _check_activations(store, name, keys[name], record, valid, statistics.get(name), may_be_not_finite)
    for name in (name for name in OUTPUT_NAMES if name in keys and name not in missing):
        yield from _check_output(store, name, keys[name], record, valid, has_next)
    for sae in store.root.metadata.encoders:
        yield from _check_features(store, sae, keys, record, missing, valid, statistics.get(sae["features"]))


def _check_activations(
    store: OpenStore,
    name: str,
    key: str,
    record: CommitRecord,
    valid: np.ndarray,
    statistics: Statistics | None,
    may_be_not_finite: bool,
) -> Iterator[Problem]:
    """Checks a block's activations, or their scales. Yields problems of values only for the first bad piece."""
    row, wrong, parts = 0, [], []
    digest = _digest(store, name)
    try:
        scales = _scales(store, name, record) if statistics is not None else None
        for values in _read_block(store, name, record, digest):
            in_piece = valid[row : row + len(values)]
            where = f"rows {row} to {row + len(values) - 1} of the block: "
            if not wrong:
                if statistics is None and not may_be_not_finite:
                    wrong += [Problem(key, where + what, Remedy.other_dtype) for what in check_finite(values)]
                wrong += [Problem(key, where + what) for what in check_padding(values, in_piece)]
            if statistics is not None and in_piece.any():
                piece_scales = None if scales is None else scales[row : row + len(values)][in_piece]
                parts.append(piece_statistics(values[in_piece], piece_scales))
            row += len(values)
    except StoreError as error:
        yield Problem(key, str(error))
        return
    yield from wrong
    yield from (Problem(key, what) for what in _compare_digest(record, name, digest))
    if statistics is not None and parts and not wrong:
        # Before the cast to float16, `lax.reduce_precision` flushes subnormal values to zero; the cast itself does not.
        flushed = float(np.finfo(np.float16).smallest_normal) if store.arrays[name].dtype.name == "float16" else 0.0
        yield from (Problem(key, what) for what in check_statistics(statistics, merge(parts), flushed))


def _check_output(
    store: OpenStore, name: str, key: str, record: CommitRecord, valid: np.ndarray, has_next: np.ndarray | None
) -> Iterator[Problem]:
    """Checks an array of `capture.outputs` in a block. `has_next`: which tokens have a next token; None if unknown."""
    values = yield from _read_array(store, name, key, record)
    if values is None:
        return
    values = values if values.ndim == 3 else values[:, :, None]
    yield from (Problem(key, what) for what in check_padding(values, valid))
    if name == "top_ids":
        yield from (Problem(key, what) for what in check_ids(values, store.vocab_size))
    elif has_next is not None:
        is_defined = has_next if name == "loss" else valid
        wrong = check_output(values, valid, is_defined, store.root.allows_not_finite)
        yield from (Problem(key, what) for what in wrong)


def _check_features(
    store: OpenStore,
    sae: Json,
    keys: Mapping[str, str],
    record: CommitRecord,
    missing: Collection[str],
    valid: np.ndarray,
    statistics: Statistics | None,
) -> Iterator[Problem]:
    """Checks an SAE's arrays in a block, their statistics and their index by feature."""
    is_reconstructed = sae["features"] in store.root.metadata.reconstructed
    names = {part: f"{sae['features']}.{part}" for part in feature_parts(is_reconstructed)}
    parts: dict[str, np.ndarray] = {}
    for part, name in ((part, name) for part, name in names.items() if name not in missing):
        if (values := (yield from _read_array(store, name, keys[name], record))) is not None:
            parts[part] = values
    if len(parts) < len(names):
        return
    step = store.layout.piece_rows(list(names.values()))  # limits the memory for checking
    wrong = []
    for row in range(0, len(valid), step):
        rows = slice(row, row + step)
        piece = (values[rows] for values in (*(parts[part] for part in FEATURE_PARTS), valid))
        for what in check_features(*piece, sae["width"], store.root.allows_not_finite):
            wrong.append(f"rows {row} to {min(row + step, len(valid)) - 1} of the block: {what}")
    yield from (Problem(keys[names["index"]], what) for what in wrong)
    if is_reconstructed:
        errors = check_reconstruction(parts, valid, store.root.allows_not_finite)
        yield from (Problem(keys[names[part]], what) for part, what in errors)
    if wrong:
        return
    matrix = by_feature(parts["index"], parts["value"], sae["width"])
    if statistics is not None:
        computed = feature_statistics(parts, valid, matrix)
        yield from (Problem(keys[names["value"]], what) for what in check_statistics(statistics, computed))
    if sae["features"] in store.root.metadata.indexed_features:
        key = index_key(sae["features"], record.stream, record.block)
        try:
            content = store.storage.read(key)
        except StoreError as error:
            yield Problem(key, str(error))
            return
        if content is None:
            yield Problem(key, "is missing, although the block is committed")
        elif content != encode_index(matrix, key):
            yield Problem(key, "does not agree with the features in the block's arrays")


def _read_array(
    store: OpenStore, name: str, key: str, record: CommitRecord
) -> Generator[Problem, None, np.ndarray | None]:
    """Reads a block of an array. Yields its problems, and returns the values; None if they cannot be read."""
    digest = _digest(store, name)
    try:
        values = np.concatenate(list(_read_block(store, name, record, digest)))
    except StoreError as error:
        yield Problem(key, str(error))
        return None
    yield from (Problem(key, what) for what in _compare_digest(record, name, digest))
    return values


def _scales(store: OpenStore, name: str, record: CommitRecord) -> np.ndarray | None:
    """The scales [R, S, groups] of a scaled array in a block; None if the store has none."""
    if not store.layout.scales:
        return None
    return np.concatenate(list(_read_block(store, scale_name(name), record)))


def _digest(store: OpenStore, name: str) -> ValuesDigest:
    array = store.arrays[name]
    return ValuesDigest(math.prod(array.chunk_layout.read_chunk.shape) * array.dtype.numpy_dtype.itemsize)


def _compare_digest(record: CommitRecord, name: str, digest: ValuesDigest) -> Iterator[str]:
    if record.digests.get(name) != digest.hexdigest():
        yield (
            f"the digest of the values is {digest.hexdigest()}, but the block's record has "
            f"{record.digests.get(name)}: these are not the values that were written"
        )


def _read_block(
    store: OpenStore, name: str, record: CommitRecord, digest: ValuesDigest | None = None
) -> Iterator[np.ndarray]:
    """Reads a block of an array in pieces of whole rows, without rows that trimming has cut off from any array. Adds
    the values of the whole block, including those rows, to `digest`."""
    array = store.arrays[name]
    first = store.layout.first_row(record.stream, record.block)
    stop = min(first + store.layout.rows_per_block, store.num_rows)
    yield np.empty((0, *array.shape[1:]), array.dtype.numpy_dtype)
    reads: deque[tuple[np.ndarray, RowRead]] = deque()
    step = store.layout.piece_rows([name])
    for row in range(first, stop, step):
        out = np.empty((min(step, stop - row), *array.shape[1:]), array.dtype.numpy_dtype)
        reads.append((out, RowRead(array, row, out)))
        if len(reads) > READS_AHEAD:
            yield _finished(*reads.popleft(), digest)
    while reads:
        yield _finished(*reads.popleft(), digest)
    if digest is not None:  # trimmed rows are padding
        num_trimmed = first + store.layout.rows_per_block - max(first, stop)
        fill = np.asarray(array.fill_value, array.dtype.numpy_dtype)
        for _ in range(num_trimmed):
            digest.add_values(np.broadcast_to(fill, array.shape[1:]))


def _finished(values: np.ndarray, read: RowRead, digest: ValuesDigest | None) -> np.ndarray:
    read.wait()
    if digest is not None:
        digest.add_values(values)
    return values
