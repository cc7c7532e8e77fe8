"""Compares the index of a stream's ids with the commit records and the document tables."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from pipeline.core.errors import StoreError
from pipeline.store.format.block_table import BlockTable
from pipeline.store.format.problems import Problem, Remedy
from pipeline.store.ids.index_file import (
    Entries,
    IndexHeader,
    block_entries,
    decode_index,
    ids_key,
    read_headers,
    sorted_entries,
)
from pipeline.store.io.storage import Storage


def check_header(storage: Storage, stream: int, records: BlockTable) -> Iterator[Problem]:
    """Checks that the index, if there is one, was made from the stream's blocks. It may lack the last ones, or have
    blocks whose records were deleted in order to recompute them."""
    try:
        header = _read_header(storage, stream)
    except StoreError as error:
        yield Problem(ids_key(stream), str(error), Remedy.index_again)
        return
    if header is not None and header.num_blocks <= len(records) and header.num_known(records) is None:
        yield Problem(ids_key(stream), "does not agree with the commit records", Remedy.index_again)


def _read_header(storage: Storage, stream: int) -> IndexHeader | None:
    return storage.retry_read(lambda: next(read_headers(storage, [stream])))


class StreamIds:
    """Collects the ids in a stream's document tables, if the stream has an index, and compares them with it."""

    def __init__(self, storage: Storage, stream: int, records: BlockTable) -> None:
        self._storage = storage
        self._key = ids_key(stream)
        self._records = records
        self._parts: dict[int, Entries] = {}  # by block
        try:
            self._has_index = _read_header(storage, stream) is not None
        except StoreError:  # reported by `check_header`
            self._has_index = False

    def add(self, block: int, table: pa.Table | None) -> None:
        """Adds a block's document table; None if it cannot be read."""
        if self._has_index and table is not None:
            self._parts[block] = block_entries(table["id"].to_pylist(), block)

    def problems(self) -> Iterator[Problem]:
        """Checks that the index agrees with the tables that were added."""
        if not self._has_index:
            return
        try:
            [(header, entries)] = self._storage.read_checked(
                [self._key], lambda key, content: decode_index(content or b"", key)
            )
        except StoreError as error:
            yield Problem(self._key, str(error), Remedy.index_again)
            return
        num_known = header.num_known(self._records) or 0
        known = {block: part for block, part in self._parts.items() if block < num_known}
        if not np.array_equal(entries[np.isin(entries["block"], list(known))], sorted_entries(list(known.values()))):
            yield Problem(self._key, "does not agree with the document tables", Remedy.index_again)
