"""Verifying a store: every record, every object, every checksum, and that everything is aligned."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import islice

import numpy as np
import pyarrow as pa
import tensorstore as ts

from pipeline.core.errors import StoreError, StoreInvalid
from pipeline.store.check.block_checks import check_chain, check_statistics, check_tiling
from pipeline.store.check.stored_blocks import CheckedBlock, OpenStore, check_block
from pipeline.store.format.arrays import array_mismatches, edited_arrays, open_existing, refused_arrays, stored_layout
from pipeline.store.format.block_table import TABLE_KEY, BlockTable, index_key, table_sha256
from pipeline.store.format.commits import (
    COMMITS_PREFIX,
    CONSOLIDATED_KEY,
    CommitRecord,
    consolidate,
    consolidated_digest,
    parse_commit_key,
)
from pipeline.store.format.layout import ITEM_BYTES, MAX_ROWS
from pipeline.store.format.metadata import ROOT_KEY, StoreRoot
from pipeline.store.format.problems import Problem, Remedy
from pipeline.store.format.statistics import (
    MERGED_GROUP,
    MERGED_GROUP_KEY,
    STATISTICS_PREFIX,
    BlockStatistics,
    decode_merged,
    merge_arrays,
    merged_digest,
    merged_keys,
    statistics_key,
)
from pipeline.store.format.tables import TABLES_PREFIX, table_key
from pipeline.store.generated.group_files import check_groups
from pipeline.store.io.storage import Storage, StorageLike

# Each has READS_AHEAD pieces under way: enough to keep an object store busy with little memory and few threads.
BLOCKS_AT_ONCE = 4


def verify_store(
    place: StorageLike,
    progress: Callable[[int, int], None] | None = None,
    note: Callable[[str], None] | None = None,
) -> list[Problem]:
    """Everything that is wrong with the committed blocks of a store; an empty list when it is sound.

    `progress` is called with the number of checked blocks and the number of all, `note` with a sentence on each thing
    that could not be checked. Damage is a Problem, not an error. Raises StoreInvalid where there is no store, and
    StoreError where it cannot be reached.
    """
    storage = Storage.open(place)
    root = _read_root(storage)
    if isinstance(root, Problem):
        return [root]
    problems: list[Problem] = []
    records = _read_records(storage, problems)
    problems += _check_records(root, records)
    problems += _check_consolidated(storage, root, records)
    problems += _check_block_tables(storage, root, records)
    store = _open(storage, root, problems)
    if store is None:
        return problems
    array_problems, readable = _check_arrays(store, records)
    problems += array_problems
    if root.complete:
        problems += _check_leftovers(store)
    if readable:
        problems += _check_blocks(store, records, progress)
        if note is not None:
            _note_missing_digests(root, records, note)
    return problems


def _read_root(storage: Storage) -> StoreRoot | Problem:
    """The root, or what is wrong with it. Raises StoreInvalid where there is none."""
    if what := storage.file_problem(ROOT_KEY):
        return Problem(ROOT_KEY, what, Remedy.restore)
    text = storage.read(ROOT_KEY)
    if text is None:
        raise StoreInvalid(f"there is no activation store at {storage.path}: it has no {ROOT_KEY}.")
    try:
        return StoreRoot.from_json(text, storage.path)
    except StoreError as error:
        return Problem(ROOT_KEY, str(error), Remedy.restore)


def _check_blocks(
    store: OpenStore, records: Mapping[int, Sequence[CommitRecord]], progress: Callable[[int, int], None] | None
) -> Iterator[Problem]:
    """The problems of every block, of each stream's document tables, and of the merged statistics."""
    ordered = [record for stream in sorted(records) for record in records[stream]]
    done = 0
    merging = _Merging()
    tables: dict[int, pa.Table] = {}  # of the streams whose document tables can all be read
    with (
        ThreadPoolExecutor(BLOCKS_AT_ONCE, thread_name_prefix="verify") as pool,
        closing(pool.map(partial(check_block, store), ordered)) as results,
    ):
        for stream in sorted(records):
            stream_tables: list[pa.Table] = []
            for block in islice(results, len(records[stream])):
                yield from block.problems
                stream_tables += [] if block.table is None else [block.table]
                yield from merging.add(block)
                done += 1
                if progress is not None:
                    progress(done, len(ordered))
            if len(stream_tables) == len(records[stream]):
                tiling = check_tiling(stream_tables, records[stream][-1], store.root.metadata.num_streams)
                yield from (Problem(f"_documents/stream-{stream:05d}", what) for what in tiling)
                if store.generates:
                    tables[stream] = pa.concat_tables(stream_tables).select(["document", "n_prompt", "n_completion"])
    yield from _check_merged(store, merging)
    if store.generates:
        sizes = _kept_token_bytes(store)
        for stream in range(store.root.metadata.num_streams):
            yield from check_groups(store.storage, stream, tables.get(stream), sizes)


