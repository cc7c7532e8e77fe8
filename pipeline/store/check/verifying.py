"""Verifies a store: all records, objects and checksums, and whether the values agree with each other."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby

import numpy as np
import pyarrow as pa
import tensorstore as ts

from pipeline.core.errors import StoreError, StoreInvalid
from pipeline.store.check.ahead import map_ahead
from pipeline.store.check.id_index import StreamIds
from pipeline.store.check.merged_statistics import check_merged
from pipeline.store.check.object_listings import MissingArrays, check_objects
from pipeline.store.check.scope import EVERYTHING, Level, Scope
from pipeline.store.check.skips import describe_skips
from pipeline.store.check.stored_blocks import CheckedBlock, OpenStore, check_block
from pipeline.store.check.stored_records import StreamRecords, check_records, read_again, read_last
from pipeline.store.format.arrays import array_mismatches, edited_arrays, open_existing, stored_layout
from pipeline.store.format.block_table import BlockTable
from pipeline.store.format.commits import CommitRecord
from pipeline.store.format.layout import ITEM_BYTES, MAX_ROWS
from pipeline.store.format.metadata import ROOT_KEY, StoreOutdated, StoreRoot
from pipeline.store.format.problems import Problem, Remedy
from pipeline.store.generated.group_files import check_groups
from pipeline.store.io.storage import Storage, StorageLike

# Each reads READS_AHEAD pieces concurrently: enough to keep object storage busy with little memory and few threads.
BLOCKS_AT_ONCE = 4
_STREAMS_AT_ONCE = 8
_GROUP_COLUMNS = ("document", "n_prompt", "n_completion")

_NOT_CHECKED = {
    Level.records: "arrays and blocks' objects are not checked",
    Level.objects: "blocks' objects are not read",
    Level.checksums: "values are not compared with each other",
}

Progress = Callable[[int, int], None]


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
    note = note or (lambda _: None)
    storage = Storage.open(store)
    root = _read_root(storage)
    if isinstance(root, Problem):
        return [root]
    streams, problems = check_records(storage, root, scope)
    _note_scope(root, scope, note)
    if skips := describe_skips(storage, BlockTable.join(records.table for records in streams.values())):
        note(f"skipped {skips}")
    if scope.level == Level.records:
        return problems
    opened = _open(storage, root, problems)
    if opened is None:
        return problems
    others = _last_records_of_others(storage, root, scope)
    last_records = [*(records.last for records in streams.values() if records.last is not None), *others]
    array_problems, readable = _check_arrays(opened, scope, last_records)
    problems += array_problems
    missing, object_problems = check_objects(opened, scope, streams, readable)
    problems += object_problems
    if len(readable) < len(opened.arrays):
        note("the arrays do not match the records, so no blocks are read")
    elif scope.level >= Level.checksums:
        problems += _BlockChecks(opened, scope, streams, missing).check(progress)
        if scope.is_first and root.complete:
            problems += check_merged(opened)
    return problems


def _read_root(storage: Storage) -> StoreRoot | Problem:
    """The root, or its problem. Raises StoreInvalid if there is none, or one of a development version."""
    if what := storage.file_problem(ROOT_KEY):
        return Problem(ROOT_KEY, what, Remedy.restore)
    text = storage.read(ROOT_KEY)
    if text is None:
        raise StoreInvalid(f"there is no activation store at {storage.path}: it has no {ROOT_KEY}.")
    try:
        return StoreRoot.from_json(text, storage.path)
    except StoreOutdated:
        raise
    except StoreError as error:
        return Problem(ROOT_KEY, str(error), Remedy.restore)


class _BlockChecks:
    """Reads and checks the scope's blocks, stream by stream. streams: the streams' records. missing: the arrays whose
    objects are known to be missing."""

    def __init__(
        self, store: OpenStore, scope: Scope, streams: Mapping[int, StreamRecords], missing: MissingArrays
    ) -> None:
        self._store = store
        self._scope = scope
        self._streams = streams
        self._missing = missing

    def check(self, progress: Progress | None) -> Iterator[Problem]:
        """The problems of blocks, and of each stream's index of ids and groups."""
        storage = self._store.storage
        table = BlockTable.join(records.table for records in self._streams.values())
        numbers = np.stack([table.column("stream"), table.column("block")], axis=1)
        numbers = numbers[np.fromiter((self._scope.reads_block(*pair) for pair in numbers), bool, len(numbers))]
        changed: list[Problem] = []  # of records that could be read before
        blocks = map_ahead(self._check_block, read_again(storage, numbers, changed), BLOCKS_AT_ONCE)
        blocks = _with_progress(blocks, len(numbers), progress)
        not_read = dict(self._streams)
        for stream, stream_blocks in groupby(blocks, key=lambda block: block.record.stream):
            yield from self._check_stream(not_read.pop(stream), stream_blocks)
        for records in not_read.values():
            yield from self._check_stream(records, ())
        yield from changed

    def _check_block(self, record: CommitRecord) -> CheckedBlock:
        missing = self._missing.get((record.stream, record.block), ())
        return check_block(self._store, record, missing, only_checksums=self._scope.level < Level.all)

    def _check_stream(self, records: StreamRecords, blocks: Iterable[CheckedBlock]) -> Iterator[Problem]:
        tables = []
        ids = StreamIds(self._store.storage, records.stream, records.table)
        for block in blocks:
            yield from block.problems
            ids.add(block.record.block, block.table)
            if self._store.generates and block.table is not None:
                tables.append(block.table.select(_GROUP_COLUMNS))
        yield from ids.problems()
        if self._store.generates:
            is_whole = tables and len(tables) == len(records.table)
            table = pa.concat_tables(tables) if is_whole else None
            yield from check_groups(self._store.storage, records.stream, table, _kept_token_bytes(self._store))


