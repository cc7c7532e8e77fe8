"""Merges stores of the same configuration: copies the blocks of each, object by object, into one store.

A block has the same keys in every store with the same fingerprint, so objects are copied without decoding them.
"""

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import partial, reduce
from itertools import groupby
from operator import itemgetter

import numpy as np
from jaxtyping import Int64

from pipeline.core.errors import StoreError, StoreInvalid, StoreMismatch
from pipeline.store.features.index_file import index_keys
from pipeline.store.format.arrays import fill_digest
from pipeline.store.format.commits import CommitRecord, read_commit_records, read_stream_records
from pipeline.store.format.layout import MAX_ROWS, MIB, StoreLayout
from pipeline.store.format.metadata import ROOT_KEY, StoreRoot
from pipeline.store.format.statistics import statistics_key
from pipeline.store.format.tables import table_digest, table_key
from pipeline.store.format.target import has_share, larger, stream_share
from pipeline.store.generated.group_keys import GENERATED_PREFIX
from pipeline.store.io.directories import require_no_links
from pipeline.store.io.failures import VERIFY_REMEDY
from pipeline.store.io.storage import Storage
from pipeline.store.write.claims import held_claims, named_holders
from pipeline.store.write.store_writer import StoreWriter, create_root
from pipeline.store.write.vacancy import require_vacant

# Memory for the objects that are copied at the same time; each is held in memory whole.
COPIES_MIB = 1024
MIN_COPIES, MAX_COPIES = 4, 32
BLOCKS_AHEAD = 8  # blocks whose copying starts before the next commit
_STREAMS_AT_ONCE = 8  # streams whose records are compared in parallel
_RECORDS_AT_ONCE = 256


def merge_stores(sources: Sequence[str], path: str, progress: Callable[[int, int], None] | None = None) -> StoreWriter:
    """Copies committed blocks of the `sources` that the store at `path` lacks into it. Creates the store if necessary.

    Several blocks are copied in parallel and committed one by one in stream order, so an interrupted merge continues
    where it stopped. The store is not finished. `progress` is called with the number of committed blocks and the number
    of all blocks to copy.

    Raises StoreMismatch, before anything is copied, if a store has a different configuration or two stores hold
    different versions of a block. Raises StoreInvalid for a source that is not a store, or that has lost objects of a
    block, which is then not committed. Raises StoreError, also if workers hold streams of the store at `path`.
    """
    opened = [StoreWriter.open_existing(source) for source in sources]
    for other in opened[1:]:
        _require_fit(opened[0], other)
    storage = Storage.open(path)
    existing = [StoreWriter.open_existing(storage)] if storage.read(ROOT_KEY) is not None else []
    for store in existing:
        _require_fit(opened[0], store)
    if holders := held_claims(storage):
        held = named_holders(holders)
        raise StoreError(
            f"cannot merge into {path}: workers hold streams ({held}). Let them end first or, if they are dead, delete "
            f"{path}/_claims/."
        )
    missing = _missing(existing, opened)
    target = existing[0] if existing else _create(storage, opened[0])
    _copy_errors([source.root for source in opened], target)
    if any(source.root.allows_not_finite for source in opened):
        target.allow_not_finite()
    if len(missing):
        target.reopen(reduce(larger, (source.target for source in opened)))
    with closing(_copy_blocks(_read_records(opened, missing), target)) as committed:
        for done, _ in enumerate(committed, 1):
            if progress is not None:
                progress(done, len(missing))
    for source in opened:
        _copy_metrics_and_groups(source, target)
    return target


def _copy_errors(sources: Sequence[StoreRoot], target: StoreWriter) -> None:
    """Copies the measured errors of int8 from the first source that has them, unless the target has its own."""
    weights = next((root.weights_error for root in sources if root.weights_error is not None), None)
    if weights is not None and target.root.weights_error is None:
        target.record_weights_error(weights)
    cache = next((root.cache_error for root in sources if root.cache_error is not None), None)
    if cache is not None and target.root.cache_error is None:
        target.record_cache_error(cache)


