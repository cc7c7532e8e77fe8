"""Verifies a store: all records, objects and checksums."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain

from pipeline.core.errors import StoreError, StoreInvalid
from pipeline.store.check.blocks import check_block
from pipeline.store.check.problems import EVERYTHING, OpenStore, Problem, Remedy, Scope
from pipeline.store.check.records import StreamRecords, check_listings, check_records
from pipeline.store.format.arrays import array_key, layout_of, parse_rows
from pipeline.store.format.block_table import BlockTable, num_rows, split_streams
from pipeline.store.format.metadata import ROOT_KEY, require_root
from pipeline.store.format.summary import BLOCKS, IDS, IDS_BYTES, STATISTICS, read_merged, read_summarised, summary_key
from pipeline.store.generated.documents import group_key, read_group, stored_groups
from pipeline.store.io.storage import Storage, StorageLike, map_ahead

_BLOCKS_AT_ONCE = 4  # enough to keep object storage busy
_STREAMS_AT_ONCE = 8
_PIECE_BYTES = 64 << 20  # of an object, read at a time

Progress = Callable[[int, int], None]


def verify_store(
    place: StorageLike,
    progress: Progress = lambda done, total: None,
    scope: Scope = EVERYTHING,
    find_leftovers: bool = False,
) -> list[Problem]:
    """All problems of a store's committed blocks; an empty list if it is valid.

    progress: called with the number of checked blocks and the total. scope: what to check; several ranks together find
    all problems. find_leftovers: also list what jobs have left in an unfinished store, which is no problem.
    Raises StoreInvalid if there is no store, or its root is damaged, and StoreError if it cannot be reached. Damage of
    other objects is not raised but returned.
    """
    storage = Storage.open(place)
    root = require_root(storage)
    store = OpenStore(storage, root, layout_of(root))
    num_streams, problems = store.layout.num_streams, list[Problem]()
    summarised = _read_summarised(store, problems)
    parts = dict(enumerate([] if summarised is None else split_streams(summarised, num_streams)))
    some = range(scope.rank, num_streams, scope.world)
    checked = map_ahead(lambda stream: check_records(store, stream, parts.get(stream)), some, _STREAMS_AT_ONCE)
    streams = {records.stream: records for records in checked}
    problems += [problem for records in streams.values() for problem in records.problems]
    if scope.is_first:
        is_known = root.complete and summarised is not None
        problems += _check_arrays(store, num_rows(summarised, store.layout) if is_known else None)
    if root.complete or find_leftovers or scope.sample < 1:
        listed = check_listings(store, scope, streams)
        lists_all = root.complete or find_leftovers
        problems += (problem for problem in listed if lists_all or problem.remedy is not Remedy.discard)
    if scope.sample > 0:
        problems += _check_blocks(store, scope, streams, progress)
        problems += _check_summary(store) if scope.is_first else ()
    return problems


def _read_summarised(store: OpenStore, problems: list[Problem]) -> BlockTable | None:
    """The summary's table of blocks; None if there is none that can be read."""
    if store.root.summary is None and store.root.complete:
        problems.append(Problem(ROOT_KEY, "the store is complete, but has no summary", Remedy.finish))
    if store.root.summary is None:
        return None
    try:
        return read_summarised(store.storage, store.root)
    except StoreError as error:
        problems.append(Problem(summary_key(BLOCKS, store.root.summary[BLOCKS]), str(error), Remedy.finish))
        return None


def _check_arrays(store: OpenStore, num_rows: int | None) -> list[Problem]:
    """Checks the zarr.json of every array, which a store has once it is finished. num_rows: in a complete store, up to
    the last row with tokens."""
    problems: list[Problem] = []
    for spec in store.layout.all_arrays:

        def check(spec=spec, key: str = array_key(spec.name)) -> None:
            content = store.storage.read(key)
            if content is None and not store.root.complete:
                return
            rows = parse_rows(content, store.layout, spec, key)
            if num_rows is not None and rows != num_rows:
                raise StoreInvalid(f"has {rows} rows, but the last committed row is {num_rows - 1}")

        problems += store.problems(array_key(spec.name), check, Remedy.finish)
    return problems


def _check_summary(store: OpenStore) -> list[Problem]:
    """Checks that the merged statistics and the index of ids are those that the root names."""
    summary, problems = store.root.summary or {}, list[Problem]()
    if sha256 := summary.get(STATISTICS):
        problems += store.problems(
            summary_key(STATISTICS, sha256), lambda: read_merged(store.storage, sha256), Remedy.finish
        )
    if sha256 := summary.get(IDS):
        key = summary_key(IDS, sha256)
        check = partial(_require_sha256, store.storage, key, summary[IDS_BYTES], sha256)
        problems += store.problems(key, check, Remedy.finish)
    return problems


def _require_sha256(storage: Storage, key: str, size: int, expected: str) -> None:
    """Raises StoreError unless an object's first `size` bytes have this sha256."""
    digest = hashlib.sha256()
    for start in range(0, size, _PIECE_BYTES):  # a range beyond the end is an error
        [content] = storage.read_many([key], [(start, min(start + _PIECE_BYTES, size))])
        digest.update(content or b"")
    if digest.hexdigest() != expected:
        raise StoreInvalid(f"its sha256 is {digest.hexdigest()}, in the root {expected}")


def _check_blocks(
    store: OpenStore, scope: Scope, streams: Mapping[int, StreamRecords], progress: Progress
) -> Iterator[Problem]:
    """Reads and checks the scope's blocks, and the streams' groups."""
    places = [
        (stream, block)
        for stream, records in streams.items()
        for block in records.table.column("block").tolist()
        if scope.reads_block(stream, block)
    ]
    for done, problems in enumerate(map_ahead(lambda place: check_block(store, *place), places, _BLOCKS_AT_ONCE), 1):
        yield from problems
        progress(done, len(places))
    if store.root.metadata.data.get("source") == "generate":
        yield from chain.from_iterable(_check_groups(store, stream) for stream in streams)


def _check_groups(store: OpenStore, stream: int) -> Iterator[Problem]:
    """Finds the groups of a stream that cannot be read. A missing one is generated again when it is needed."""
    for index in stored_groups(store.storage, stream):
        read = partial(read_group, store.storage, stream, index)
        yield from store.problems(group_key(stream, index), read, Remedy.discard)
