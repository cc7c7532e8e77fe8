"""Reads values of store shards into the caller's memory: a shard's index, then the chunks that hold the values.

A shard is a sequence of slots (row * S + slot), and each chunk holds some consecutive ones, so that a read is a range
of slots. Threads read local files, uncompressed chunks straight into that memory. From other storage they request the
index, which is kept, and all neighbouring chunks at once.
Shapes: S slots per row, n slots that are read.
"""

import io
import math
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64, Shaped, UInt64

from pipeline.core.addresses import HUB_SCHEME
from pipeline.core.arguments import require_not_forked
from pipeline.core.cores import num_cores
from pipeline.core.errors import StoreInvalid
from pipeline.store.format.layout import MIB, PIECE_BYTES, StoreLayout
from pipeline.store.format.metadata import ROOT_KEY, StoreRoot, read_root
from pipeline.store.io.failures import DAMAGE_REMEDY, VERIFY_REMEDY
from pipeline.store.io.shards import ABSENT, CHECKSUM_BYTES, ShardFormat, checksum, decode_chunk, decode_index
from pipeline.store.io.storage import Storage

# A reader's concurrent requests to a remote store: side arrays of many blocks are read along with activations.
REMOTE_REQUESTS = 128

# How many bytes are being read from remote storage at a time. A piece of 8 MiB takes two requests, for the shard's
# index and its chunks: 184 ms at 50 ms per request and 100 MB/s. So 1 GiB/s needs 24 pieces in flight.
REMOTE_BYTES_AHEAD = 256 * MIB

_MIN_THREADS = 4  # that read local files, on a machine with fewer cores
_KEPT_INDEXES = 4096  # at most 4 KiB each: a store shard of 64 MiB has up to 256 chunks


class _Part(NamedTuple):
    """A chunk's part of a read. out: its part of the memory. within: its slots in the chunk."""

    out: Shaped[np.ndarray, "m ..."]
    within: slice

    def is_whole_chunk(self, format: ShardFormat) -> bool:
        return self.out.nbytes == format.chunk_bytes and self.out.flags.c_contiguous

    def fill(self, stored: bytes | memoryview, format: ShardFormat) -> None:
        """Raises ValueError if the stored chunk is damaged."""
        self.out[...] = decode_chunk(stored, format).reshape(-1, *self.out.shape[1:])[self.within]


class StoreIdentity:
    """What distinguishes a store from one that is made again at the same place, also of the same configuration."""

    def __init__(self, storage: Storage, root: StoreRoot) -> None:
        self._storage = storage
        self._root_text: bytes | None = None  # as last read
        self.id = _store_id(root)

    def require(self) -> None:
        """Raises StoreInvalid if the store was deleted, whether or not there is another one now. Raises StoreError."""
        if not self._storage.path.startswith(HUB_SCHEME):  # a commit does not change
            self._storage.retry_read(self._require)

    def _require(self) -> None:
        text = self._storage.read(ROOT_KEY)
        if text is not None and text == self._root_text:
            return
        root = read_root(self._storage)
        if root is None or _store_id(root) != self.id:
            what = "deleted" if root is None else "deleted and made again"
            raise StoreInvalid(f"{self._storage.path} was {what} after it was opened. Open the store again.")
        self._root_text = text


def _store_id(root: StoreRoot) -> str:
    return f"{root.metadata.fingerprint()} {root.created}"


