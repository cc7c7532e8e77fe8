"""Checks a store's commit records, stream by stream, and the block tables, which repeat them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
from jaxtyping import Int64

from pipeline.core.counts import counted
from pipeline.core.errors import StoreError
from pipeline.store.check.ahead import map_ahead
from pipeline.store.check.block_checks import check_chain
from pipeline.store.check.id_index import check_header
from pipeline.store.check.scope import Scope
from pipeline.store.format.block_table import TABLE_KEY, BlockTable, stream_table_key, table_sha256
from pipeline.store.format.commits import COMMITS_PREFIX, CommitRecord, commit_key, parse_commit_key
from pipeline.store.format.keys import stream_prefix
from pipeline.store.format.metadata import ROOT_KEY, StoreRoot
from pipeline.store.format.problems import Problem, Remedy
from pipeline.store.io.storage import Storage, end_of_prefix

# A store may have 10^7 records, so neither all of them nor all of their keys are in memory at the same time.
_STREAMS_AT_ONCE = 8
_KEYS_AT_ONCE = 1024
_LISTINGS, _LISTINGS_AT_ONCE = 128, 4


@dataclass(frozen=True)
class StreamRecords:
    """A summary of a stream's records.

    listed: the blocks that have a record, readable or not.
    table: the blocks with a readable record. last: the last of these records.
    """

    stream: int
    listed: Int64[np.ndarray, " n"]
    table: BlockTable
    last: CommitRecord | None
    problems: tuple[Problem, ...]


def check_records(storage: Storage, root: StoreRoot, scope: Scope) -> tuple[dict[int, StreamRecords], list[Problem]]:
    """Reads and checks the records of the scope's streams and their block tables."""
    in_scope = scope.streams(root.metadata.num_streams)
    problems: list[Problem] = []
    whole, table_problems = _read_whole_table(storage, root)
    check = partial(_check_stream, storage, root)
    streams: dict[int, StreamRecords] = {}
    agrees = True
    for records in map_ahead(check, in_scope, _STREAMS_AT_ONCE):
        problems += records.problems
        streams[records.stream] = records
        if whole is not None:
            stored = whole.values[whole.values["stream"] == records.stream]
            agrees = agrees and np.array_equal(stored, records.table.values)
    if scope.is_first:
        problems += _check_root(root)
        problems += _check_others(storage, root)
    problems += table_problems
    if whole is not None and not (agrees and _is_in_order(whole, root.metadata.num_streams)):
        problems.append(Problem(TABLE_KEY, "does not agree with the commit records", Remedy.tabulate))
    return streams, problems


def read_last(storage: Storage, stream: int) -> CommitRecord | None:
    """The last readable record of a stream; None if there is none."""
    keys = [key for key in storage.list_keys(stream_prefix(COMMITS_PREFIX, stream)) if parse_commit_key(key)]
    for key in sorted(keys, key=parse_commit_key, reverse=True):
        record = None if storage.file_problem(key) else _parse(key, storage.read(key))
        if isinstance(record, CommitRecord):
            return record
    return None


def read_again(storage: Storage, blocks: Int64[np.ndarray, "n 2"], problems: list[Problem]) -> Iterator[CommitRecord]:
    """The records of `blocks` (stream, block), except those withdrawn since the first time. Adds to `problems`."""
    for start in range(0, len(blocks), _KEYS_AT_ONCE):
        keys = [commit_key(*block) for block in blocks[start : start + _KEYS_AT_ONCE].tolist()]
        for key, text in zip(keys, storage.read_many(keys), strict=True):
            result = _parse(key, text)
            if isinstance(result, CommitRecord):
                yield result
            elif result is not None:
                problems.append(result)


def _parse(key: str, text: bytes | None) -> CommitRecord | Problem | None:
    if text is None:  # withdrawn since it was listed: a worker is writing the block again
        return None
    if parse_commit_key(key) is None:
        return Problem(key, "is not a commit record")
    try:
        record = CommitRecord.from_json(text, "it")
    except StoreError as error:
        return Problem(key, str(error))
    if record.key != key:
        return Problem(key, f"is the record of block {record.block} of stream {record.stream}")
    return record


def _check_stream(storage: Storage, root: StoreRoot, stream: int) -> StreamRecords:
    listed = storage.list_keys(stream_prefix(COMMITS_PREFIX, stream))
    not_files = {key: what for key in listed if (what := storage.file_problem(key))}
    problems = [Problem(key, what) for key, what in not_files.items()]
    keys = sorted((key for key in listed if key not in not_files), key=lambda key: parse_commit_key(key) or ())
    records = _RecordReader(storage)
    chain_problems = [Problem(record.key, what) for record, what in check_chain(records.read(keys))]
    problems += records.problems + chain_problems
    table = BlockTable.join(records.tables)
    problems += _check_count(root, stream, len(table))
    problems += _check_stream_table(storage, stream, table)
    problems += check_header(storage, stream, table)
    parsed_keys = filter(None, map(parse_commit_key, listed))
    blocks = sorted(block for _, block in parsed_keys if block < 2**40)
    return StreamRecords(
        stream=stream,
        listed=np.array(blocks, np.int64),
        table=table,
        last=records.last,
        problems=tuple(problems),
    )


