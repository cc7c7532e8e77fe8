"""Compares listings of a store's objects with those that its blocks must have."""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain

from pipeline.store.check.ahead import map_ahead
from pipeline.store.check.scope import OpenStore, Scope
from pipeline.store.check.stored_records import StreamRecords
from pipeline.store.features.index_file import index_key
from pipeline.store.format.keys import index_prefix
from pipeline.store.format.statistics import STATISTICS_PREFIX, statistics_key
from pipeline.store.format.tables import TABLES_PREFIX, table_key
from pipeline.store.io.problems import Problem, Remedy

MISSING = "is missing, although the block is committed"
_KINDS_AT_ONCE = 2  # a listing holds the keys of an array
_SHARD = re.compile(r"[^/]+/c\.(\d{1,18})(?:\.0)+")
_FILE = re.compile(r".*/stream-(\d{5,12})/block-(\d{6,12})\.\w+")

KeyOf = Callable[[int, int], str]  # of a stream and a block


def check_objects(store: OpenStore, scope: Scope, streams: Mapping[int, StreamRecords]) -> Iterator[Problem]:
    """Finds missing objects of the scope's blocks that are not read, and objects that belong to no committed block.

    Lists all keys, whatever the scope: a stream has every `num_streams`-th store shard, which no prefix selects.
    """
    kinds: dict[str, KeyOf] = {
        **{f"{spec.name}/c.": partial(store.layout.shard_key, spec) for spec in store.layout.all_arrays},
        TABLES_PREFIX: table_key,
        STATISTICS_PREFIX: statistics_key,
        **{index_prefix(name): partial(index_key, name) for name in store.root.metadata.indexed_features},
    }
    check = partial(_check_kind, store, scope, streams)
    yield from chain.from_iterable(map_ahead(check, kinds.items(), _KINDS_AT_ONCE))


def _check_kind(
    store: OpenStore, scope: Scope, streams: Mapping[int, StreamRecords], kind: tuple[str, KeyOf]
) -> list[Problem]:
    """Checks the objects of one kind: those of the blocks have the keys `key_of(stream, block)`."""
    prefix, key_of = kind
    num_streams = store.layout.num_streams
    committed = {int(block) * num_streams + stream for stream, found in streams.items() for block in found.listed}
    stored, problems = set[int](), []
    for key in store.storage.list_keys(prefix):
        stream, block = _place(key, num_streams)
        is_own = 0 <= stream < num_streams and key == key_of(stream, block)
        if is_own and block * num_streams + stream in committed:
            stored.add(block * num_streams + stream)
        elif scope.has_stream(stream) if is_own else scope.is_first:
            place = (stream, block) if is_own else None
            problems.append(Problem(key, "belongs to no committed block", Remedy.discard, place))
    for block in chain.from_iterable(found.table for found in streams.values()):
        is_needed = block.has_statistics or prefix != STATISTICS_PREFIX
        is_stored = block.block * num_streams + block.stream in stored
        if is_needed and not is_stored and not scope.reads_block(block.stream, block.block):
            key = key_of(block.stream, block.block)
            what = store.storage.file_problem(key) or MISSING  # listings omit folders
            problems.append(Problem(key, what, block=(block.stream, block.block)))
    return problems


def _place(key: str, num_streams: int) -> tuple[int, int]:
    """The stream and block of an object, from its key; (-1, -1) for any other key."""
    if match := _FILE.fullmatch(key):
        return int(match[1]), int(match[2])
    if match := _SHARD.fullmatch(key):
        return int(match[1]) % num_streams, int(match[1]) // num_streams
    return -1, -1