class ShardReads:
    """Starts reads of a store's shards, in its threads. They end after `close`, or when nothing refers to them.

    identity: of the store.
    """

    def __init__(self, storage: Storage, layout: StoreLayout, identity: StoreIdentity) -> None:
        self.storage = storage
        self.layout = layout
        self.identity = identity
        self._specs = {spec.name: spec for spec in layout.all_arrays}
        self._formats = {name: layout.shard_format(spec) for name, spec in self._specs.items()}
        self._indexes: OrderedDict[str, UInt64[np.ndarray, "chunks 2"]] = OrderedDict()
        self._lock = threading.Lock()
        is_local = storage.directory is not None
        self._threads = ThreadPoolExecutor(max(_MIN_THREADS, num_cores()) if is_local else REMOTE_REQUESTS, "read")

    def another(self) -> "ShardReads":
        """Reads of the same store, in threads of their own."""
        return ShardReads(self.storage, self.layout, self.identity)

    def close(self) -> None:
        """Ends the threads after their current reads, and waits for these. Later reads are refused."""
        self._threads.shutdown(cancel_futures=True)

    def start_check(self) -> Future[None]:
        """Starts `StoreIdentity.require`. If it succeeds, all that was read before is of the same store."""
        return self._submit(self.identity.require)

    def _submit(self, call: Callable[[], None]) -> Future[None]:
        require_not_forked("TensorStore")
        return self._threads.submit(call)

    def memory(self, name: str, num_rows: int) -> Shaped[np.ndarray, "rows S ..."]:
        """New memory for rows of an array."""
        format = self._formats[name]
        return np.empty((num_rows, *format.shape[1:]), format.dtype)

    def start(self, name: str, first_row: int, out: Shaped[np.ndarray, "rows S ..."]) -> list[Future[None]]:
        """Starts reading consecutive rows of an array into `out`, in pieces. Raises StoreError, as the futures do."""
        format = self._formats[name]
        slots_per_row, slots_per_shard = format.shape[1], math.prod(format.shape[:2])
        piece = max(1, PIECE_BYTES // format.chunk_bytes) * math.prod(format.chunk_shape[:2])  # slots of whole chunks
        slots = out.reshape(-1, *format.shape[2:])
        begin, reads, at = first_row * slots_per_row, [], 0
        while at < len(slots):
            shard, first = divmod(begin + at, slots_per_shard)
            size = min(piece - first % piece, slots_per_shard - first)
            reads.append(self._submit(partial(self._read, name, shard, first, slots[at : at + size])))
            at += size
        return reads

    def start_slots(
        self, name: str, slots: Int64[np.ndarray, " n"], out: Shaped[np.ndarray, "n ..."]
    ) -> list[Future[None]]:
        """Starts reading slots of an array in any order, counted from the store's first row, a chunk at a time."""
        format = self._formats[name]
        size = math.prod(format.chunk_shape[:2])
        order = np.argsort(slots, kind="stable")
        ends = np.flatnonzero(np.diff(slots[order] // size, append=-1)) + 1

        def read(places: Int64[np.ndarray, " m"]) -> None:
            shard, first = divmod(int(slots[places[0]]) // size * size, math.prod(format.shape[:2]))
            chunk = np.empty((size, *format.shape[2:]), format.dtype)
            self._read(name, shard, first, chunk)
            out[places] = chunk[slots[places] % size]

        return [self._submit(partial(read, places)) for places in np.split(order, ends[:-1]) if len(places)]

    def _read(self, name: str, shard: int, first: int, out: Shaped[np.ndarray, "n ..."]) -> None:
        """Reads the slots from `first` on of a shard. Raises StoreError; reads again what seems damaged."""
        block, stream = divmod(shard, self.layout.num_streams)
        key = self.layout.shard_key(self._specs[name], stream, block)
        read = self._read_objects if self.storage.directory is None else self._read_file

        def read_once() -> None:
            try:
                with self.storage.errors(key):
                    read(key, self._formats[name], first, out)
            except ValueError as error:  # of the decoders
                self._indexes.pop(key, None)
                raise StoreInvalid(f"{self.storage.url(key)} is damaged: {error}. {DAMAGE_REMEDY}") from error

        self.storage.retry_read(read_once)

    def _read_file(self, key: str, format: ShardFormat, first: int, out: Shaped[np.ndarray, "n ..."]) -> None:
        with self._opened(key) as file:
            start = os.fstat(file.fileno()).st_size - format.index_bytes
            index = decode_index(os.pread(file.fileno(), format.index_bytes, max(0, start)), format)
            for part, offset, size in _stored_parts(index, format, first, out):
                if offset + size > start:
                    raise ValueError("its index names bytes beyond its end")
                if format.compression == "none" and part.is_whole_chunk(format):
                    _read_chunk(file.fileno(), offset, part.out)
                else:
                    part.fill(os.pread(file.fileno(), size, offset), format)

    def _opened(self, key: str) -> io.FileIO:
        self.storage.require_file(key)
        try:
            return io.FileIO(self.storage.directory + key)
        except FileNotFoundError:
            raise self._missing(key) from None

    def _read_objects(self, key: str, format: ShardFormat, first: int, out: Shaped[np.ndarray, "n ..."]) -> None:
        if format.num_chunks == 1 or len(out) == math.prod(format.shape[:2]):  # the whole shard, in one request
            content, begin = self._request(key, None), 0
            index = decode_index(content[-format.index_bytes :], format)
            stored = list(_stored_parts(index, format, first, out))
        else:
            stored = list(_stored_parts(self._index(key, format), format, first, out))
            begin, end = (stored[0][1], sum(stored[-1][1:])) if stored else (0, 0)
            content = self._request(key, (begin, end)) if stored else b""
        for part, offset, size in stored:
            part.fill(content[offset - begin : offset - begin + size], format)

    def _index(self, key: str, format: ShardFormat) -> UInt64[np.ndarray, "chunks 2"]:
        """The index of a shard's chunks, kept for the next read."""
        with self._lock:
            index = self._indexes.pop(key, None)
        if index is None:
            index = decode_index(self._request(key, (-format.index_bytes, None)), format)
        with self._lock:
            self._indexes[key] = index  # the one that was used last
            if len(self._indexes) > _KEPT_INDEXES:
                self._indexes.popitem(last=False)
        return index

    def _request(self, key: str, byte_range: tuple[int, int | None] | None) -> memoryview:
        [content] = self.storage.read_many([key], None if byte_range is None else [byte_range])
        if content is None:
            raise self._missing(key)
        return memoryview(content)

    def _missing(self, key: str) -> StoreInvalid:
        return StoreInvalid(f"{self.storage.url(key)} is missing, although the block is committed. {VERIFY_REMEDY}")


def _stored_parts(
    index: UInt64[np.ndarray, "chunks 2"], format: ShardFormat, first: int, out: Shaped[np.ndarray, "n ..."]
) -> Iterator[tuple[_Part, int, int]]:
    """The parts of a read from slot `first` of a shard into `out`, each with its chunk's offset and size. Parts of
    absent chunks are filled instead."""
    size = math.prod(format.chunk_shape[:2])
    for chunk in range(first // size, -(-(first + len(out)) // size)):
        start = chunk * size - first
        part = out[max(0, start) : start + size]
        offset, num_bytes = index[chunk].tolist()
        if num_bytes == ABSENT:
            part[...] = format.fill
        else:
            within = slice(max(0, -start), max(0, -start) + len(part))
            yield _Part(part, within), offset, num_bytes


def _read_chunk(file: int, offset: int, out: Shaped[np.ndarray, "m ..."]) -> None:
    """Reads an uncompressed chunk into contiguous memory. Raises ValueError if it is damaged."""
    values, stored_checksum = memoryview(out.reshape(-1).view(np.uint8)), bytearray(CHECKSUM_BYTES)
    num_bytes = os.preadv(file, [values, stored_checksum], offset)
    if num_bytes != len(values) + CHECKSUM_BYTES or checksum(values) != stored_checksum:
        raise ValueError("a chunk does not match its checksum")


class ReadsAhead:
    """Started reads into memory that is used again: of remote storage, up to REMOTE_BYTES_AHEAD are in flight.

    A context manager: on exit, it waits until none of them writes to memory any more, even after an error.
    """

    def __init__(self, is_remote: bool) -> None:
        self._max_bytes = REMOTE_BYTES_AHEAD if is_remote else math.inf
        self._bytes = 0
        self._reads: deque[tuple[list[Future[None]], int]] = deque()

    def __enter__(self) -> "ReadsAhead":
        return self

    def __exit__(self, *_: object) -> None:
        for reads, _ in self._reads:
            for read in reads:
                read.cancel()
            wait(reads)

    def __len__(self) -> int:
        return len(self._reads)

    def add(self, reads: list[Future[None]], num_bytes: int) -> None:
        """Adds started reads, and waits for the oldest ones if there are too many."""
        self._reads.append((reads, num_bytes))
        self._bytes += num_bytes
        while len(self._reads) > 1 and self._bytes > self._max_bytes:
            self._wait_for_oldest()

    def wait(self) -> None:
        """Waits for all reads. Raises StoreError."""
        while self._reads:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        reads, num_bytes = self._reads[0]
        for read in reads:
            read.result()
        self._reads.popleft()
        self._bytes -= num_bytes
