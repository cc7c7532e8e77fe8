"""Checks the files of a store's summary, and the zarr.json of its arrays."""

import hashlib
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain

import numpy as np

from pipeline.core.counts import counted
from pipeline.core.errors import StoreError
from pipeline.store.check.scope import OpenStore
from pipeline.store.check.stored_records import StreamRecords
from pipeline.store.format.arrays import array_key, parse_rows
from pipeline.store.format.block_table import BlockTable, split_streams
from pipeline.store.format.commits import commit_key
from pipeline.store.format.layout import ArraySpec, StoreLayout
from pipeline.store.format.metadata import ROOT_KEY, StoreRoot
from pipeline.store.format.statistics import decode_statistics
from pipeline.store.format.summary import BLOCKS, IDS, IDS_BYTES, STATISTICS, decode_blocks, summary_key
from pipeline.store.io.problems import Problem, Remedy
from pipeline.store.io.storage import Storage

_PIECE_BYTES = 64 << 20  # read at a time


def check_summary(
    storage: Storage, root: StoreRoot, streams: Mapping[int, StreamRecords]
) -> tuple[BlockTable | None, list[Problem]]:
    """Checks that the summary's table of blocks agrees with the records of these streams. It may lack later blocks,
    unless the store is complete. Returns the table, None if there is none that can be read, and the problems."""
    if root.summary is None:
        what = "the store is complete, but has no summary"
        return None, [Problem(ROOT_KEY, what, Remedy.summarise)] if root.complete else []
    num_streams, sha256 = root.metadata.num_streams, root.summary[BLOCKS]
    key = summary_key(BLOCKS, sha256)
    try:
        [table] = storage.read_checked([key], lambda key, content: decode_blocks(content, key, sha256, num_streams))
    except StoreError as error:
        return None, [Problem(key, str(error), Remedy.summarise)]
    parts = split_streams(table, num_streams)
    problems = (_check_stream(root, key, parts[stream], records) for stream, records in streams.items())
    return table, list(chain.from_iterable(problems))


def _check_stream(root: StoreRoot, key: str, summarised: BlockTable, records: StreamRecords) -> Iterator[Problem]:
    num_listed, num_blocks = int(records.listed.max(initial=-1)) + 1, len(summarised)
    if num_listed < num_blocks:
        place = (records.stream, num_listed)
        what = f"the store was finished with {counted(num_blocks, 'block')} of this stream, but has {num_listed}"
        yield Problem(commit_key(*place), what, block=place)
    table = records.table[records.table.column("block") < num_blocks]
    is_longer = root.complete and num_listed > num_blocks
    if is_longer or not np.array_equal(summarised[table.column("block")].values, table.values):
        yield Problem(key, f"does not agree with the commit records of stream {records.stream}", Remedy.summarise)


def check_other_summaries(storage: Storage, root: StoreRoot) -> Iterator[Problem]:
    """Checks that the merged statistics and the index of ids are those that the root names."""
    summary = root.summary or {}
    if sha256 := summary.get(STATISTICS):
        key = summary_key(STATISTICS, sha256)
        try:
            next(storage.read_checked([key], lambda key, content: decode_statistics(content, key, sha256)))
        except StoreError as error:
            yield Problem(key, str(error), Remedy.summarise)
    if sha256 := summary.get(IDS):
        key = summary_key(IDS, sha256)
        try:
            if (digest := _sha256(storage, key, summary[IDS_BYTES])) != sha256:
                yield Problem(key, f"its sha256 is {digest}, in the root {sha256}", Remedy.summarise)
        except StoreError as error:
            yield Problem(key, str(error), Remedy.summarise)


def _sha256(storage: Storage, key: str, size: int) -> str:
    """The sha256 of an object's first `size` bytes."""
    digest = hashlib.sha256()
    for start in range(0, size, _PIECE_BYTES):  # a range beyond the end is an error
        [content] = storage.read_many([key], [(start, min(start + _PIECE_BYTES, size))])
        digest.update(content or b"")
    return digest.hexdigest()


def check_arrays(store: OpenStore, num_rows: int | None) -> Iterator[Problem]:
    """Checks the zarr.json of every array. num_rows: in a complete store, up to the last row with tokens."""
    for spec in store.layout.all_arrays:
        key = array_key(spec.name)
        try:
            [rows] = store.storage.read_checked([key], partial(_parse_rows, store.layout, spec))
        except StoreError as error:
            yield Problem(key, str(error), Remedy.recreate)
            continue
        if num_rows is not None and rows != num_rows:
            yield Problem(key, f"has {rows} rows, but the last committed row is {num_rows - 1}", Remedy.recreate)


def _parse_rows(layout: StoreLayout, spec: ArraySpec, key: str, content: bytes | None) -> int:
    return parse_rows(content, layout, spec, key)
