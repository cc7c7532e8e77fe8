"""Reads and checks one block of a store."""

import math
from collections import deque
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import tensorstore as ts

from pipeline.core.errors import StoreError
from pipeline.store.check.block_checks import (
    check_features,
    check_finite,
    check_output,
    check_padding,
    check_selected,
    check_selected_of_documents,
    check_side_arrays,
    check_table,
)
from pipeline.store.features.index_file import by_feature, check_index, encode_index, index_key
from pipeline.store.format.commits import CommitRecord
from pipeline.store.format.layout import ERROR_PARTS, FEATURE_PARTS, OUTPUT_NAMES, StoreLayout
from pipeline.store.format.metadata import Json, StoreRoot
from pipeline.store.format.problems import Problem, Remedy
from pipeline.store.format.statistics import decode_statistics, statistics_key
from pipeline.store.format.tables import decode_table, table_key
from pipeline.store.io.digests import ValuesDigest
from pipeline.store.io.storage import Storage
from pipeline.store.read.rows import READS_AHEAD, RowRead, slot_side_arrays


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
    """The problems of a block, and its document table; None if that cannot be read."""

    record: CommitRecord
    problems: list[Problem]
    table: pa.Table | None


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
    table = None
    try:
        table = decode_table(store.storage.read(table_key(record.stream, record.block)), record)
    except StoreError as error:
        problems.append(Problem(table_key(record.stream, record.block), str(error)))
    if record.statistics_sha256:
        key = statistics_key(record.stream, record.block)
        try:
            decode_statistics(store.storage.read(key), record)
        except StoreError as error:
            problems.append(Problem(key, str(error)))
    if only_checksums:
        for name in (spec.name for spec in store.layout.all_arrays if spec.name not in missing):
            problems += _check_values(store, name, record, None)
        for sae in store.root.metadata.encoders:
            problems += _check_index(store, sae, record)
    else:
        problems += _check_arrays(store, record, missing, table)
    return CheckedBlock(record, problems, table)


def _check_arrays(
    store: OpenStore, record: CommitRecord, missing: Collection[str], table: pa.Table | None
) -> Iterator[Problem]:
    """Checks a block's arrays, and whether they agree with each other."""
    sides: dict[str, np.ndarray] = {}
    for name in (spec.name for spec in store.layout.side_arrays if spec.name not in missing):
        if (values := (yield from _read_array(store, name, record))) is not None:
            sides[name] = values
    if len(sides) < len(store.layout.side_arrays):
        return  # the other arrays cannot be checked without them
    first_row = store.layout.first_row(record.stream, record.block)
    for what in check_side_arrays(sides, record, first_row, store.vocab_size):
        yield Problem(record.key, what)
    if table is not None:
        for what in check_table(table, sides["documents"], record, store.layout.num_streams):
            yield Problem(table_key(record.stream, record.block), what)
    valid = sides["segments"] > 0
    if store.layout.selected is not None:
        key = _key(store, "selected", record)
        wrong = [Problem(key, what) for what in check_selected(sides["selected"], valid, record)]
        yield from wrong
        if table is not None and not wrong:
            for what in check_selected_of_documents(table, slot_side_arrays(sides)["documents"]):
                yield Problem(table_key(record.stream, record.block), what)
        valid = sides["selected"] >= 0
    for name in (spec.name for spec in (*store.layout.arrays, *store.layout.scales) if spec.name not in missing):
        yield from _check_values(store, name, record, valid)
    for spec in store.layout.outputs:
        part = spec.name.rpartition(".")[2]
        if part in (*OUTPUT_NAMES, *ERROR_PARTS) and spec.name not in missing:
            yield from _check_output(store, spec.name, part, record, valid)
    for sae in store.root.metadata.encoders:
        yield from _check_features(store, sae, record, missing, valid)


def _check_values(store: OpenStore, name: str, record: CommitRecord, valid: np.ndarray | None) -> Iterator[Problem]:
    """Checks an array's checksums and digest and, given the `valid` slots, that activations or scales are finite, and
    zero in other slots. Yields problems of values only for the first bad piece."""
    key, digest = _key(store, name, record), _digest(store, name)
    row, wrong = 0, []
    try:
        for values in _read_block(store, name, record, digest):
            if valid is not None and not wrong:
                where = f"rows {row} to {row + len(values) - 1} of the block: "
                if not store.root.allows_not_finite:
                    wrong += [Problem(key, where + what, Remedy.other_dtype) for what in check_finite(values)]
                wrong += [Problem(key, where + what) for what in check_padding(values, valid[row : row + len(values)])]
            row += len(values)
    except StoreError as error:
        yield Problem(key, str(error))
        return
    yield from wrong
    yield from (Problem(key, what) for what in _compare_digest(record, name, digest))