def _is_cut_short(source: StoreWriter, record: CommitRecord, target: StoreWriter) -> bool:
    """Whether a block is truncated in the source, but will be whole in a target that a longer run is extending. That
    run computes the whole block, and may be writing it now."""
    if target.complete or not record.truncated:
        return False
    share = stream_share(target.target, target.metadata.num_streams, record.stream)
    return not has_share(source.streams[record.stream].table[: record.block + 1], share)


def _require_fit(first: StoreWriter, other: StoreWriter) -> None:
    """Raises StoreMismatch unless both stores have the same configuration and array format."""
    different = [f"{d.key}: {d.stored!r} and {d.asked!r}" for d in first.metadata.differences(other.metadata)] or [
        f"{name}/zarr.json: {left} and {right}"
        for (name, left), right in zip(_formats(first).items(), _formats(other).values(), strict=True)
        if left != right
    ]
    if different:
        lines = "".join(f"\n  {line}" for line in different)
        raise StoreMismatch(f"the stores {first.path} and {other.path} have different configurations:{lines}")


def _formats(store: StoreWriter) -> dict[str, dict]:
    """The zarr.json of every array, by name, with the number of rows set to MAX_ROWS."""
    names = [spec.name for spec in store.layout.all_arrays]
    texts = store.storage.read_many([f"{name}/zarr.json" for name in names])
    zarr_jsons = {name: json.loads(text) for name, text in zip(names, texts, strict=True)}
    for zarr_json in zarr_jsons.values():
        zarr_json["shape"][0] = MAX_ROWS
    return zarr_jsons


def _missing(existing: Sequence[StoreWriter], sources: Sequence[StoreWriter]) -> Int64[np.ndarray, "n 3"]:
    """The blocks to copy, sorted: stream, block, and the index of the first source that has the block.

    Reads the records of a few streams at a time; `_read_records` reads them again when the blocks are copied.
    """
    parts, num_streams = [np.empty((0, 3), np.int64)], sources[0].metadata.num_streams
    with ThreadPoolExecutor(_STREAMS_AT_ONCE, thread_name_prefix="records") as pool:
        for first in range(0, num_streams, _STREAMS_AT_ONCE):
            streams = range(first, min(first + _STREAMS_AT_ONCE, num_streams))
            parts += pool.map(partial(_missing_in_stream, existing, sources), streams)
    return np.concatenate(parts)


def _missing_in_stream(
    existing: Sequence[StoreWriter], sources: Sequence[StoreWriter], stream: int
) -> Int64[np.ndarray, "n 3"]:
    stores = [*existing, *sources]
    holders: dict[int, tuple[int, CommitRecord]] = {}
    for number, store in enumerate(stores):
        for record in read_stream_records(store.storage, stream):
            holder, held = holders.setdefault(record.block, (number, record))
            if not held.is_same_block(record):
                raise StoreMismatch(
                    f"block {record.block} of stream {stream} differs between {stores[holder].path} and {store.path}. "
                    f"Only stores that computed different streams can be merged. Leave out one of them."
                )
    blocks = [
        (stream, block, number - len(existing))
        for block, (number, record) in sorted(holders.items())
        if number >= len(existing) and not any(_is_cut_short(stores[number], record, target) for target in existing)
    ]
    return np.array(blocks, np.int64).reshape(-1, 3)


def _read_records(
    sources: Sequence[StoreWriter], missing: Int64[np.ndarray, "n 3"]
) -> Iterator[tuple[StoreWriter, CommitRecord]]:
    """The source and the record of each block to copy, read in batches ahead of the copying."""
    for first in range(0, len(missing), _RECORDS_AT_ONCE):
        part = missing[first : first + _RECORDS_AT_ONCE].tolist()
        for number, blocks in groupby(part, key=itemgetter(2)):
            source = sources[number]
            places = [(stream, block) for stream, block, _ in blocks]
            yield from ((source, record) for record in read_commit_records(source.storage, places))


