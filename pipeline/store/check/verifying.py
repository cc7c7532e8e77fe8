"""Verifies a store: all records, objects and checksums."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import pyarrow as pa

from pipeline.core.errors import StoreError, StoreInvalid
from pipeline.store.check.ahead import map_ahead
from pipeline.store.check.scope import EVERYTHING, Level, OpenStore, Scope
from pipeline.store.check.skips import describe_skips
from pipeline.store.check.stored_blocks import CheckedBlock, check_block
from pipeline.store.check.stored_objects import check_objects
from pipeline.store.check.stored_records import StreamRecords, check_records, read_again
from pipeline.store.check.stored_summary import check_arrays, check_other_summaries, check_summary
from pipeline.store.format.arrays import layout_of
from pipeline.store.format.block_table import BlockTable
from pipeline.store.format.layout import ITEM_BYTES
from pipeline.store.format.metadata import ROOT_KEY, StoreOutdated, StoreRoot
from pipeline.store.generated.group_files import check_groups
from pipeline.store.io.problems import Problem, Remedy
from pipeline.store.io.storage import Storage, StorageLike

_BLOCKS_AT_ONCE = 4  # enough to keep object storage busy
_GROUP_COLUMNS = ("document", "n_prompt", "n_completion")

_NOT_CHECKED = {
    Level.records: "arrays and blocks' objects are not checked",
    Level.objects: "blocks' objects are not read",
}

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Findings:
    """The problems of a store, and the objects of an unfinished one that belong to no committed block. The latter are
    no problem: a job that was killed left them, and the next one adopts them."""

    problems: list[Problem]
    leftovers: list[Problem]


def verify_store(
    store: StorageLike,
    progress: Progress | None = None,
    note: Callable[[str], None] | None = None,
    scope: Scope = EVERYTHING,
) -> list[Problem]:
    """All problems of a store's committed blocks; an empty list if it is valid.

    progress: called with the number of checked blocks and the total. note: called with a sentence about each thing that
    is not checked. scope: what to check; several ranks together find all problems.
    Raises StoreInvalid if there is no store, and StoreError if it cannot be reached. Damage is not raised but returned.
    """
    return examine(Storage.open(store), progress, note, scope).problems


def examine(
    storage: Storage,
    progress: Progress | None = None,
    note: Callable[[str], None] | None = None,
    scope: Scope = EVERYTHING,
    find_leftovers: bool = False,
) -> Findings:
    """As `verify_store`. find_leftovers: list the objects of an unfinished store, too."""
    note = note or (lambda _: None)
    store = _open(storage)
    if isinstance(store, Problem):
        return Findings([store], [])
    root = store.root
    streams, problems = check_records(storage, store.layout, scope)
    summarised, summary_problems = check_summary(storage, root, streams)
    problems += summary_problems
    _note_scope(root, scope, note)
    blocks = BlockTable.join(records.table for records in streams.values())
    if skips := describe_skips(storage, blocks):
        note(f"skipped {skips}")
    if scope.level == Level.records:
        return Findings(problems, [])
    if scope.is_first:
        is_known = root.complete and summarised is not None
        problems += check_arrays(store, _num_rows(store, summarised) if is_known else None)
    leftovers: list[Problem] = []
    if root.complete or find_leftovers or scope.level is Level.objects or scope.sample < 1:
        for problem in check_objects(store, scope, streams):
            is_leftover = problem.remedy is Remedy.discard and not root.complete
            (leftovers if is_leftover else problems).append(problem)
    if scope.level >= Level.checksums:
        problems += _check_blocks(store, scope, streams, progress)
        problems += check_other_summaries(storage, root) if scope.is_first else ()
    return Findings(problems, leftovers)


def _open(storage: Storage) -> OpenStore | Problem:
    """The store, or the problem of its root. Raises StoreInvalid if there is none, or one of a development version."""
    if what := storage.file_problem(ROOT_KEY):
        return Problem(ROOT_KEY, what, Remedy.restore)
    text = storage.read(ROOT_KEY)
    if text is None:
        raise StoreInvalid(f"there is no activation store at {storage.path}: it has no {ROOT_KEY}.")
    try:
        root = StoreRoot.from_json(text, storage.path)
        return OpenStore(storage, root, layout_of(root))
    except StoreOutdated:
        raise
    except StoreError as error:
        return Problem(ROOT_KEY, str(error), Remedy.restore)


def _num_rows(store: OpenStore, blocks: BlockTable) -> int:
    """The number of rows up to the last one of these blocks that has tokens."""
    shards = blocks.column("block") * store.layout.num_streams + blocks.column("stream")
    return int((shards * store.layout.rows_per_block + blocks.column("rows")).max(initial=0))


def _check_blocks(
    store: OpenStore, scope: Scope, streams: Mapping[int, StreamRecords], progress: Progress | None
) -> Iterator[Problem]:
    """Reads and checks the scope's blocks and each stream's groups, stream by stream."""
    table = BlockTable.join(records.table for records in streams.values())
    table = table[np.array([scope.reads_block(block.stream, block.block) for block in table], bool)]
    changed: list[Problem] = []  # of records that could be read before
    records = read_again(store.storage, table, changed)
    blocks = map_ahead(lambda record: check_block(store, record), records, _BLOCKS_AT_ONCE)
    not_read = dict(streams)
    for stream, stream_blocks in groupby(_with_progress(blocks, len(table), progress), lambda b: b.record.stream):
        yield from _check_stream(store, not_read.pop(stream), stream_blocks)
    for stream in not_read.values():
        yield from _check_stream(store, stream, ())
    yield from changed


def _check_stream(store: OpenStore, records: StreamRecords, blocks: Iterable[CheckedBlock]) -> Iterator[Problem]:
    generates = store.root.metadata.data.get("source") == "generate"
    tables = []
    for block in blocks:
        yield from block.problems
        if generates and block.documents is not None and {*_GROUP_COLUMNS} <= {*block.documents.column_names}:
            tables.append(block.documents.select(_GROUP_COLUMNS))
    if generates:
        is_whole = tables and len(tables) == len(records.table)
        documents = pa.concat_tables(tables) if is_whole else None
        yield from check_groups(store.storage, records.stream, documents, _kept_token_bytes(store))


def _kept_token_bytes(store: OpenStore) -> dict[str, int]:
    """The bytes per token of activations kept during generation, by array name; {} if none are kept."""
    dtype = store.root.metadata.model.get("dtype")
    if store.root.metadata.capture.get("when") != "decode" or dtype not in ITEM_BYTES:
        return {}
    return {spec.name: spec.width * ITEM_BYTES[dtype] for spec in store.layout.arrays}


def _with_progress(blocks: Iterable[CheckedBlock], total: int, progress: Progress | None) -> Iterator[CheckedBlock]:
    for done, block in enumerate(blocks, 1):
        yield block
        if progress is not None:
            progress(done, total)


def _note_scope(root: StoreRoot, scope: Scope, note: Callable[[str], None]) -> None:
    num_streams = root.metadata.num_streams
    if scope.world > 1:
        num_checked = len(scope.streams(num_streams))
        rank_0 = "" if scope.is_first else "; rank 0 also checks the arrays and what is merged over all streams"
        note(
            f"rank {scope.rank} of {scope.world} checks {num_checked} of {num_streams} streams{rank_0}. The store is "
            "sound if no rank finds a problem"
        )
    if scope.level < Level.checksums:
        note(f"verify.level={scope.level.name}: {_NOT_CHECKED[scope.level]}")
    elif scope.sample < 1:
        note(
            f"verify.sample={scope.sample:g}: outside the sample, only blocks' records and the existence of their "
            "objects are checked"
        )
