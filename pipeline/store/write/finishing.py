"""Finishes a store: marks it complete once every stream holds its share of the target.

Several processes may finish a store at the same time, and a slow one may find that the store has been reopened for more
blocks meanwhile, or has even been completed again. Each object is therefore written on the condition that it has not
changed since finishing began, except the streams' block tables, which are valid in any version. The root is read after
all other objects, because a process that extends the store changes the root first.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from pipeline.core.errors import StoreError, StoreInvalid
from pipeline.store.format.arrays import set_rows
from pipeline.store.format.block_table import (
    TABLE_KEY,
    StreamBlocks,
    join_streams,
    read_table,
    stream_table_key,
    table_sha256,
)
from pipeline.store.format.layout import MAX_ROWS, StoreLayout
from pipeline.store.format.metadata import ROOT_KEY, StoreRoot, read_existing_root, read_root, read_root_generation
from pipeline.store.format.statistics import MERGED_GROUP_KEY, encode_merged, merge_streams, merged_digest, merged_keys
from pipeline.store.format.target import is_reached
from pipeline.store.generated.kept_activations import kept_keys
from pipeline.store.io.storage import Storage, write_many
from pipeline.store.write.claims import delete_claims, read_claims

_ATTEMPTS = 20


class _ChangedMeanwhile(Exception):
    """Another process has changed the object that was about to be written."""


@dataclass(frozen=True)
class _InitialState:
    """The state of the store when finishing began: objects and their generations by key, the claims' generations, and
    the keys of kept activations."""

    objects: Mapping[str, bytes | None]
    generations: Mapping[str, bytes]
    claims: Mapping[str, bytes | None]
    kept: list[str]


Streams = Mapping[int, StreamBlocks]  # all streams of a store, in order


def finish_store(
    storage: Storage, layout: StoreLayout, read: Callable[[], Streams], force: bool = False
) -> StoreRoot | None:
    """Writes the table of the blocks that `read` returns, merges the statistics of the streams, marks the store
    complete, and trims the arrays to the last committed row. If the store is already complete, only the steps that an
    interruption left undone are repeated.

    Returns None and changes nothing if the root's target is not reached, because another run is extending the store, or
    if a complete store has lost records. `force` completes it anyway.

    Deletes kept activations and, once the target is reached, the claims that no process renews. Nothing else is
    deleted, because an object without a commit record may belong to a block that a worker is about to commit. Objects
    that a killed run left behind stay, and `verify_store` names them. Raises StoreError.
    """
    for _ in range(_ATTEMPTS):
        try:
            return _try_to_finish(storage, layout, read, force)
        except _ChangedMeanwhile:
            continue
    raise StoreError(f"cannot complete {storage.path}: other processes changed it {_ATTEMPTS} times. Try again.")


def _try_to_finish(storage: Storage, layout: StoreLayout, read: Callable[[], Streams], force: bool) -> StoreRoot | None:
    initial = _read_initial_state(storage, layout)
    root, generation = read_existing_root(storage)
    try:
        streams = read()
        tables = [stream.table for stream in streams.values()]
        blocks = tuple(map(len, tables))
        if root.complete:
            before = root.blocks or ()
            is_whole = len(before) == len(blocks) and all(now >= then for now, then in zip(blocks, before, strict=True))
        else:
            is_whole = is_reached(tables, root.target)
        if not (is_whole or force):
            return None
        objects, digests = _summaries(storage, layout, root, streams, initial)
    except StoreInvalid:
        if read_root_generation(storage)[1] != generation:  # another run has started to rewrite a block
            raise _ChangedMeanwhile from None
        raise
    outdated = [stream for stream, stored in streams.items() if len(stored.to_index) != stored.num_indexed]
    write_many(storage, ((stream_table_key(stream), streams[stream].to_index.encode()) for stream in outdated))
    for key, content in objects.items():
        _write(storage, key, content, initial)
    finished = replace(
        root,
        complete=True,
        blocks=blocks,
        blocks_sha256=table_sha256(objects[TABLE_KEY]),
        statistics_digests=digests or None,
    )
    is_written = finished == root or storage.write_if_unchanged(ROOT_KEY, finished.to_json(), generation) is not None
    if not is_written and read_root(storage) != finished:  # else another process wrote an equal root
        raise _ChangedMeanwhile
    if is_reached(tables, root.target):  # otherwise a worker may be extending the store under its claim
        delete_claims(storage, initial.claims)
    _settle_rows(storage, layout, read)
    write_many(storage, ((key, None) for key in initial.kept))
    return finished


def _summaries(
    storage: Storage, layout: StoreLayout, root: StoreRoot, streams: Streams, initial: _InitialState
) -> tuple[dict[str, bytes], dict[str, str]]:
    """The objects to write, by key: the block table and, unless the store already has them, the merged statistics.
    Also returns the digests of the merged statistics, by array."""
    table, digests = join_streams(streams), _merged_digests(initial.objects, layout)
    objects = {TABLE_KEY: table.encode()}
    is_same = root.complete and root.blocks == tuple(len(stream.table) for stream in streams.values())
    if is_same and digests == (root.statistics_digests or {}) and (digests or not table.has_statistics.all()):
        return objects, digests
    merged = encode_merged(merge_streams(storage, [stream.last for stream in streams.values() if stream.last]))
    return objects | merged, _merged_digests(merged, layout)


def _read_initial_state(storage: Storage, layout: StoreLayout) -> _InitialState:
    keys = [TABLE_KEY, MERGED_GROUP_KEY, *(key for name in layout.summarised for key in merged_keys(name))]
    stored = dict(zip(keys, storage.read_with_generations(keys), strict=True))
    objects = {key: content for key, (content, _) in stored.items()}
    generations = {key: generation for key, (_, generation) in stored.items()}
    return _InitialState(objects, generations, read_claims(storage), kept_keys(storage))


def _merged_digests(objects: Mapping[str, bytes | None], layout: StoreLayout) -> dict[str, str]:
    """The digests of those merged statistics that are in `objects`, by array."""
    digests = {name: merged_digest(objects, name) for name in layout.summarised}
    return {name: digest for name, digest in digests.items() if digest is not None}


def _write(storage: Storage, key: str, content: bytes, initial: _InitialState) -> None:
    if initial.objects[key] == content:
        return
    if storage.write_if_unchanged(key, content, initial.generations[key]) is None and storage.read(key) != content:
        raise _ChangedMeanwhile


def _settle_rows(storage: Storage, layout: StoreLayout, read: Callable[[], Streams]) -> None:
    """Sets the number of rows of the arrays as the root requires: up to the last committed row if the store is
    complete, else MAX_ROWS. Repeats if another process changes the root meanwhile."""
    names = [spec.name for spec in layout.all_arrays]
    for _ in range(_ATTEMPTS):
        root, generation = read_root_generation(storage)
        if root is None:
            return
        rows = MAX_ROWS
        if root.complete:
            table = read_table(storage, root.blocks_sha256) or join_streams(read())
            rows = layout.first_row(table[-1].stream, table[-1].block) + table[-1].rows if len(table) else 0
        set_rows(storage, names, rows)
        if read_root_generation(storage)[1] == generation:
            return
    raise StoreError(f"cannot complete {storage.path}: other processes changed it {_ATTEMPTS} times. Try again.")
