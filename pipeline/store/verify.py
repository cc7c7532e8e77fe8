"""Verifying a store: every record, every object, every checksum, and that everything is aligned."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np
import pyarrow as pa
import tensorstore as ts

from pipeline.errors import StoreError, StoreInvalid
from pipeline.store.arrays import open_existing
from pipeline.store.checks import (
    check_chain,
    check_finite,
    check_padding,
    check_selected,
    check_selected_of_documents,
    check_side_arrays,
    check_table,
    check_tiling,
)
from pipeline.store.commits import (
    COMMITS_PREFIX,
    CONSOLIDATED_KEY,
    CommitRecord,
    consolidate,
    consolidated_digest,
    parse_commit_key,
)
from pipeline.store.groups import check_groups
from pipeline.store.kvstore import list_keys, open_kvstore, read_key, read_keys
from pipeline.store.layout import MAX_ROWS, POSITIONS, SIDE_ARRAYS, StoreLayout
from pipeline.store.metadata import ROOT_KEY, StoreRoot, stored_layout
from pipeline.store.problems import Problem, Remedy
from pipeline.store.rows import READS_AHEAD, beside_activations, start_read, wait_read
from pipeline.store.statistics import STATISTICS_PREFIX, decode_statistics, statistics_key
from pipeline.store.tables import TABLES_PREFIX, decode_table, table_key

# Of each, READS_AHEAD pieces are under way: enough to keep an object store busy, and both memory and threads few.
BLOCKS_AT_ONCE = 4


@dataclass(frozen=True)
class _Store:
    """A store whose root and arrays are readable."""

    path: str
    kvstore: ts.KvStore
    root: StoreRoot
    layout: StoreLayout
    arrays: Mapping[str, ts.TensorStore]
    num_rows: int  # that every array has: an interruption leaves some trimmed, others not
    objects: Mapping[str, frozenset[str]]  # of each array, its store shards
    vocab_size: int | None

    @property
    def may_be_not_finite(self) -> bool:
        return self.root.metadata.config.get("capture", {}).get("on_not_finite") == "warn"


def verify_store(path: str, progress: Callable[[int, int], None] | None = None) -> list[Problem]:
    """Everything that is wrong with the committed blocks of a store; an empty list when it is sound.

    `progress` is called with the number of blocks that are checked and the number of all. What is damaged is a
    Problem. Raises StoreInvalid where there is no store, and StoreError where it cannot be reached.
    """
    kvstore = open_kvstore(path)
    text = read_key(kvstore, ROOT_KEY)
    if text is None:
        raise StoreInvalid(f"there is no activation store at {path}: it has no {ROOT_KEY}.")
    try:
        root = StoreRoot.from_json(text, path)
    except StoreError as error:
        return [Problem(ROOT_KEY, str(error), Remedy.restore)]
    problems: list[Problem] = []
    records = _read_records(kvstore, problems)
    problems += _check_records(root, records)
    problems += _check_consolidated(kvstore, root, records)
    arrays = _open_arrays(kvstore, root, problems)
    if arrays is None:
        return problems
    store = _describe(path, kvstore, root, arrays)
    wrong, readable = _check_arrays(store, records)
    problems += wrong
    if root.complete:
        problems += _check_leftovers(store)
    if not readable:
        return problems
    total, done = sum(map(len, records.values())), 0
    every = [record for stream in sorted(records) for record in records[stream]]
    with (
        ThreadPoolExecutor(BLOCKS_AT_ONCE, thread_name_prefix="verify") as pool,
        closing(pool.map(partial(_check_block, store), every)) as results,
    ):
        for stream in sorted(records):
            tables: list[pa.Table] = []
            for found, table in islice(results, len(records[stream])):
                problems += found
                tables += [] if table is None else [table]
                done += 1
                if progress is not None:
                    progress(done, total)
            if len(tables) == len(records[stream]):
                tiling = check_tiling(tables, records[stream][-1], root.metadata.num_streams)
                problems += (Problem(f"_documents/stream-{stream:05d}", what) for what in tiling)
                problems += check_groups(kvstore, stream, pa.concat_tables(tables))
    return problems


def _read_records(kvstore: ts.KvStore, problems: list[Problem]) -> dict[int, list[CommitRecord]]:
    """The records that can be read, by stream, in the order of their blocks."""
    keys = [key for key in list_keys(kvstore, COMMITS_PREFIX) if key != CONSOLIDATED_KEY]
    records: dict[int, list[CommitRecord]] = {}
    for key, text in zip(keys, read_keys(kvstore, keys), strict=True):
        if text is None:  # withdrawn since it was listed: a worker is writing the block again
            continue
        if parse_commit_key(key) is None:
            problems.append(Problem(key, "is not a commit record"))
            continue
        try:
            record = CommitRecord.from_json(text, "it")
        except StoreError as error:
            problems.append(Problem(key, str(error)))
            continue
        if record.key == key:
            records.setdefault(record.stream, []).append(record)
        else:
            problems.append(Problem(key, f"is the record of block {record.block} of stream {record.stream}"))
    return {stream: sorted(found, key=lambda record: record.block) for stream, found in records.items()}


def _check_records(root: StoreRoot, records: Mapping[int, Sequence[CommitRecord]]) -> Iterator[Problem]:
    num_streams = root.metadata.num_streams
    for stream, found in records.items():
        if stream >= num_streams:
            yield Problem(found[0].key, f"the store has streams 0..{num_streams - 1}")
        yield from (Problem(record.key, what) for record, what in check_chain(found))
    if root.complete != (root.blocks is not None):
        what = f"complete is {root.complete}, but the number of blocks is {root.blocks}"
        yield Problem(ROOT_KEY, what, Remedy.restore)
    for stream, expected in enumerate(root.blocks or ()):
        if (found := len(records.get(stream, ()))) != expected:
            where = f"{COMMITS_PREFIX}stream-{stream:05d}"
            yield Problem(
                where, f"the store was completed with {expected} blocks of this stream, {found} have a record"
            )


def _check_consolidated(
    kvstore: ts.KvStore, root: StoreRoot, records: Mapping[int, Sequence[CommitRecord]]
) -> Iterator[Problem]:
    """A store that is not complete, and one that was finished by an earlier program, has no consolidated records."""
    if root.commits_sha256 is None:
        return
    text = read_key(kvstore, CONSOLIDATED_KEY)
    if text is None:
        yield Problem(CONSOLIDATED_KEY, "is missing, although the store is complete", Remedy.consolidate)
    elif consolidated_digest(text) != root.commits_sha256:
        yield Problem(CONSOLIDATED_KEY, f"has not the sha256 that {ROOT_KEY} names", Remedy.consolidate)
    elif text != consolidate(records):
        yield Problem(CONSOLIDATED_KEY, "does not agree with the commit records", Remedy.consolidate)


def _open_arrays(kvstore: ts.KvStore, root: StoreRoot, problems: list[Problem]) -> dict[str, ts.TensorStore] | None:
    opened = {}
    for name in root.array_names:
        try:
            opened |= open_existing(kvstore, [name])
        except StoreError as error:
            problems.append(Problem(f"{name}/zarr.json", str(error), Remedy.rerun))
    return opened if len(opened) == len(root.array_names) else None


def _describe(path: str, kvstore: ts.KvStore, root: StoreRoot, arrays: Mapping[str, ts.TensorStore]) -> _Store:
    layout = stored_layout(root, arrays)
    num_rows = min(array.shape[0] for array in arrays.values())
    objects = {name: frozenset(list_keys(kvstore, f"{name}/c/")) for name in arrays}
    vocab_size = root.metadata.model.get("vocab_size", root.metadata.tokenizer.get("vocab_size"))
    return _Store(path, kvstore, root, layout, arrays, num_rows, objects, vocab_size)


def _check_arrays(store: _Store, records: Mapping[int, Sequence[CommitRecord]]) -> tuple[list[Problem], bool]:
    """What is wrong with dtypes, shapes and chunks of the arrays, and whether their blocks can be read all the same."""
    last = [found[-1] for found in records.values()]
    rows = max((store.layout.first_row(r.stream, r.block) + r.rows for r in last), default=0)
    problems, readable = [], True
    for spec in store.layout.all_arrays:
        array, shard_shape = store.arrays[spec.name], store.layout.shard_shape(spec)
        where = f"{spec.name}/zarr.json"
        found = (array.dtype.name, array.shape[1:], array.chunk_layout.write_chunk.shape)
        expected = (spec.dtype, shard_shape[1:], shard_shape)
        if found != expected:
            what = f"has dtype, shape and store shards {found}, expected {expected}"
            problems.append(Problem(where, what, Remedy.rerun))
        if array.shape[0] != (rows if store.root.complete else MAX_ROWS):
            what = f"has {array.shape[0]} rows; the last committed row is {rows - 1}"
            problems.append(Problem(where, what, Remedy.rerun))
        readable = readable and found == expected and array.shape[0] >= rows
    return problems, readable


def _check_leftovers(store: _Store) -> Iterator[Problem]:
    """The objects of a complete store that belong to no block with a record, be it readable or not."""
    blocks = set(filter(None, map(parse_commit_key, list_keys(store.kvstore, COMMITS_PREFIX))))
    of_blocks = {table_key(*place) for place in blocks}
    of_blocks |= {statistics_key(*place) for place in blocks}
    of_blocks |= {store.layout.shard_key(spec, *place) for place in blocks for spec in store.layout.all_arrays}
    beside = (list_keys(store.kvstore, prefix) for prefix in (TABLES_PREFIX, STATISTICS_PREFIX))
    for keys in (*beside, *map(sorted, store.objects.values())):
        for key in keys:
            if key not in of_blocks:
                yield Problem(key, "belongs to no committed block, although the store is complete", Remedy.discard)


def _check_block(store: _Store, record: CommitRecord) -> tuple[list[Problem], pa.Table | None]:
    """What is wrong with one block, and its document table when that is readable."""
    try:
        table = decode_table(read_key(store.kvstore, table_key(record.stream, record.block)), record)
    except StoreError as error:
        of_table = [Problem(table_key(record.stream, record.block), str(error))]
        return of_table + list(_check_objects(store, record, None)), None
    return list(_check_objects(store, record, table)), table


def _check_objects(store: _Store, record: CommitRecord, table: pa.Table | None) -> Iterator[Problem]:
    """What is wrong with a block but for its document table."""
    keys = {spec.name: store.layout.shard_key(spec, record.stream, record.block) for spec in store.layout.all_arrays}
    # Zarr stores no object for a shard of zeros, which `positions` may be, and everything is in a block without rows.
    sides_of_tokens = {spec.name for spec in SIDE_ARRAYS}
    held = {name: record.tokens if name in sides_of_tokens else record.activations for name in keys}
    missing = {name for name, key in keys.items() if key not in store.objects[name] and held[name]}
    missing.discard(POSITIONS.name)
    yield from (Problem(keys[name], "is missing, although the block is committed") for name in sorted(missing))

    sides: dict[str, np.ndarray] = {}
    for name in (spec.name for spec in store.layout.side_arrays if spec.name not in missing):
        try:
            sides[name] = np.concatenate(list(_read_block(store, name, record)))
        except StoreError as error:
            yield Problem(keys[name], str(error))
    if len(sides) < len(store.layout.side_arrays):
        return  # what to compare the rest with is not known
    first_row = store.layout.first_row(record.stream, record.block)
    for what in check_side_arrays(sides, record, first_row, store.vocab_size):
        yield Problem(record.key, what)
    if table is not None:
        for what in check_table(table, sides["documents"], record, store.layout.num_streams):
            yield Problem(table_key(record.stream, record.block), what)
    valid = sides["segments"] > 0
    if store.layout.selected is not None:
        wrong = [Problem(keys["selected"], what) for what in check_selected(sides["selected"], valid, record)]
        yield from wrong
        if table is not None and not wrong:
            for what in check_selected_of_documents(table, beside_activations(sides)["documents"]):
                yield Problem(table_key(record.stream, record.block), what)
        valid = sides["selected"] >= 0
    if record.statistics_sha256:
        yield from _check_statistics(store, record)
    for name in (spec.name for spec in (*store.layout.arrays, *store.layout.scales) if spec.name not in missing):
        yield from _check_activations(store, name, keys[name], record, valid)


def _check_statistics(store: _Store, record: CommitRecord) -> Iterator[Problem]:
    key = statistics_key(record.stream, record.block)
    try:
        statistics = decode_statistics(read_key(store.kvstore, key), record)
    except StoreError as error:
        yield Problem(key, str(error))
        return
    for name, found in statistics.items():
        if found.count + found.not_finite != record.activations:
            yield Problem(
                key, f"counts {found.count + found.not_finite} tokens of {name}; the block has {record.activations}"
            )


def _check_activations(
    store: _Store, name: str, key: str, record: CommitRecord, valid: np.ndarray
) -> Iterator[Problem]:
    """What is wrong with the first bad piece of a block's activations."""
    row = 0
    try:
        for values in _read_block(store, name, record):
            where = f"rows {row} to {row + len(values) - 1} of the block: "
            wrong = []
            if not store.may_be_not_finite:
                wrong += [Problem(key, where + what, Remedy.other_dtype) for what in check_finite(values)]
            wrong += [Problem(key, where + what) for what in check_padding(values, valid[row : row + len(values)])]
            if wrong:
                yield from wrong
                return
            row += len(values)
    except StoreError as error:
        yield Problem(key, str(error))


def _read_block(store: _Store, name: str, record: CommitRecord) -> Iterator[np.ndarray]:
    """A block of an array, in pieces of whole rows; the rows that trimming cut off some array are left out."""
    array = store.arrays[name]
    first = store.layout.first_row(record.stream, record.block)
    stop = min(first + store.layout.rows_per_block, store.num_rows)
    yield np.empty((0, *array.shape[1:]), array.dtype.numpy_dtype)
    reads: deque[tuple[np.ndarray, ts.WriteFutures]] = deque()
    step = store.layout.piece_rows([name])
    for row in range(first, stop, step):
        out = np.empty((min(step, stop - row), *array.shape[1:]), array.dtype.numpy_dtype)
        reads.append((out, start_read(array, row, out)))
        if len(reads) > READS_AHEAD:
            yield _finished(array, *reads.popleft())
    while reads:
        yield _finished(array, *reads.popleft())


def _finished(array: ts.TensorStore, values: np.ndarray, read: ts.WriteFutures) -> np.ndarray:
    wait_read(array, read)
    return values
