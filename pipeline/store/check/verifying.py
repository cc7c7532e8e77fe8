"""Verifies a store: all records, objects and checksums."""

from collections.abc import Callable, Iterator, Mapping
from itertools import chain

from pipeline.store.check.objects import check_arrays, check_block, check_listings, check_summary
from pipeline.store.check.records import StreamRecords, check_records
from pipeline.store.check.scope import EVERYTHING, OpenStore, Scope
from pipeline.store.format.arrays import layout_of
from pipeline.store.format.block_table import BlockTable, num_rows, split_streams
from pipeline.store.format.metadata import ROOT_KEY, StoreRoot, require_root
from pipeline.store.format.summary import BLOCKS, read_summarised, summary_key
from pipeline.store.generated.group_files import check_groups
from pipeline.store.io.ahead import map_ahead
from pipeline.store.io.problems import Problem, Remedy, reported
from pipeline.store.io.storage import Storage, StorageLike

_BLOCKS_AT_ONCE = 4  # enough to keep object storage busy
_STREAMS_AT_ONCE = 8

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
    storage, problems = Storage.open(place), list[Problem]()
    root = require_root(storage)
    store = OpenStore(storage, root, layout_of(root))
    num_streams = store.layout.num_streams
    summarised = _read_summarised(storage, root, problems)
    parts = dict(enumerate([] if summarised is None else split_streams(summarised, num_streams)))
    some = range(scope.rank, num_streams, scope.world)
    checked = map_ahead(lambda stream: check_records(store, stream, parts.get(stream)), some, _STREAMS_AT_ONCE)
    streams = {records.stream: records for records in checked}
    problems += [problem for records in streams.values() for problem in records.problems]
    if scope.is_first:
        is_known = root.complete and summarised is not None
        problems += check_arrays(store, num_rows(summarised, store.layout) if is_known else None)
    if root.complete or find_leftovers or scope.sample < 1:
        listed = check_listings(store, scope, streams)
        lists_all = root.complete or find_leftovers
        problems += (problem for problem in listed if lists_all or problem.remedy is not Remedy.discard)
    if scope.sample > 0:
        problems += _check_blocks(store, scope, streams, progress)
        problems += check_summary(store) if scope.is_first else ()
    return problems


def _read_summarised(storage: Storage, root: StoreRoot, problems: list[Problem]) -> BlockTable | None:
    """The summary's table of blocks; None if there is none that can be read."""
    if root.summary is not None:
        with reported(problems, summary_key(BLOCKS, root.summary[BLOCKS]), Remedy.finish):
            return read_summarised(storage, root)
    elif root.complete:
        problems.append(Problem(ROOT_KEY, "the store is complete, but has no summary", Remedy.finish))
    return None


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
        yield from chain.from_iterable(check_groups(store.storage, stream) for stream in streams)