def _note_missing_digests(
    root: StoreRoot, records: Mapping[int, Sequence[CommitRecord]], note: Callable[[str], None]
) -> None:
    has_digests = [record.digests is not None for stream_records in records.values() for record in stream_records]
    if not all(has_digests):
        note(
            f"{has_digests.count(False)} of {len(has_digests)} blocks were written by an earlier program and have no "
            "digests: an object that was exchanged for another valid one is found only where it contradicts the "
            "statistics"
        )
    if root.array_digests is None:
        note("the root was written by an earlier program, and has no digests: the next run adds them")


def _read_records(storage: Storage, problems: list[Problem]) -> dict[int, list[CommitRecord]]:
    """The records that can be read, by stream, in the order of their blocks."""
    listed = [key for key in storage.list_keys(COMMITS_PREFIX) if key != CONSOLIDATED_KEY]
    no_files = {key: what for key in listed if (what := storage.file_problem(key))}
    problems += (Problem(key, what) for key, what in no_files.items())
    keys = [key for key in listed if key not in no_files]
    records: dict[int, list[CommitRecord]] = {}
    for key, text in zip(keys, storage.read_many(keys), strict=True):
        if text is None:  # withdrawn since it was listed: a worker is writing the block again
            continue
        if parse_commit_key(key) is None:
            problems.append(Problem(key, "is not a commit record"))
            continue
        try:
            record = CommitRecord.from_json(text, "it")
        except StoreError as error:
            problems.append(Problem(key, str(error)))
            continue
        if record.key == key:
            records.setdefault(record.stream, []).append(record)
        else:
            problems.append(Problem(key, f"is the record of block {record.block} of stream {record.stream}"))
    for stream_records in records.values():
        stream_records.sort(key=lambda record: record.block)
    return records


def _check_records(root: StoreRoot, records: Mapping[int, Sequence[CommitRecord]]) -> Iterator[Problem]:
    num_streams = root.metadata.num_streams
    for stream, stream_records in records.items():
        if stream >= num_streams:
            yield Problem(stream_records[0].key, f"the store has streams 0..{num_streams - 1}")
        yield from (Problem(record.key, what) for record, what in check_chain(stream_records))
    if root.complete != (root.blocks is not None):
        what = f"complete is {root.complete}, but the number of blocks is {root.blocks}"
        yield Problem(ROOT_KEY, what, Remedy.restore)
    for stream, expected in enumerate(root.blocks or ()):
        if (num_records := len(records.get(stream, ()))) != expected:
            where = f"{COMMITS_PREFIX}stream-{stream:05d}"
            yield Problem(
                where, f"the store was completed with {expected} blocks of this stream, {num_records} have a record"
            )


def _check_consolidated(
    storage: Storage, root: StoreRoot, records: Mapping[int, Sequence[CommitRecord]]
) -> Iterator[Problem]:
    """A store that is not complete, and one that was finished by an earlier program, has no consolidated records."""
    if root.commits_sha256 is None:
        return
    if what := storage.file_problem(CONSOLIDATED_KEY):
        yield Problem(CONSOLIDATED_KEY, what, Remedy.consolidate)
        return
    text = storage.read(CONSOLIDATED_KEY)
    if text is None:
        yield Problem(CONSOLIDATED_KEY, "is missing, although the store is complete", Remedy.consolidate)
    elif consolidated_digest(text) != root.commits_sha256:
        yield Problem(CONSOLIDATED_KEY, f"does not have the sha256 that {ROOT_KEY} names", Remedy.consolidate)
    elif text != consolidate(records):
        yield Problem(CONSOLIDATED_KEY, "does not agree with the commit records", Remedy.consolidate)