def _with_progress(blocks: Iterable[CheckedBlock], total: int, progress: Progress | None) -> Iterator[CheckedBlock]:
    for done, block in enumerate(blocks, 1):
        yield block
        if progress is not None:
            progress(done, total)


def _note_scope(root: StoreRoot, scope: Scope, note: Callable[[str], None]) -> None:
    num_streams = root.metadata.num_streams
    if scope.world > 1:
        num_checked = len(scope.streams(num_streams))
        rank_0 = "" if scope.is_first else "; rank 0 also checks the root, the arrays and the merged statistics"
        note(
            f"rank {scope.rank} of {scope.world} checks {num_checked} of {num_streams} streams{rank_0}. The store is "
            "sound if no rank finds a problem"
        )
    if scope.level < Level.all:
        note(f"verify.level={scope.level.name}: {_NOT_CHECKED[scope.level]}")
    if scope.level >= Level.checksums and scope.sample < 1:
        note(
            f"verify.sample={scope.sample:g}: outside the sample, only blocks' records and the existence of their "
            "objects are checked"
        )


def _last_records_of_others(storage: Storage, root: StoreRoot, scope: Scope) -> list[CommitRecord]:
    """The last records of the streams outside of the scope, for rank 0, which checks what is merged over all streams;
    [] for other ranks."""
    if not scope.is_first:
        return []
    streams = [stream for stream in range(root.metadata.num_streams) if not scope.has_stream(stream)]
    records = map_ahead(lambda stream: read_last(storage, stream), streams, _STREAMS_AT_ONCE)
    return [record for record in records if record is not None]


def _open(storage: Storage, root: StoreRoot, problems: list[Problem]) -> OpenStore | None:
    """The store, or None if its arrays or their layout cannot be read. Adds to `problems`."""
    arrays: dict[str, ts.TensorStore] = {}
    for name in root.array_names:
        try:
            arrays |= open_existing(storage, [name])
        except StoreError as error:
            problems.append(Problem(f"{name}/zarr.json", str(error), Remedy.rewrite_array))
    if len(arrays) < len(root.array_names):
        return None
    try:
        layout = stored_layout(root, arrays)
    except StoreError as error:
        problems.append(Problem("zarr.json", str(error), Remedy.rewrite_array))
        return None
    num_rows = min(array.shape[0] for array in arrays.values())
    vocab_size = root.metadata.model.get("vocab_size")
    return OpenStore(storage, root, layout, arrays, num_rows, vocab_size)


def _check_arrays(store: OpenStore, scope: Scope, last: Iterable[CommitRecord]) -> tuple[list[Problem], list[str]]:
    """The problems of the arrays' metadata, and the names of the arrays whose blocks can be read. last: the last record
    of each stream in the scope; for rank 0, of all streams."""
    rows = max((store.layout.first_row(r.stream, r.block) + r.rows for r in last), default=0)
    problems, readable = [], []
    wrong = _edited(store) | array_mismatches(store.layout, store.arrays)
    for name, array in store.arrays.items():
        where = f"{name}/zarr.json"
        if name in wrong:
            problems.append(Problem(where, wrong[name], Remedy.rewrite_array))
        if scope.is_first and array.shape[0] != (rows if store.root.complete else MAX_ROWS):
            what = f"has {array.shape[0]} rows, but the last committed row is {rows - 1}"
            problems.append(Problem(where, what, Remedy.rerun))
        if array.shape[0] >= rows and name not in wrong:
            readable.append(name)
    return problems, readable


def _edited(store: OpenStore) -> dict[str, str]:
    """What is wrong with arrays whose metadata was edited, by name."""
    digests = store.root.array_digests
    if digests is None:  # the creation of the store was interrupted: there is no block
        return {}
    if set(digests) != set(store.arrays):
        return dict.fromkeys(store.arrays, "is not among the arrays for which the root has digests")
    return dict.fromkeys(edited_arrays(store.storage, digests), "does not match the digest in the root")


def _kept_token_bytes(store: OpenStore) -> dict[str, int]:
    """The bytes per token of activations kept during generation, by array name; {} if none are kept."""
    dtype = store.root.metadata.model.get("dtype")
    if store.root.metadata.capture.get("when") != "decode" or dtype not in ITEM_BYTES:
        return {}
    return {spec.name: spec.width * ITEM_BYTES[dtype] for spec in store.layout.arrays}
