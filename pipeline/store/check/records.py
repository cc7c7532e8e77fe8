"""Checks a store's commit records, stream by stream, and that each block has its objects."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np
from jaxtyping import Int64

from pipeline.core.errors import StoreError
from pipeline.core.messages import counted
from pipeline.store.check.blocks import shard_keys
from pipeline.store.check.problems import MISSING, OpenStore, Problem, Remedy, Scope
from pipeline.store.format.block_table import BlockTable, counts_of, impossible_counts
from pipeline.store.format.commits import (
    BLOCKS_PER_GROUP,
    COMMITS_PREFIX,
    CommitRecord,
    commit_key,
    parse_commit_key,
    require_record,
)
from pipeline.store.format.keys import index_prefix, parse_key, stream_prefix
from pipeline.store.format.layout import StoreLayout
from pipeline.store.format.statistics import STATISTICS_PREFIX, statistics_key
from pipeline.store.format.summary import BLOCKS, summary_key
from pipeline.store.format.tables import TABLES_PREFIX, table_key
from pipeline.store.indexes.features import index_key
from pipeline.store.io.local_files import file_problem
from pipeline.store.io.storage import Storage, map_ahead

# A store may have 10^7 records, so neither all of them nor all of their keys are in memory at the same time.
_RECORDS_AT_ONCE = 1024
_KINDS_AT_ONCE = 2  # a listing holds the keys of an array


@dataclass(frozen=True)
class StreamRecords:
    """A summary of a stream's records.

    listed: the blocks that have a record, readable or not.
    table: the blocks with a readable record.
    """

    stream: int
    listed: Int64[np.ndarray, " n"]
    table: BlockTable
    problems: tuple[Problem, ...]


def check_records(store: OpenStore, stream: int, summarised: BlockTable | None) -> StreamRecords:
    """Reads and checks the records of a stream. summarised: its blocks in the store's summary, if there is one."""
    keys = store.storage.list_keys(stream_prefix(COMMITS_PREFIX, stream))
    blocks = {key: parsed[1] for key in keys if (parsed := parse_commit_key(key)) and key == commit_key(*parsed)}
    tables: list[BlockTable] = []
    problems: list[Problem] = []
    records = _read(store.storage, sorted(blocks, key=blocks.get), tables, problems)
    for record, what, block in _check_chain(records):
        problems.append(Problem(record.key, what, block=(stream, block)))
    table = BlockTable.join(tables)
    for block, what in impossible_counts(table, store.layout):
        problems.append(Problem(commit_key(stream, block.block), what, block=(stream, block.block)))
    listed = np.array(sorted(blocks.values()), np.int64)
    if summarised is not None:
        problems += _compare(store, stream, listed, table, summarised)
    return StreamRecords(stream, listed, table, tuple(problems))


def _read(
    storage: Storage, keys: Sequence[str], tables: list[BlockTable], problems: list[Problem]
) -> Iterator[CommitRecord]:
    """The readable records of these keys. Adds tables of them to `tables`, and what is wrong with others to
    `problems`."""
    for start in range(0, len(keys), _RECORDS_AT_ONCE):
        some = keys[start : start + _RECORDS_AT_ONCE]
        wrong = {key: what for key in some if (what := file_problem(storage.directory, key))}
        files, records = [key for key in some if key not in wrong], []
        for key, text in zip(files, storage.read_many(files), strict=True):
            try:
                records.append(require_record(storage, key, text))
            except StoreError as error:
                wrong[key] = str(error)
        problems += [Problem(key, what, block=parse_commit_key(key)) for key, what in wrong.items()]
        tables.append(BlockTable.from_records(records))
        yield from records


def _check_chain(records: Iterable[CommitRecord]) -> Iterator[tuple[CommitRecord, str, int]]:
    """One stream's records, in block order: none is missing, each starts where the previous one ends, and repeats the
    counts of earlier blocks. Yields each wrong record, what is wrong, and the first block to compute again."""
    before, counts = None, list[tuple[int, ...]]()  # of the blocks before it in the record's group
    for record in records:
        expected = 0 if before is None else before.block + 1
        if record.block != expected:
            yield record, f"the stream has this block, but no readable record of block {expected}", expected
            counts = list(record.recent)
        elif before is None and any(record.start.values()):
            yield record, f"the stream's first block starts at {dict(record.start)}", record.block
        elif before is not None and before.next != record.start:
            what = f"starts at {dict(record.start)}, but the previous block ends at {dict(before.next)}"
            yield record, what, before.block  # either record may be wrong
        if before is not None and before.exhausted:
            yield before, f"is exhausted, but the stream has block {record.block}", before.block
        counts = counts if record.block % BLOCKS_PER_GROUP else []
        if counts != list(record.recent):
            yield record, "repeats other counts of earlier blocks than their records have", record.block
        counts.append(counts_of(record))
        before = record


def _compare(
    store: OpenStore, stream: int, listed: Int64[np.ndarray, " n"], table: BlockTable, summarised: BlockTable
) -> Iterator[Problem]:
    """Compares a stream's records with the summary. It may lack later blocks, unless the store is complete."""
    num_listed, num_blocks = int(listed.max(initial=-1)) + 1, len(summarised)
    if num_listed < num_blocks:
        what = f"the store was finished with {counted(num_blocks, 'block')} of this stream, but has {num_listed}"
        yield Problem(commit_key(stream, num_listed), what, block=(stream, num_listed))
    table = table[table.column("block") < num_blocks]
    is_longer = store.root.complete and num_listed > num_blocks
    if is_longer or not np.array_equal(summarised[table.column("block")].values, table.values):
        key = summary_key(BLOCKS, store.root.summary[BLOCKS])
        yield Problem(key, f"does not agree with the commit records of stream {stream}", Remedy.finish)


def check_listings(store: OpenStore, scope: Scope, streams: Mapping[int, StreamRecords]) -> Iterator[Problem]:
    """Finds missing objects of the scope's blocks that are not read, and objects that belong to no committed block.

    Lists all keys, whatever the scope: a stream has every `num_streams`-th store shard, which no prefix selects.
    """
    layout, encoded = store.layout, store.root.metadata.indexed_features
    kinds: dict[str, Callable[[int, int], list[str]]] = {  # by prefix: the keys of a block's objects
        **{f"{spec.name}/c.": partial(shard_keys, layout, spec) for spec in layout.all_arrays},
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
                    what = file_problem(store.storage.directory, key) or MISSING  # listings omit folders
                    problems.append(Problem(key, what, block=(stream, block)))
                stored.difference_update(keys)
        for key in sorted(stored):
            owner = _owner(key, layout)
            is_own = owner is not None and key in keys_of(*owner)
            if scope.has_stream(owner[0]) if is_own else scope.is_first:
                problems.append(Problem(key, "belongs to no committed block", Remedy.discard))
        return problems

    yield from chain.from_iterable(map_ahead(check_kind, kinds, _KINDS_AT_ONCE))


def _owner(key: str, layout: StoreLayout) -> tuple[int, int] | None:
    """The stream and block of a block's object, from its key; None for any other key."""
    if (parsed := parse_key(key)) is None:
        return None
    for spec in layout.all_arrays:
        if spec.name == parsed.folder:
            return layout.shard_place(spec, parsed.number, parsed.column)
    return None if parsed.stream is None else (parsed.stream, parsed.number)
