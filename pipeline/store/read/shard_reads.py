"""Reads values of store shards into the caller's memory: a shard's index, then the chunks that hold the values.

A block is a sequence of slots (row * S + slot). Each of its shards, and each chunk of these, holds some consecutive
ones, so that a read is a range of slots. Threads read local files, uncompressed chunks straight into that memory. From
other storage they request the index, which is kept, and all neighbouring chunks at once.
Shapes: S slots per row, n slots that are read.
"""

import io
import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64, Shaped, UInt64

from pipeline.core.addresses import HUB_SCHEME
from pipeline.core.arguments import require_not_forked
from pipeline.core.errors import StoreInvalid
from pipeline.core.host import num_cores
from pipeline.store.format.layout import PIECE_BYTES, StoreLayout
from pipeline.store.format.metadata import ROOT_KEY, StoreRoot, read_root
from pipeline.store.io.failures import DAMAGE_REMEDY, VERIFY_REMEDY, storage_errors
from pipeline.store.io.shards import ABSENT, CHECKSUM_BYTES, ShardFormat, checksum, decode_chunk, decode_index
from pipeline.store.io.storage import Storage

# A reader's concurrent requests to a remote store: side arrays of many blocks are read along with activations.
REMOTE_REQUESTS = 128

# How many pieces are being read from remote storage at a time, which bounds the memory for responses. A piece of 8 MiB
# takes two requests, for the shard's index and its chunks: 184 ms at 50 ms per request and 100 MB/s. So 1 GiB/s needs
# 24 pieces in flight. A buffer of the default size has about 34, which are read at once.
REMOTE_PIECES = 48

_MIN_THREADS = 4  # that read local files, on a machine with fewer cores
_KEPT_INDEXES = 4096  # at most 4 KiB each: a store shard of 64 MiB has up to 256 chunks


def store_id(root: StoreRoot) -> str:
    """What distinguishes a store from one that is made again at the same place, also of the same configuration."""
    return f"{root.metadata.fingerprint()} {root.created}"