def _create(storage: Storage, like: StoreWriter) -> StoreWriter:
    """Creates an empty store of the same configuration, or completes an interrupted creation."""
    require_vacant(storage)  # before anything is written
    for name, zarr_json in _formats(like).items():
        storage.write_if_absent(f"{name}/zarr.json", json.dumps(zarr_json).encode())
    create_root(storage, like.metadata, like.layout)
    return StoreWriter.open(storage, like.metadata, like.layout)


def _num_copies(layout: StoreLayout) -> int:
    largest = layout.rows_per_block * max(layout.row_bytes(spec) for spec in layout.all_arrays)
    return min(max(COPIES_MIB * MIB // largest, MIN_COPIES), MAX_COPIES)


def _copy_blocks(missing: Iterable[tuple[StoreWriter, CommitRecord]], target: StoreWriter) -> Iterator[None]:
    """Copies and commits the blocks, and yields after each commit. Later blocks may already be being copied."""
    under_way: deque[tuple[CommitRecord, list[Future[None]] | None]] = deque()

    def commit_first() -> None:
        record, copies = under_way.popleft()
        for copy in copies or ():
            copy.result()
        target.commit_written(record, is_committed=copies is None)

    with ThreadPoolExecutor(_num_copies(target.layout), thread_name_prefix="copy") as pool:
        try:
            for source, record in missing:
                under_way.append((record, _start_block(source, target, record, pool)))
                if len(under_way) > BLOCKS_AHEAD:
                    commit_first()
                    yield
            while under_way:
                commit_first()
                yield
        finally:
            pool.shutdown(cancel_futures=True)


def _start_block(
    source: StoreWriter, target: StoreWriter, record: CommitRecord, pool: ThreadPoolExecutor
) -> list[Future[None]] | None:
    """Starts copying a block's objects. Returns None if the target has the block, because another job wrote it first.

    Zarr does not store a shard whose values all are the fill value. Such a shard is deleted in the target, where an
    earlier job may have left an object. Raises StoreInvalid for a symbolic link, which may point outside the store. The
    copies raise StoreInvalid for an object that the source has lost.
    """
    if target.storage.read(record.key) is not None:
        return None
    stream, block = record.stream, record.block
    shards = {target.layout.shard_key(spec, stream, block): spec.name for spec in target.layout.all_arrays}
    files = {table_key(stream, block): record.table_sha256}
    if record.statistics_sha256:
        files[statistics_key(stream, block)] = record.statistics_sha256
    keys = [*shards, *files, *index_keys(target.metadata, stream, block)]
    require_no_links(source.storage.directory, keys)

    def check(key: str, content: bytes | None) -> bytes | None:
        if content is None and not (key in shards and _is_fill(source, record, shards[key])):
            problem = "is missing, although the block is committed"
        elif key in files and table_digest(content) != files[key]:
            problem = "does not match its commit record"
        else:
            return content
        raise StoreInvalid(f"{source.storage.url(key)} {problem}. {VERIFY_REMEDY}")

    def copy(key: str) -> None:
        [content] = source.storage.read_checked([key], check)
        target.storage.write(key, content)

    return [pool.submit(copy, key) for key in keys]


def _is_fill(source: StoreWriter, record: CommitRecord, name: str) -> bool:
    """Whether all of a block's values of an array are the fill value."""
    return record.digests.get(name) == fill_digest(source.arrays[name])


def _copy_metrics_and_groups(source: StoreWriter, target: StoreWriter) -> None:
    """Copies the logs of the runs, whose names are unique, and the groups of generated documents, which are equal in
    all stores."""
    for prefix in ("_metrics/", GENERATED_PREFIX):
        known = set(target.storage.list_keys(prefix))
        keys = [key for key in source.storage.list_keys(prefix) if key not in known]
        require_no_links(source.storage.directory, keys)
        for key, content in zip(keys, source.storage.read_many(keys), strict=True):
            if content is not None:  # None: deleted after it was listed
                target.storage.write_if_absent(key, content)