def _check_block_tables(
    storage: Storage, root: StoreRoot, records: Mapping[int, Sequence[CommitRecord]]
) -> Iterator[Problem]:
    """The block table of a complete store, and those of the streams, agree with the records.

    That of a stream may lack the last blocks, or have blocks whose records were deleted to have them computed again. A
    store that was finished by an earlier program has none.
    """
    if root.blocks_sha256 is not None:
        ordered = BlockTable.from_records(record for stream_records in records.values() for record in stream_records)
        expected = ordered.in_row_order(root.metadata.num_streams).encode()
        if what := storage.file_problem(TABLE_KEY):
            yield Problem(TABLE_KEY, what, Remedy.tabulate)
        elif (content := storage.read(TABLE_KEY)) is None:
            yield Problem(TABLE_KEY, "is missing, although the store is complete", Remedy.tabulate)
        elif table_sha256(content) != root.blocks_sha256:
            yield Problem(TABLE_KEY, f"does not have the sha256 that {ROOT_KEY} names", Remedy.tabulate)
        elif content != expected:
            yield Problem(TABLE_KEY, "does not agree with the commit records", Remedy.tabulate)
    for stream, stream_records in records.items():
        key = index_key(stream)
        if what := storage.file_problem(key):
            yield Problem(key, what, Remedy.tabulate)
            continue
        content = storage.read(key)
        table = None if content is None else BlockTable.decode(content)
        expected = BlockTable.from_records(stream_records)
        if content is not None and (table is None or not _agree(table, expected)):
            yield Problem(key, "does not agree with the commit records", Remedy.tabulate)


def _agree(table: BlockTable, expected: BlockTable) -> bool:
    num_blocks = min(len(table), len(expected))
    return np.array_equal(table[:num_blocks].values, expected[:num_blocks].values)


def _open(storage: Storage, root: StoreRoot, problems: list[Problem]) -> OpenStore | None:
    """The store, or None where its arrays or their layout cannot be read."""
    arrays: dict[str, ts.TensorStore] = {}
    for name in root.array_names:
        try:
            arrays |= open_existing(storage, [name])
        except StoreError as error:
            problems.append(Problem(f"{name}/zarr.json", str(error), Remedy.rerun))
    if len(arrays) < len(root.array_names):
        return None
    try:
        layout = stored_layout(root, arrays)
    except StoreError as error:
        problems.append(Problem("zarr.json", str(error), Remedy.rerun))
        return None
    num_rows = min(array.shape[0] for array in arrays.values())
    objects = {name: frozenset(storage.list_keys(f"{name}/c/")) for name in arrays}
    vocab_size = root.metadata.model.get("vocab_size", root.metadata.tokenizer.get("vocab_size"))
    return OpenStore(storage, root, layout, arrays, num_rows, objects, vocab_size)


def _check_arrays(store: OpenStore, records: Mapping[int, Sequence[CommitRecord]]) -> tuple[list[Problem], bool]:
    """The problems of the arrays' dtypes, shapes and store shards; and whether their blocks can be read."""
    last = [stream_records[-1] for stream_records in records.values()]
    rows = max((store.layout.first_row(r.stream, r.block) + r.rows for r in last), default=0)
    problems, readable = [], True
    wrong = _edited(store) | array_mismatches(store.layout, store.arrays)
    for name, array in store.arrays.items():
        where = f"{name}/zarr.json"
        if name in wrong:
            problems.append(Problem(where, wrong[name], Remedy.rerun))
        if array.shape[0] != (rows if store.root.complete else MAX_ROWS):
            what = f"has {array.shape[0]} rows; the last committed row is {rows - 1}"
            problems.append(Problem(where, what, Remedy.rerun))
        readable = readable and array.shape[0] >= rows and name not in wrong
    return problems, readable


