"""Telling a missing object from one that Zarr does not store, since all of its values are the fill value."""

from collections.abc import Mapping, Sequence

import numpy as np
import tensorstore as ts
from jaxtyping import Bool, Int64, Shaped

from pipeline.core.errors import StoreInvalid
from pipeline.store.format.arrays import fill_digest
from pipeline.store.format.commits import read_commit_records
from pipeline.store.format.layout import StoreLayout
from pipeline.store.io.failures import VERIFY_REMEDY
from pipeline.store.io.storage import Storage
from pipeline.store.read.rows import read_runs

# Reads of an object that is listed, but was read as if it were missing: a service may err twice in a row.
_REREADS = 4


class StoredObjects:
    """The objects of a store's committed blocks, each one block of one array.

    Zarr reads a missing object as fill values. The digest in the block's record tells whether these are right. Records
    are read only where an object is missing, and once for each such object.
    """

    def __init__(self, storage: Storage, layout: StoreLayout, arrays: Mapping[str, ts.TensorStore]) -> None:
        self._storage = storage
        self._layout = layout
        self._arrays = arrays
        self._specs = {spec.name: spec for spec in layout.all_arrays}
        # By array, the store shards without an object whose values are all the fill value, as far as is known.
        self._all_fill: dict[str, set[int]] = {name: set() for name in self._specs}

    def are_doubtful(
        self, name: str, rows: Int64[np.ndarray, " n"], values: Shaped[np.ndarray, "n ..."]
    ) -> Bool[np.ndarray, " n"]:
        """Which rows of an array begin with a chunk that was read as fill values alone, unless it is known that this is
        right.

        values: the rows, whole, as they were read.
        """
        fill, all_fill = self._arrays[name].fill_value, self._all_fill[name]
        doubtful = (values[:, :1] == fill).all(axis=tuple(range(1, values.ndim)))  # in most arrays none
        for at in np.flatnonzero(doubtful).tolist():
            shard = int(rows[at]) // self._layout.rows_per_block
            doubtful[at] = shard not in all_fill and self._is_fill(name, values[at])
        return doubtful

    def _is_fill(self, name: str, row: Shaped[np.ndarray, "slots ..."]) -> bool:
        """Whether the first chunk of a row holds the fill value alone."""
        array = self._arrays[name]
        return bool((row[: array.chunk_layout.read_chunk.shape[1]] == array.fill_value).all())

    def require(self, name: str, rows: Int64[np.ndarray, " n"]) -> None:
        """Raises StoreInvalid when an object that holds some of these doubtful rows is missing, or was not there when
        it was read.

        Where a record has no digests, as those of earlier programs, the object must exist: leave out rows that an array
        without it may have.
        """
        shards = rows // self._layout.rows_per_block
        distinct = np.unique(shards).tolist()
        listed = self._listed(name, distinct)
        self._require_all_fill(name, [shard for shard in distinct if shard not in listed])
        for shard in listed:
            self._read_again(name, shard, rows[shards == shard])

    def _listed(self, name: str, shards: Sequence[int]) -> list[int]:
        """Those of the store shards that a listing has. All listings are under way at once."""
        keys = [self._key(name, shard) for shard in shards]
        listings = self._storage.list_ranges([(key, key + "\0") for key in keys])
        return [shard for shard, key, listed in zip(shards, keys, listings, strict=True) if key in listed]

    def _require_all_fill(self, name: str, shards: Sequence[int]) -> None:
        """Raises StoreInvalid unless the records say that the values of these blocks are all the fill value."""
        places = [self._place(shard) for shard in shards]
        for shard, record in zip(shards, read_commit_records(self._storage, places), strict=True):
            if record.digests is None or record.digests.get(name) != fill_digest(self._arrays[name]):
                url = self._storage.url(self._key(name, shard))
                raise StoreInvalid(f"{url} is missing, although the block is committed. {VERIFY_REMEDY}")
            self._all_fill[name].add(shard)

    def _read_again(self, name: str, shard: int, rows: Int64[np.ndarray, " n"]) -> None:
        """Raises StoreInvalid where rows of an object that exists have other values now than fill values."""
        array = self._arrays[name]
        for _ in range(_REREADS if self._storage.is_remote else 1):
            if not all(self._is_fill(name, row) for row in read_runs(array, rows)):
                url = self._storage.url(self._key(name, shard))
                raise StoreInvalid(f"{url} exists, but its storage answered that it does not. Try again.")

    def _place(self, shard: int) -> tuple[int, int]:
        """The stream and the block of a store shard."""
        block, stream = divmod(shard, self._layout.num_streams)
        return stream, block

    def _key(self, name: str, shard: int) -> str:
        return self._layout.shard_key(self._specs[name], *self._place(shard))
