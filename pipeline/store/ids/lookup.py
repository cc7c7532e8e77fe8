"""Finds the blocks whose document tables have an id, by the indexes of the streams' ids."""

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from pipeline.core.errors import StoreInvalid
from pipeline.store.format.block_table import DTYPE, BlockTable
from pipeline.store.ids.index_file import Entries, IndexHeader, id_hash, ids_key, read_headers
from pipeline.store.io.storage import Storage

_DEVIATIONS = 4  # of a hash's place, at most sqrt(n) / 2 each: one lookup in 16,000 reads a second time


class _KnownIds(NamedTuple):
    """The index of a stream's ids, and how many of its first blocks it knows."""

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
        """The blocks that may have a document with this id, by the indexes; and those that no index knows.

        One read of each stream's index, and another one the first time. An index is of hashes: blocks of another id
        with the same hash are among the first, too.
        """
        return self._storage.retry_read(lambda: self._find(id))

    def _find(self, id: str) -> tuple[BlockTable, BlockTable]:
        try:
            hits = [self._streams[stream][blocks] for stream, blocks in self._hits(id_hash(id))]
        except StoreInvalid:
            vars(self).pop("_known", None)  # pipeline.index may have written another index meanwhile
            raise
        unknown = [
            table[self._known[stream].num_known if stream in self._known else 0 :]
            for stream, table in enumerate(self._streams)
        ]
        return self._join(hits), self._join(unknown)

    def _join(self, tables: Sequence[BlockTable]) -> BlockTable:
        """In the order of their rows."""
        values = np.concatenate([np.empty(0, DTYPE), *(table.values for table in tables)])
        return BlockTable(values).in_row_order(len(self._streams))

    @cached_property
    def _known(self) -> dict[int, _KnownIds]:
        """By stream, of those whose index is of these blocks. Others have none, or one that is out of date."""
        known = {}
        for stream, header in enumerate(read_headers(self._storage, range(len(self._streams)))):
            if header is not None and (num_known := header.num_known(self._streams[stream])):
                known[stream] = _KnownIds(header, num_known)
        return known

    def _hits(self, hash: int) -> Iterator[tuple[int, np.ndarray]]:
        """Streams, and the numbers of their blocks that have the hash."""
        left, deviations = [stream for stream, known in self._known.items() if known.header.num_entries], _DEVIATIONS
        while left:
            pages = {stream: _pages(self._known[stream].header, hash, deviations) for stream in left}
            ranges = [self._known[stream].header.byte_range(pages[stream]) for stream in left]
            again = []
            for stream, content in zip(left, self._storage.read_many(list(map(ids_key, left)), ranges), strict=True):
                header, num_known = self._known[stream]
                entries = header.decode_pages(content or b"", pages[stream], ids_key(stream))
                if _has_all(entries, hash, pages[stream], header):
                    blocks = np.unique(entries["block"][entries["hash"] == np.uint64(hash)])
                    yield stream, blocks[blocks < num_known]
                else:
                    again.append(stream)
            left, deviations = again, 4 * deviations


def _pages(header: IndexHeader, hash: int, deviations: int) -> range:
    """Where the entries of a hash probably are."""
    return header.pages_near(hash, slack=deviations * (math.isqrt(header.num_entries) // 2 + 1))


def _has_all(entries: Entries, hash: int, pages: range, header: IndexHeader) -> bool:
    """Whether all entries of a hash are among those of some pages: smaller and greater ones are around them."""
    is_begun = pages.start == 0 or entries["hash"][0] < hash
    return is_begun and (pages.stop == header.num_pages or entries["hash"][-1] > hash)
