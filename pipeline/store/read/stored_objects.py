"""Distinguishes missing objects from those that Zarr does not store because all their values are the fill value."""

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

# How often an object is read again that is listed, but was reported as missing: a service may be wrong several times.
_REREADS = 4


class StoredObjects:
    """The objects of a store's committed blocks, each one block of one array.

    Zarr reads a missing object as fill values. The digest in the block's record shows whether these are correct. A
    record is only read if an object is missing, once per object.

    storage, layout, arrays: the store's, and its open arrays by name.
    """

    def __init__(self, storage: Storage, layout: StoreLayout, arrays: Mapping[str, ts.TensorStore]) -> None:
        self.storage = storage
        self.layout = layout
        self.arrays = arrays
        self._specs = {spec.name: spec for spec in layout.all_arrays}
        # By array, the store shards that are known to have no object because all values are the fill value.
        self._all_fill: dict[str, set[int]] = {name: set() for name in self._specs}

    def are_doubtful(
        self, name: str, rows: Int64[np.ndarray, " n"], values: Shaped[np.ndarray, "n ..."]
    ) -> Bool[np.ndarray, " n"]:
        """Which rows of an array begin with a chunk of only fill values, unless this is known to be correct.

        values: the whole rows, as they were read.
        """
        fill, all_fill = self.arrays[name].fill_value, self._all_fill[name]
        doubtful = (values[:, :1] == fill).all(axis=tuple(range(1, values.ndim)))  # usually none
        for index in np.flatnonzero(doubtful).tolist():
            shard = int(rows[index]) // self.layout.rows_per_block
            doubtful[index] = shard not in all_fill and self._is_fill(name, values[index])
        return doubtful

    def _is_fill(self, name: str, row: Shaped[np.ndarray, "slots ..."]) -> bool:
        """Whether the first chunk of a row has only fill values."""
        array = self.arrays[name]
        return bool((row[: array.chunk_layout.read_chunk.shape[1]] == array.fill_value).all())

    def require(self, name: str, rows: Int64[np.ndarray, " n"]) -> None:
        """Raises StoreInvalid if an object with some of these doubtful rows is missing, or was wrongly reported as
        missing when it was read. Do not pass rows whose values may all be fill values: their objects are read again.
        """
        shards = rows // self.layout.rows_per_block
        distinct = np.unique(shards).tolist()
        listed = self._listed(name, distinct)
        self._require_all_fill(name, [shard for shard in distinct if shard not in listed])
        for shard in listed:
            self._read_again(name, shard, rows[shards == shard])

    def _listed(self, name: str, shards: Sequence[int]) -> list[int]:
        """Those of the store shards that have an object, from concurrent listings."""
        keys = [self._key(name, shard) for shard in shards]
        listings = self.storage.list_ranges([(key, key + "\0") for key in keys])
        return [shard for shard, key, listed in zip(shards, keys, listings, strict=True) if key in listed]

    def _require_all_fill(self, name: str, shards: Sequence[int]) -> None:
        """Raises StoreInvalid unless, according to the records, all values of these blocks are the fill value."""
        blocks = [self._block(shard) for shard in shards]
        for shard, record in zip(shards, read_commit_records(self.storage, blocks), strict=True):
            if record.digests.get(name) != fill_digest(self.arrays[name]):
                url = self.storage.url(self._key(name, shard))
                raise StoreInvalid(f"{url} is missing, although the block is committed. {VERIFY_REMEDY}")
            self._all_fill[name].add(shard)

    def _read_again(self, name: str, shard: int, rows: Int64[np.ndarray, " n"]) -> None:
        """Raises StoreInvalid if rows of an existing object now have values other than the fill value."""
        array = self.arrays[name]
        for _ in range(_REREADS if self.storage.is_remote else 1):
            if not all(self._is_fill(name, row) for row in read_runs(array, rows)):
                url = self.storage.url(self._key(name, shard))
                raise StoreInvalid(f"{url} exists, but its storage reported it as missing. Try again.")

    def _block(self, shard: int) -> tuple[int, int]:
        """The stream and block of a store shard."""
        block, stream = divmod(shard, self.layout.num_streams)
        return stream, block

    def _key(self, name: str, shard: int) -> str:
        return self.layout.shard_key(self._specs[name], *self._block(shard))