def _edited(store: OpenStore) -> dict[str, str]:
    """By name, what is wrong with the arrays whose metadata was edited."""
    if store.root.array_digests is not None:
        if set(store.root.array_digests) != set(store.arrays):
            return dict.fromkeys(store.arrays, "is not one of the arrays whose digests the root has")
        digests = store.root.array_digests
        return dict.fromkeys(edited_arrays(store.storage, digests), "does not have the digest that the root names")
    return refused_arrays(store.storage, store.layout)


def _check_leftovers(store: OpenStore) -> Iterator[Problem]:
    """The objects of a complete store that belong to no block with a record, be it readable or not."""
    blocks = set(filter(None, map(parse_commit_key, store.storage.list_keys(COMMITS_PREFIX))))
    block_keys = {table_key(*place) for place in blocks}
    block_keys |= {statistics_key(*place) for place in blocks}
    block_keys |= {store.layout.shard_key(spec, *place) for place in blocks for spec in store.layout.all_arrays}
    others = (store.storage.list_keys(prefix) for prefix in (TABLES_PREFIX, STATISTICS_PREFIX))
    for keys in (*others, *map(sorted, store.objects.values())):
        for key in keys:
            if key not in block_keys:
                yield Problem(key, "belongs to no committed block, although the store is complete", Remedy.discard)


class _Merging:
    """The merged statistics of the blocks that were checked; `total` is None once those of a block cannot be read, and
    {} once a block has none. Blocks come in the order of their streams."""

    def __init__(self) -> None:
        self.total: BlockStatistics | None = None
        self._stream: BlockStatistics | None = None  # of the present stream's blocks
        self._is_first = True

    def add(self, block: CheckedBlock) -> Iterator[Problem]:
        """The problems of the block's running statistics."""
        own = block.statistics
        self._stream = _merged(self._stream, own) if block.record.block else own
        self.total = own if self._is_first else _merged(self.total, own)
        self._is_first = False
        if self._stream and block.running:
            for name, expected in self._stream.items():
                for what in check_statistics(block.running[name], expected):
                    yield Problem(statistics_key(block.record.stream, block.record.block), f"running, {name}: {what}")


def _merged(first: BlockStatistics | None, second: BlockStatistics | None) -> BlockStatistics | None:
    if first is None or second is None:
        return None
    return merge_arrays(first, second) if set(first) == set(second) else {}


def _check_merged(store: OpenStore, merging: _Merging) -> Iterator[Problem]:
    """The problems of a complete store's `stats/`, which must agree with the blocks' statistics and the root."""
    if not store.root.complete or merging.total is None:
        return
    digests = store.root.statistics_digests
    keys = [MERGED_GROUP_KEY, *(key for spec in store.layout.arrays for key in merged_keys(spec.name))]
    wrong = [Problem(key, what, Remedy.merge_again) for key in keys if (what := store.storage.file_problem(key))]
    if wrong:
        yield from wrong
        return
    objects = dict(zip(keys, store.storage.read_many(keys), strict=True))
    for name, expected in merging.total.items():
        where = merged_keys(name)[0].removesuffix("zarr.json")
        if merged_digest(objects, name) is None:
            yield Problem(where, "is missing, although the store is complete", Remedy.merge_again)
        elif digests is not None and digests.get(name) != merged_digest(objects, name):
            yield Problem(where, "does not have the digest that the root names", Remedy.merge_again)
        else:
            try:
                stored = decode_merged(objects, name)
            except StoreError as error:
                yield Problem(where, str(error), Remedy.merge_again)
                continue
            for what in check_statistics(stored, expected):
                yield Problem(where, what, Remedy.merge_again)
    if merging.total and objects[MERGED_GROUP_KEY] != MERGED_GROUP:
        yield Problem(MERGED_GROUP_KEY, "is missing or was edited", Remedy.merge_again)


def _kept_token_bytes(store: OpenStore) -> dict[str, int]:
    """Of each captured array, the bytes of a token's activation as it is kept while the model writes."""
    dtype = store.root.metadata.model.get("dtype")
    if store.root.metadata.capture.get("when") != "decode" or dtype not in ITEM_BYTES:
        return {}
    return {spec.name: spec.width * ITEM_BYTES[dtype] for spec in store.layout.arrays}