def _check_output(store: OpenStore, name: str, part: str, record: CommitRecord, valid: np.ndarray) -> Iterator[Problem]:
    """Checks an array of `capture.outputs`, or of the errors of an SAE, in a block."""
    values = yield from _read_array(store, name, record)
    if values is not None:
        wrong = check_output(part, values, valid, store.vocab_size, store.root.allows_not_finite)
        yield from (Problem(_key(store, name, record), what) for what in wrong)


def _check_features(
    store: OpenStore, sae: Json, record: CommitRecord, missing: Collection[str], valid: np.ndarray
) -> Iterator[Problem]:
    """Checks an SAE's features in a block, and their index."""
    names = [f"{sae['features']}.{part}" for part in FEATURE_PARTS]
    parts: list[np.ndarray] = []
    for name in (name for name in names if name not in missing):
        if (values := (yield from _read_array(store, name, record))) is not None:
            parts.append(values)
    if len(parts) < len(names):
        return
    step = store.layout.piece_rows(names)  # limits the memory for checking
    wrong = []
    for row in range(0, len(valid), step):
        piece = (values[row : row + step] for values in (*parts, valid))
        where = f"rows {row} to {min(row + step, len(valid)) - 1} of the block: "
        wrong += [where + what for what in check_features(*piece, sae["width"], store.root.allows_not_finite)]
    yield from (Problem(_key(store, names[0], record), what) for what in wrong)
    if not wrong:
        yield from _check_index(store, sae, record, parts)


def _check_index(
    store: OpenStore, sae: Json, record: CommitRecord, parts: Sequence[np.ndarray] = ()
) -> Iterator[Problem]:
    """Checks an SAE's index by feature in a block: that it agrees with `parts`, the index and the values of the block's
    features or, without these, its checksums."""
    if sae["features"] not in store.root.metadata.indexed_features:
        return
    key = index_key(sae["features"], record.stream, record.block)
    try:
        content = store.storage.read(key)
        if content is None or not parts:
            value_type = store.arrays[f"{sae['features']}.value"].dtype.numpy_dtype
            check_index(content, sae["width"], value_type, key)
        elif content != encode_index(by_feature(*parts[:2], sae["width"]), key):
            yield Problem(key, "does not agree with the features in the block's arrays")
    except StoreError as error:
        yield Problem(key, str(error))


def _read_array(store: OpenStore, name: str, record: CommitRecord) -> Generator[Problem, None, np.ndarray | None]:
    """Reads a block of an array. Yields its problems, and returns the values; None if they cannot be read."""
    key, digest = _key(store, name, record), _digest(store, name)
    try:
        values = np.concatenate(list(_read_block(store, name, record, digest)))
    except StoreError as error:
        yield Problem(key, str(error))
        return None
    yield from (Problem(key, what) for what in _compare_digest(record, name, digest))
    return values


def _key(store: OpenStore, name: str, record: CommitRecord) -> str:
    spec = next(spec for spec in store.layout.all_arrays if spec.name == name)
    return store.layout.shard_key(spec, record.stream, record.block)


def _digest(store: OpenStore, name: str) -> ValuesDigest:
    array = store.arrays[name]
    return ValuesDigest(math.prod(array.chunk_layout.read_chunk.shape) * array.dtype.numpy_dtype.itemsize)


def _compare_digest(record: CommitRecord, name: str, digest: ValuesDigest) -> Iterator[str]:
    if record.digests.get(name) != digest.hexdigest():
        yield (
            f"the digest of the values is {digest.hexdigest()}, but the block's record has "
            f"{record.digests.get(name)}: these are not the values that were written"
        )


def _read_block(store: OpenStore, name: str, record: CommitRecord, digest: ValuesDigest) -> Iterator[np.ndarray]:
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
    num_trimmed = first + store.layout.rows_per_block - max(first, stop)  # these rows are padding
    fill = np.asarray(array.fill_value, array.dtype.numpy_dtype)
    for _ in range(num_trimmed):
        digest.add_values(np.broadcast_to(fill, array.shape[1:]))


def _finished(values: np.ndarray, read: RowRead, digest: ValuesDigest) -> np.ndarray:
    read.wait()
    digest.add_values(values)
    return values
