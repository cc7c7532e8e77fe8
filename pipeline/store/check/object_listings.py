"""Compares listings of a store's objects with those that its blocks must have."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np
from jaxtyping import Bool, Int64

from pipeline.store.check.ahead import map_ahead
from pipeline.store.check.scope import Level, Scope
from pipeline.store.check.stored_blocks import OpenStore
from pipeline.store.check.stored_records import StreamRecords, keys_of_no_stream, read_again
from pipeline.store.features.index_file import index_key
from pipeline.store.format.arrays import fill_digest
from pipeline.store.format.block_table import BlockTable
from pipeline.store.format.keys import index_prefix, stream_prefix
from pipeline.store.format.layout import SIDE_ARRAYS, ArraySpec, StoreLayout
from pipeline.store.format.metadata import StoreMetadata
from pipeline.store.format.problems import Problem, Remedy
from pipeline.store.format.statistics import STATISTICS_PREFIX, statistics_key
from pipeline.store.format.tables import TABLES_PREFIX, table_key
from pipeline.store.io.storage import Storage, end_of_prefix

_LISTINGS_AT_ONCE = 8
_MANY = 20_000  # an array with more keys is listed in parts
_DIGITS = "0123456789"  # followed by ":"
_MISSING = "is missing, although the block is committed"

MissingArrays = Mapping[tuple[int, int], list[str]]  # the arrays whose object is missing, by stream and block


@dataclass(frozen=True)
class _Blocks:
    """The blocks of the scope. listed: the store shard numbers of all blocks with a record, ascending. readable: the
    blocks whose record can be read."""

    listed: Int64[np.ndarray, " n"]
    readable: BlockTable


def check_objects(
    store: OpenStore, scope: Scope, streams: Mapping[int, StreamRecords], readable: Collection[str]
) -> tuple[MissingArrays, list[Problem]]:
    """Finds missing objects of the scope's blocks and, in a complete store, objects that belong to no block.

    Zarr stores no object for a block in which every value is the fill value; such blocks are recognised by the digests
    in their records. `readable`: the arrays with valid metadata. For other arrays, digests cannot distinguish such
    blocks from missing objects.
    """
    storage, layout, is_complete = store.storage, store.layout, store.root.complete
    problems: list[Problem] = []
    if is_complete or scope.level is Level.objects or scope.sample < 1:
        problems += _check_files(storage, store.root.metadata, scope, streams, is_complete)
    listed = [records.listed * layout.num_streams + stream for stream, records in streams.items()]
    blocks = _Blocks(
        np.sort(np.concatenate([np.empty(0, np.int64), *listed])),
        BlockTable.join(records.table for records in streams.values()),
    )
    lacking: dict[str, Bool[np.ndarray, " blocks"]] = {}
    for spec in layout.all_arrays:
        is_present, others = _list_shards(storage, layout, scope, spec, blocks.listed)
        if is_complete:
            problems += map(_leftover, others)
        lacks = _have_values(spec, layout, blocks) & ~is_present
        if lacks.any():
            lacking[spec.name] = lacks
    missing = dict(_missing(store, blocks.listed, lacking, readable, problems))
    specs = {spec.name: spec for spec in layout.all_arrays}
    for block, names in missing.items():
        keys = (layout.shard_key(specs[name], *block) for name in names)
        problems += (Problem(key, storage.file_problem(key) or _MISSING) for key in keys)  # listings omit folders
    return missing, problems


def _missing(
    store: OpenStore,
    shards: Int64[np.ndarray, " blocks"],
    lacking: Mapping[str, Bool[np.ndarray, " blocks"]],
    readable: Collection[str],
    problems: list[Problem],
) -> Iterator[tuple[tuple[int, int], list[str]]]:
    """The arrays whose object is missing, by stream and block. `lacking`: for each array, which of the `shards` have no
    object. Adds records that cannot be read to `problems`."""
    if not lacking:
        return
    fill_digests = {name: fill_digest(store.arrays[name]) for name in lacking if name in readable}
    num_streams = store.layout.num_streams
    doubtful = shards[np.any(list(lacking.values()), axis=0)]
    blocks = np.stack([doubtful % num_streams, doubtful // num_streams], axis=1)
    for record in read_again(store.storage, blocks, problems):
        index = np.searchsorted(shards, store.layout.shard_index(record.stream, record.block))
        names = [name for name, lacks in lacking.items() if lacks[index]]
        names = [name for name in names if name in readable and record.digests.get(name) != fill_digests[name]]
        if names:
            yield (record.stream, record.block), names


def _leftover(key: str) -> Problem:
    return Problem(key, "belongs to no committed block, although the store is complete", Remedy.discard)


def _have_values(spec: ArraySpec, layout: StoreLayout, blocks: _Blocks) -> Bool[np.ndarray, " blocks"]:
    """Which of the listed blocks are readable and have tokens in an array. In others, all values are fill values."""
    num_tokens = blocks.readable.column("tokens" if spec in SIDE_ARRAYS else "activations")
    stream, block = blocks.readable.column("stream"), blocks.readable.column("block")
    have_values = np.zeros(len(blocks.listed), bool)
    have_values[np.searchsorted(blocks.listed, block * layout.num_streams + stream)] = num_tokens > 0
    return have_values


def _list_shards(
    storage: Storage, layout: StoreLayout, scope: Scope, spec: ArraySpec, listed: Int64[np.ndarray, " n"]
) -> tuple[Bool[np.ndarray, " n"], list[str]]:
    """Which of the `listed` store shards an array has, and the scope's keys that belong to none of them.

    Lists all keys, whatever the scope: a stream has every `num_streams`-th store shard, which no prefix selects.
    """
    is_present, others = np.zeros(len(listed), bool), []
    prefix, tail = f"{spec.name}/c/", "/0" * (len(spec.dimension_names) - 1)
    num_keys = int(listed[-1]) + 1 if len(listed) else 0
    for keys in _list_in_parts(storage, prefix, num_keys > _MANY):
        numbers = np.array([_shard_number(key, prefix, tail) for key in keys], np.int64)
        indices = np.searchsorted(listed, numbers)
        is_listed = np.zeros(len(keys), bool)
        in_range = indices < len(listed)
        is_listed[in_range] = listed[indices[in_range]] == numbers[in_range]
        is_present[indices[is_listed]] = True
        owners = np.where(numbers < 0, 0, numbers % layout.num_streams % scope.world)
        others += (keys[k] for k in np.flatnonzero(~is_listed & (owners == scope.rank)))
    return is_present, sorted(others)


def _shard_number(key: str, prefix: str, tail: str) -> int:
    """The number of a store shard, from its key; -1 for any other key."""
    digits = key[len(prefix) : -len(tail)]
    is_number = digits.isascii() and digits.isdecimal() and len(digits) < 19
    return int(digits) if is_number and key == f"{prefix}{int(digits)}{tail}" else -1


def _list_in_parts(storage: Storage, prefix: str, in_parts: bool) -> Iterator[list[str]]:
    """All keys with this prefix, in one listing or in several, by the next character."""
    if not in_parts:
        yield storage.list_keys(prefix)
        return
    yield from map_ahead(storage.list_keys, [prefix + digit for digit in _DIGITS], _LISTINGS_AT_ONCE)
    yield from storage.list_ranges([(prefix, prefix + "0"), (prefix + ":", end_of_prefix(prefix))])


def _check_files(
    storage: Storage, metadata: StoreMetadata, scope: Scope, streams: Mapping[int, StreamRecords], is_complete: bool
) -> Iterator[Problem]:
    """Checks the keys of document tables, statistics and indexes by feature."""
    kinds = (
        (TABLES_PREFIX, table_key),
        (STATISTICS_PREFIX, statistics_key),
        *((index_prefix(features), partial(index_key, features)) for features in metadata.indexed_features),
    )

    def list_stream(kind_and_stream: tuple[tuple, int]) -> tuple[tuple, int, list[str]]:
        kind, stream = kind_and_stream
        return kind, stream, storage.list_keys(stream_prefix(kind[0], stream))

    for (prefix, key_of), stream, keys in map_ahead(list_stream, product(kinds, streams), _LISTINGS_AT_ONCE):
        records = streams[stream]
        needed = records.table[records.table.has_statistics] if prefix == STATISTICS_PREFIX else records.table
        # For the other blocks, reading the object reports that it is missing.
        unread = (block.block for block in needed if not scope.reads_block(stream, block.block))
        absent = {key_of(stream, block) for block in unread}.difference(keys)
        yield from (Problem(key, _MISSING) for key in sorted(absent))
        if is_complete:
            known = {key_of(stream, block) for block in records.listed.tolist()}
            yield from (_leftover(key) for key in keys if key not in known)
    if is_complete and scope.is_first:
        for prefix, _ in kinds:
            yield from map(_leftover, keys_of_no_stream(storage, prefix, metadata.num_streams))