class _RecordReader:
    """Reads a stream's records, a few at a time, and keeps a summary of them, see `StreamRecords`."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.tables: list[BlockTable] = []
        self.last: CommitRecord | None = None
        self.problems: list[Problem] = []

    def read(self, keys: Sequence[str]) -> Iterator[CommitRecord]:
        """The readable records. Adds the problems of the others."""
        for start in range(0, len(keys), _KEYS_AT_ONCE):
            some = keys[start : start + _KEYS_AT_ONCE]
            parsed = [_parse(key, text) for key, text in zip(some, self._storage.read_many(some), strict=True)]
            self.problems += [result for result in parsed if isinstance(result, Problem)]
            records = [result for result in parsed if isinstance(result, CommitRecord)]
            self.tables.append(BlockTable.from_records(records))
            for self.last in records:
                yield self.last


def _check_count(root: StoreRoot, stream: int, num_records: int) -> Iterator[Problem]:
    if stream < len(root.blocks or ()) and num_records != (expected := root.blocks[stream]):
        where = stream_prefix(COMMITS_PREFIX, stream).rstrip("/")
        blocks = counted(expected, "block")
        yield Problem(where, f"the store was completed with {blocks} of this stream, but has records of {num_records}")


def _check_root(root: StoreRoot) -> Iterator[Problem]:
    if root.complete != (root.blocks is not None):
        what = f"complete is {root.complete}, but the number of blocks is {root.blocks}"
        yield Problem(ROOT_KEY, what, Remedy.restore)
    for stream in range(root.metadata.num_streams, len(root.blocks or ())):
        yield from _check_count(root, stream, 0)


def _check_others(storage: Storage, root: StoreRoot) -> Iterator[Problem]:
    """Finds objects among the records that belong to none of the store's streams."""
    num_streams = root.metadata.num_streams
    seen: set[int] = set()
    for key in keys_of_no_stream(storage, COMMITS_PREFIX, num_streams):
        parsed = parse_commit_key(key)
        if parsed is None:
            yield Problem(key, storage.file_problem(key) or "is not a commit record")
        elif parsed[0] not in seen:
            seen.add(parsed[0])
            yield Problem(key, f"the store has streams 0..{num_streams - 1} only")


def keys_of_no_stream(storage: Storage, prefix: str, num_streams: int) -> Iterator[str]:
    """The keys with this prefix, such as `_commits/`, that belong to none of the store's streams."""
    first_streams = range(0, num_streams, -(-num_streams // _LISTINGS))
    bounds = [prefix, *sorted(stream_prefix(prefix, stream) for stream in first_streams), end_of_prefix(prefix)]
    for [keys] in map_ahead(lambda bound: storage.list_ranges([bound]), pairwise(bounds), _LISTINGS_AT_ONCE):
        yield from (key for key in keys if not _is_in_stream(prefix, key, num_streams))


def _is_in_stream(prefix: str, key: str, num_streams: int) -> bool:
    """Whether a key belongs to one of the store's streams."""
    number = key.removeprefix(f"{prefix}stream-").partition("/")[0]
    is_number = number.isascii() and number.isdecimal() and len(number) < 20
    return is_number and int(number) < num_streams and key.startswith(stream_prefix(prefix, int(number)))


def _read_whole_table(storage: Storage, root: StoreRoot) -> tuple[BlockTable | None, list[Problem]]:
    """The table of a complete store's blocks, and its problems."""
    if root.blocks_sha256 is None:
        return None, []
    what, table = storage.file_problem(TABLE_KEY), None
    content = None if what else storage.read(TABLE_KEY)
    if content is None:
        what = what or "is missing, although the store is complete"
    elif table_sha256(content) != root.blocks_sha256:
        what = f"does not match the sha256 in {ROOT_KEY}"
    elif (table := BlockTable.decode(content)) is None or table.encode() != content:
        what, table = "does not agree with the commit records", None
    return table, [Problem(TABLE_KEY, what, Remedy.tabulate)] if what else []


def _is_in_order(table: BlockTable, num_streams: int) -> bool:
    """Whether a table only has blocks of the store's streams, in row order."""
    is_ordered = np.array_equal(table.in_row_order(num_streams).values, table.values)
    return is_ordered and bool((table.values["stream"] < num_streams).all())


def _check_stream_table(storage: Storage, stream: int, records: BlockTable) -> Iterator[Problem]:
    """Checks that a stream's block table agrees with the records. It may lack the last blocks, or have blocks whose
    records were deleted in order to recompute them."""
    key = stream_table_key(stream)
    if what := storage.file_problem(key):
        yield Problem(key, what, Remedy.tabulate)
        return
    content = storage.read(key)
    table = None if content is None else BlockTable.decode(content)
    if content is not None and (table is None or not _agree(table, records)):
        yield Problem(key, "does not agree with the commit records", Remedy.tabulate)


def _agree(table: BlockTable, expected: BlockTable) -> bool:
    num_blocks = min(len(table), len(expected))
    return np.array_equal(table[:num_blocks].values, expected[:num_blocks].values)
