"""Finds the blocks whose document tables have an id, using the indexes of the streams' ids."""

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from pipeline.core.errors import StoreInvalid
from pipeline.store.format.block_table import BlockTable
from pipeline.store.ids.index_file import Entries, IndexHeader, id_hash, ids_key, read_headers
from pipeline.store.io.storage import Storage

_DEVIATIONS = 4  # standard deviations (at most sqrt(n) / 2) of a hash's position: 1 in 16,000 lookups reads twice


class _UsableIndex(NamedTuple):
    """The index of a stream's ids, and how many of the stream's first blocks it covers."""

    header: IndexHeader
    num_known: int


class StoredIds:
    """The indexes of a store's ids. streams: the committed blocks of each stream.

    Methods raise StoreInvalid for a damaged index, and StoreError.
    """

    def __init__(self, storage: Storage, streams: Sequence[BlockTable]) -> None:
        self._storage = storage
        self._streams = streams

    def find(self, id: str) -> tuple[BlockTable, BlockTable]:
        """The blocks that have a document with this id according to the indexes, and the blocks that no index covers.

        Reads once from each stream's index; the first time, also its header. Since indexes contain hashes, the former
        may include blocks of a different id with the same hash.
        """
        return self._storage.retry_read(lambda: self._find(id))

    def _find(self, id: str) -> tuple[BlockTable, BlockTable]:
        try:
            hits = [self._streams[stream][blocks] for stream, blocks in self._hits(id_hash(id))]
        except StoreInvalid:
            vars(self).pop("_indexes", None)  # pipeline.index may have written a new index in the meantime
            raise
        not_indexed = [
            table[self._indexes[stream].num_known if stream in self._indexes else 0 :]
            for stream, table in enumerate(self._streams)
        ]
        return self._join(hits), self._join(not_indexed)

    def _join(self, tables: Sequence[BlockTable]) -> BlockTable:
        """One table of all blocks, in row order."""
        return BlockTable.join(tables).in_row_order(len(self._streams))

    @cached_property
    def _indexes(self) -> dict[int, _UsableIndex]:
        """The indexes by stream, without those that were made from other blocks."""
        indexes = {}
        for stream, header in enumerate(read_headers(self._storage, range(len(self._streams)))):
            if header is not None and (num_known := header.num_known(self._streams[stream])):
                indexes[stream] = _UsableIndex(header, num_known)
        return indexes

    def _hits(self, hash: int) -> Iterator[tuple[int, np.ndarray]]:
        """Streams, and the numbers of their blocks with the hash."""
        left, deviations = [stream for stream, index in self._indexes.items() if index.header.num_entries], _DEVIATIONS
        while left:
            pages = {stream: _pages(self._indexes[stream].header, hash, deviations) for stream in left}
            ranges = [self._indexes[stream].header.byte_range(pages[stream]) for stream in left]
            again = []
            for stream, content in zip(left, self._storage.read_many(list(map(ids_key, left)), ranges), strict=True):
                header, num_known = self._indexes[stream]
                entries = header.decode_pages(content or b"", pages[stream], ids_key(stream))
                if _has_all(entries, hash, pages[stream], header):
                    blocks = np.unique(entries["block"][entries["hash"] == np.uint64(hash)])
                    yield stream, blocks[blocks < num_known]
                else:
                    again.append(stream)
            left, deviations = again, 4 * deviations


def _pages(header: IndexHeader, hash: int, deviations: int) -> range:
    """The pages that probably have the entries of a hash."""
    return header.pages_near(hash, slack=deviations * (math.isqrt(header.num_entries) // 2 + 1))


def _has_all(entries: Entries, hash: int, pages: range, header: IndexHeader) -> bool:
    """Whether the pages' entries include all of a hash: the first entry is smaller, and the last one greater."""
    has_first = pages.start == 0 or entries["hash"][0] < hash
    return has_first and (pages.stop == header.num_pages or entries["hash"][-1] > hash)
