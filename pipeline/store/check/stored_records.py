"""Checks a store's commit records, stream by stream."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np
from jaxtyping import Int64

from pipeline.core.errors import StoreError
from pipeline.store.check.ahead import map_ahead
from pipeline.store.check.scope import Scope
from pipeline.store.format.block_table import BlockTable, counts_of, impossible_counts
from pipeline.store.format.commits import COMMITS_PREFIX, CommitRecord, commit_key, parse_commit_key, require_record
from pipeline.store.format.keys import stream_prefix
from pipeline.store.format.layout import StoreLayout
from pipeline.store.io.problems import Problem, Remedy
from pipeline.store.io.storage import Storage, end_of_prefix

# A store may have 10^7 records, so neither all of them nor all of their keys are in memory at the same time.
STREAMS_AT_ONCE = 8
_KEYS_AT_ONCE = 1024
_MOST_FIVE_DIGITS = 100_000  # streams with five digits in their keys
_MAX_BLOCK = 1 << 40  # larger numbers are in no store


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


def check_records(
    storage: Storage, layout: StoreLayout, scope: Scope
) -> tuple[dict[int, StreamRecords], list[Problem]]:
    """Reads and checks the records of the scope's streams. Returns them by stream, and their problems."""
    check = partial(_check_stream, storage, layout)
    records = list(map_ahead(check, scope.streams(layout.num_streams), STREAMS_AT_ONCE))
    problems = [problem for stream in records for problem in stream.problems]
    if scope.is_first:
        others = _keys_of_no_stream(storage, layout.num_streams)
        problems += [Problem(key, "belongs to none of the store's streams", Remedy.discard) for key in others]
    return {stream.stream: stream for stream in records}, problems


def read_again(storage: Storage, blocks: BlockTable, problems: list[Problem]) -> Iterator[CommitRecord]:
    """The records of `blocks`, which could be read before. Adds those that cannot be read now to `problems`."""
    keys = [commit_key(block.stream, block.block) for block in blocks]
    reader = _RecordReader(storage)
    yield from reader.read(keys)
    problems += reader.problems


def _check_stream(storage: Storage, layout: StoreLayout, stream: int) -> StreamRecords:
    listed = storage.list_keys(stream_prefix(COMMITS_PREFIX, stream))
    blocks = {key: parsed[1] for key in listed if (parsed := parse_commit_key(key)) and key == commit_key(*parsed)}
    others = (key for key in listed if key not in blocks)
    problems = [Problem(key, "is not a commit record", Remedy.discard) for key in others]
    reader = _RecordReader(storage)
    for record, what, block in check_chain(reader.read(sorted(blocks, key=blocks.get))):
        problems.append(Problem(record.key, what, block=(stream, block)))
    table = BlockTable.join(reader.tables)
    for block, what in impossible_counts(table, layout):
        problems.append(Problem(commit_key(stream, block.block), what, block=(stream, block.block)))
    numbers = np.array(sorted(block for block in blocks.values() if block < _MAX_BLOCK), np.int64)
    return StreamRecords(stream, numbers, table, (*reader.problems, *problems))


def check_chain(records: Iterable[CommitRecord]) -> Iterator[tuple[CommitRecord, str, int]]:
    """One stream's records, in block order: none is missing, each starts where the previous one ends, and repeats the
    counts of earlier blocks. Yields each wrong record, what is wrong, and the first block to compute again."""
    before, counts = None, deque[tuple[int, ...]](maxlen=_KEYS_AT_ONCE)
    for record in records:
        expected = 0 if before is None else before.block + 1
        if record.block != expected:
            yield record, f"the stream has this block, but no readable record of block {expected}", expected
            counts.clear()
        elif before is None and any(record.start.values()):
            yield record, f"the stream's first block starts at {dict(record.start)}", record.block
        elif before is not None and before.next != record.start:
            what = f"starts at {dict(record.start)}, but the previous block ends at {dict(before.next)}"
            yield record, what, before.block  # either record may be wrong
        if before is not None and before.exhausted:
            yield before, f"is exhausted, but the stream has block {record.block}", before.block
        if len(counts) >= min(record.block, len(record.recent)):
            earlier = list(counts)[len(counts) - len(record.recent) :]
            if earlier != list(record.recent):
                yield record, "repeats other counts of earlier blocks than their records have", record.block
        counts.append(counts_of(record))
        before = record


class _RecordReader:
    """Reads records, a few at a time, and keeps a table of the readable ones and the problems of the others."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.tables: list[BlockTable] = []
        self.problems: list[Problem] = []

    def read(self, keys: Sequence[str]) -> Iterator[CommitRecord]:
        """The readable records of the keys."""
        for start in range(0, len(keys), _KEYS_AT_ONCE):
            some = keys[start : start + _KEYS_AT_ONCE]
            wrong = {key: what for key in some if (what := self._storage.file_problem(key))}
            self._add(wrong)
            some = [key for key in some if key not in wrong]
            texts = self._storage.read_many(some)
            records = [record for key, text in zip(some, texts, strict=True) if (record := self._parse(key, text))]
            self.tables.append(BlockTable.from_records(records))
            yield from records

    def _parse(self, key: str, text: bytes | None) -> CommitRecord | None:
        try:
            return require_record(self._storage, key, text)
        except StoreError as error:
            self._add({key: str(error)})
            return None

    def _add(self, wrong: Mapping[str, str]) -> None:
        self.problems += [Problem(key, what, block=parse_commit_key(key)) for key, what in wrong.items()]


def _keys_of_no_stream(storage: Storage, num_streams: int) -> list[str]:
    """The keys among the records before those of the first stream, and after those of the last one."""
    last = min(num_streams, _MOST_FIVE_DIGITS)  # in the order of the keys
    bounds = (stream_prefix(COMMITS_PREFIX, 0), end_of_prefix(stream_prefix(COMMITS_PREFIX, last - 1)))
    ranges = [(COMMITS_PREFIX, bounds[0]), (bounds[1], end_of_prefix(COMMITS_PREFIX))]
    return list(chain.from_iterable(storage.list_ranges(ranges)))