class ShardReads:
    """Starts reads of a store's shards, in threads that end when nothing refers to it.

    store_id: of the store as it was opened.
    """

    def __init__(self, storage: Storage, layout: StoreLayout, store_id: str) -> None:
        self.storage = storage
        self.layout = layout
        self.store_id = store_id
        self._root_text: bytes | None = None  # as last read
        self._specs = {spec.name: spec for spec in layout.all_arrays}
        self._formats = {name: layout.shard_format(spec) for name, spec in self._specs.items()}
        # Without a reference to this object: a cycle would keep its threads until the next garbage collection.
        self._index = lru_cache(_KEPT_INDEXES)(partial(_read_index, storage))
        self._threads = self._new_threads(REMOTE_REQUESTS)

    def another(self, remote_reads: int) -> "ShardReads":
        """Reads of the same store, in threads of their own. remote_reads: how many at a time unless it is local."""
        reads = copy(self)
        reads._threads = self._new_threads(remote_reads)
        return reads

    def _new_threads(self, remote_reads: int) -> ThreadPoolExecutor:
        is_local = self.storage.directory is not None
        return ThreadPoolExecutor(max(_MIN_THREADS, num_cores()) if is_local else remote_reads, "read")

    def start_check(self) -> Future[None]:
        """Starts `require_same_store`. If it succeeds, all that was read before is of the same store."""
        return self._submit(self.require_same_store)

    def require_same_store(self) -> None:
        """Raises StoreInvalid if the store was deleted, whether or not there is another one now. Raises StoreError."""
        if not self.storage.path.startswith(HUB_SCHEME):  # a commit does not change
            self.storage.retry_read(self._check_root)

    def _check_root(self) -> None:
        text = self.storage.read(ROOT_KEY)
        if text is not None and text == self._root_text:
            return
        root = read_root(self.storage)
        if root is None or store_id(root) != self.store_id:
            what = "deleted" if root is None else "deleted and made again"
            raise StoreInvalid(f"{self.storage.path} was {what} after it was opened. Open the store again.")
        self._root_text = text

    def _submit(self, call: Callable[[], None]) -> Future[None]:
        require_not_forked("TensorStore")
        return self._threads.submit(call)

    def memory(self, name: str, num_rows: int) -> Shaped[np.ndarray, "rows S ..."]:
        """New memory for rows of an array."""
        format = self._formats[name]
        return np.empty((num_rows, *self.layout.block_shape(self._specs[name])[1:]), format.dtype)

    def start(self, name: str, first_row: int, out: Shaped[np.ndarray, "rows S ..."]) -> list[Future[None]]:
        """Starts reading consecutive rows of an array into `out`, in pieces. Raises StoreError, as the futures do."""
        begin, out = first_row * out.shape[1], out.reshape(-1, *out.shape[2:])
        format = self._formats[name]
        slots_per_shard, piece = math.prod(format.shape[:2]), _piece_slots(format)
        reads, at = [], 0
        while at < len(out):
            shard, first = divmod(begin + at, slots_per_shard)
            size = min(piece - first % piece, slots_per_shard - first)
            reads.append(self._submit(partial(self._read, name, shard, first, out[at : at + size])))
            at += size
        return reads

    def start_slots(
        self, name: str, slots: Int64[np.ndarray, " n"], out: Shaped[np.ndarray, "n ..."]
    ) -> list[Future[None]]:
        """Starts reading slots of an array in any order, counted from the store's first row. Neighbouring chunks are
        read at once; chunks without any of the slots are not read."""
        format = self._formats[name]
        order = np.argsort(slots, kind="stable")
        ascending = slots[order]
        is_far = np.diff(ascending // math.prod(format.chunk_shape[:2])) > 1
        for size in (_piece_slots(format), math.prod(format.shape[:2])):
            is_far |= np.diff(ascending // size) > 0
        reads = []
        for places in np.split(order, np.flatnonzero(is_far) + 1) if len(slots) else ():
            reads.append(self._submit(partial(self._read_scattered, name, slots[places], out, places)))
        return reads

    def _read_scattered(
        self,
        name: str,
        slots: Int64[np.ndarray, " m"],
        out: Shaped[np.ndarray, "n ..."],
        places: Int64[np.ndarray, " m"],
    ) -> None:
        """Reads ascending slots of one shard into `out[places]`."""
        shard, first = divmod(int(slots[0]), math.prod(self._formats[name].shape[:2]))
        values = np.empty((int(slots[-1] - slots[0]) + 1, *out.shape[1:]), out.dtype)
        self._read(name, shard, first, values)
        out[places] = values[slots - slots[0]]

    def _read(self, name: str, shard: int, first: int, out: Shaped[np.ndarray, "n ..."]) -> None:
        """Reads the slots from `first` on of a shard. Raises StoreError; reads again what seems damaged."""
        spec = self._specs[name]
        index, part = divmod(shard, self.layout.num_parts(spec))
        block, stream = divmod(index, self.layout.num_streams)
        key = self.layout.shard_key(spec, stream, block, part)
        read = self._read_objects if self.storage.directory is None else self._read_file

        def read_once() -> None:
            try:
                with storage_errors(self.storage.url(key)):
                    read(key, self._formats[name], first, out)
            except ValueError as error:  # of the decoders
                self._index.cache_clear()
                raise StoreInvalid(f"{self.storage.url(key)} is damaged: {error}. {DAMAGE_REMEDY}") from error

        self.storage.retry_read(read_once)

    def _read_file(self, key: str, format: ShardFormat, first: int, out: Shaped[np.ndarray, "n ..."]) -> None:
        self.storage.require_file(key)
        try:
            file = io.FileIO(self.storage.directory + key)
        except FileNotFoundError:
            raise _missing(self.storage, key) from None
        with file:
            start = os.fstat(file.fileno()).st_size - format.index_bytes
            index = decode_index(os.pread(file.fileno(), format.index_bytes, max(0, start)), format)
            for part in _stored_parts(index, format, first, out):
                if part.offset + part.size > start:
                    raise ValueError("its index names bytes beyond its end")
                if format.compression == "none" and part.is_whole_chunk(format):
                    _read_chunk(file.fileno(), part.offset, part.out)
                else:
                    part.fill(os.pread(file.fileno(), part.size, part.offset), format)

    def _read_objects(self, key: str, format: ShardFormat, first: int, out: Shaped[np.ndarray, "n ..."]) -> None:
        if format.num_chunks == 1 or len(out) == math.prod(format.shape[:2]):  # the whole shard, in one request
            content, begin = _request(self.storage, key, None), 0
            index = decode_index(content[-format.index_bytes :], format)
            parts = list(_stored_parts(index, format, first, out))
        else:
            parts = list(_stored_parts(self._index(key, format), format, first, out))
            begin, end = (parts[0].offset, parts[-1].offset + parts[-1].size) if parts else (0, 0)
            content = _request(self.storage, key, (begin, end)) if parts else b""
        for part in parts:
            part.fill(content[part.offset - begin : part.offset - begin + part.size], format)


class _Part(NamedTuple):
    """A chunk's part of a read. out: its part of the memory. within: its slots in the chunk. offset, size: of the
    chunk in the shard, in bytes."""

    out: Shaped[np.ndarray, "m ..."]
    within: slice
    offset: int
    size: int

    def is_whole_chunk(self, format: ShardFormat) -> bool:
        return self.out.nbytes == format.chunk_bytes and self.out.flags.c_contiguous

    def fill(self, stored: bytes | memoryview, format: ShardFormat) -> None:
        """Raises ValueError if the stored chunk is damaged."""
        self.out[...] = decode_chunk(stored, format).reshape(-1, *self.out.shape[1:])[self.within]


def _stored_parts(
    index: UInt64[np.ndarray, "chunks 2"], format: ShardFormat, first: int, out: Shaped[np.ndarray, "n ..."]
) -> Iterator[_Part]:
    """The parts of a read from slot `first` of a shard into `out`. Parts of absent chunks are filled instead."""
    size = math.prod(format.chunk_shape[:2])
    for chunk in range(first // size, -(-(first + len(out)) // size)):
        start = chunk * size - first
        part = out[max(0, start) : start + size]
        offset, num_bytes = index[chunk].tolist()
        if num_bytes == ABSENT:
            part[...] = format.fill
        else:
            yield _Part(part, slice(max(0, -start), max(0, -start) + len(part)), offset, num_bytes)


def _piece_slots(format: ShardFormat) -> int:
    """How many slots to read at a time: whole chunks of about PIECE_BYTES."""
    return max(1, PIECE_BYTES // format.chunk_bytes) * math.prod(format.chunk_shape[:2])


def _read_chunk(file: int, offset: int, out: Shaped[np.ndarray, "m ..."]) -> None:
    """Reads an uncompressed chunk into contiguous memory. Raises ValueError if it is damaged."""
    values, stored_checksum = memoryview(out.reshape(-1).view(np.uint8)), bytearray(CHECKSUM_BYTES)
    num_bytes = os.preadv(file, [values, stored_checksum], offset)
    if num_bytes != len(values) + CHECKSUM_BYTES or checksum(values) != stored_checksum:
        raise ValueError("a chunk does not match its checksum")


def _read_index(storage: Storage, key: str, format: ShardFormat) -> UInt64[np.ndarray, "chunks 2"]:
    return decode_index(_request(storage, key, (-format.index_bytes, None)), format)


def _request(storage: Storage, key: str, byte_range: tuple[int, int | None] | None) -> memoryview:
    [content] = storage.read_many([key], None if byte_range is None else [byte_range])
    if content is None:
        raise _missing(storage, key)
    return memoryview(content)


def _missing(storage: Storage, key: str) -> StoreInvalid:
    return StoreInvalid(f"{storage.url(key)} is missing, although the block is committed. {VERIFY_REMEDY}")
