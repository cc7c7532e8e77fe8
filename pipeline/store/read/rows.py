"""Reading rows of an array into memory of the caller, and finding the slots of selected tokens in them.

Shapes: R rows, T positions of a row, K slots of a row for selected tokens (-1 where there are fewer).
"""

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Executor, Future
from contextlib import suppress

import numpy as np
import tensorstore as ts
from jaxtyping import Bool, Int32, Int64, Shaped

from pipeline.core.errors import StoreInvalid
from pipeline.store.format.block_table import Block
from pipeline.store.format.layout import MIB, SELECTED, SIDE_ARRAYS
from pipeline.store.io.failures import VERIFY_REMEDY
from pipeline.store.io.shard_files import read_chunks
from pipeline.store.io.storage import KeyValueStore

# Pieces under way at once. Enough for a local disk; with more, TensorStore's own buffers no longer come from what was
# freed just before (measured: 30 pieces take 20 to 40 times the page faults of 6).
READS_AHEAD = 6

# Of remote storage as many more as this allows. A piece of 8 MiB takes two requests, for the shard's index and for its
# chunks: with 50 ms each, and 100 MB/s, 184 ms. 1 GiB/s then needs 24 pieces under way.
REMOTE_BYTES_AHEAD = 256 * MIB


def read_runs(array: ts.TensorStore, rows: Int64[np.ndarray, " n"]) -> np.ndarray:
    """The given rows, in the given order: [n, ...]. Raises StoreError for a damaged or unreadable chunk."""
    return RunsRead(array, rows).wait()


class RunsRead:
    """A read of rows in any order, which is under way: one read per run of consecutive rows, all at once."""

    def __init__(self, array: ts.TensorStore, rows: Int64[np.ndarray, " n"]) -> None:
        self._out = np.empty((len(rows), *array.shape[1:]), array.dtype.numpy_dtype)
        starts = np.flatnonzero(np.diff(rows, prepend=np.iinfo(np.int64).min) != 1)
        stops = np.append(starts, len(rows))[1:]
        runs = zip(starts.tolist(), stops.tolist(), strict=True)
        self._reads = [RowRead(array, int(rows[start]), self._out[start:stop]) for start, stop in runs]

    @property
    def num_bytes(self) -> int:
        return self._out.nbytes

    def wait(self) -> np.ndarray:
        """The rows, [n, ...]. Raises StoreError."""
        for read in self._reads:
            read.wait()
        return self._out


class RowRead:
    """A read of consecutive rows of an array into `out`, which is under way.

    With `threads` the file is read by one of them, where the rows are whole chunks of one local store shard without
    compression. TensorStore reads all else, and what proves damaged or absent. Raises StoreInvalid where something
    else than a file is in the place of a store shard.
    """

    def __init__(self, array: ts.TensorStore, first_row: int, out: np.ndarray, threads: Executor | None = None) -> None:
        self._objects = KeyValueStore(array.kvstore)
        rows_per_shard = array.chunk_layout.write_chunk.shape[0]
        for shard in range(first_row // rows_per_shard, -(-(first_row + len(out)) // rows_per_shard)):
            self._objects.require_file(_shard_key(array, shard))
        rows = array[first_row : first_row + len(out)]
        self._rows = rows[ts.d[0].translate_to[0]]
        self._out = out
        self._file = None if threads is None else _start_file(array, first_row, out, self._objects.directory, threads)
        self._under_way: ts.WriteFutures | None = None if self._file else self._start()

    @property
    def num_bytes(self) -> int:
        return self._out.nbytes

    def _start(self) -> ts.WriteFutures:
        return ts.array(self._out).write(self._rows)

    def wait(self) -> None:
        """Returns when `out` is complete; what seems damaged is read again. Raises StoreError."""
        self._objects.retry_read(self._finish)

    def _finish(self) -> None:
        """Waits; when called again, reads again."""
        file, self._file = self._file, None
        if file is not None and file.result():
            return
        read, self._under_way = self._under_way or self._start(), None
        with self._objects.errors(""):
            read.result()

    def abandon(self) -> None:
        """Waits until nothing is written to `out` any more, whatever comes of it."""
        for read in (self._file, self._under_way):
            with suppress(Exception):
                if read is not None:
                    read.result()


class ReadsAhead:
    """Reads that are under way, in order: READS_AHEAD of them, and of remote storage more.

    A context manager: after an error nothing is written any more to the memory of the others.
    """

    def __init__(self, is_remote: bool) -> None:
        self._max_bytes = REMOTE_BYTES_AHEAD if is_remote else 0
        self._bytes = 0
        self._reads: deque[RowRead] = deque()

    def __enter__(self) -> "ReadsAhead":
        return self

    def __exit__(self, *_: object) -> None:
        for read in self._reads:
            read.abandon()

    def __len__(self) -> int:
        return len(self._reads)

    def add(self, read: RowRead) -> None:
        """Takes a read that was started, and waits for the oldest ones where too many are under way."""
        self._reads.append(read)
        self._bytes += read.num_bytes
        while len(self._reads) > READS_AHEAD and self._bytes > self._max_bytes:
            self._wait_for_oldest()

    def wait(self) -> None:
        """Waits for all. Raises StoreError."""
        while self._reads:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        read = self._reads.popleft()
        self._bytes -= read.num_bytes
        read.wait()


def has_plain_chunks(array: ts.TensorStore) -> bool:
    """Whether the chunks of a store shard are its values as they lie in memory, one after the other, and in a file."""
    sharding, *_ = array.codec.to_json()["codecs"]
    codecs = sharding.get("configuration", {}).get("codecs", [])
    endian = {codec["name"]: codec.get("configuration", {}).get("endian", "little") for codec in codecs}
    rows, positions, *features = array.chunk_layout.read_chunk.shape
    _, all_positions, *all_features = array.chunk_layout.write_chunk.shape
    return (
        list(endian.items()) == [("bytes", "little"), ("crc32c", "little")]
        and (rows == 1 or positions == all_positions)
        and features == all_features
        and KeyValueStore(array.kvstore).directory is not None
    )


def _start_file(
    array: ts.TensorStore, first_row: int, out: np.ndarray, directory: str, threads: Executor
) -> Future[bool] | None:
    """`read_chunks` of an array that `has_plain_chunks`; None where the rows are not whole chunks of one shard."""
    shard_shape, chunk_shape = array.chunk_layout.write_chunk.shape, array.chunk_layout.read_chunk.shape
    shard, row = divmod(first_row, shard_shape[0])
    if row % chunk_shape[0] or len(out) % chunk_shape[0] or row + len(out) > shard_shape[0]:
        return None
    row_chunks = shard_shape[1] // chunk_shape[1]
    num_chunks, first = shard_shape[0] // chunk_shape[0] * row_chunks, row // chunk_shape[0] * row_chunks
    return threads.submit(read_chunks, directory + _shard_key(array, shard), num_chunks, first, out, chunk_shape)


def _shard_key(array: ts.TensorStore, shard: int) -> str:
    """The key of a store shard, relative to the array."""
    return "/".join(["c", str(shard), *["0"] * (array.ndim - 1)])


def counts_positions(segments: Int32[np.ndarray, "n T"]) -> Bool[np.ndarray, " n"]:
    """Whether some position of a row is not 0: where a document window has two tokens."""
    return ((segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)).any(axis=1)


def require_selected(array: ts.TensorStore, block: Block, selected: Int32[np.ndarray, "rows K"]) -> None:
    """Raises StoreInvalid unless `selected`, of a whole block, holds as many tokens as the block's record says."""
    if (num_selected := np.count_nonzero(selected >= 0)) != block.activations:
        raise StoreInvalid(
            f"{KeyValueStore(array.kvstore).url('')} has {num_selected} tokens of block {block.block} of stream "
            f"{block.stream}, whose record says {block.activations}. {VERIFY_REMEDY}"
        )


def slot_side_arrays(sides: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The side arrays of the slots for activations: those of all positions, [R, T], or at `selected`, [R, K]."""
    sides = dict(sides)
    selected = sides.pop(SELECTED.name, None)
    if selected is None:
        return sides
    fills = {spec.name: spec.fill for spec in SIDE_ARRAYS}
    return {name: at_selected(values, selected, fills.get(name, 0)) for name, values in sides.items()}


def at_selected(
    values: Shaped[np.ndarray, "R T"], selected: Int32[np.ndarray, "R K"], fill: int
) -> Shaped[np.ndarray, "R K"]:
    """The values at the selected positions, `fill` in the slots that hold none."""
    chosen = np.take_along_axis(values, np.maximum(selected, 0), axis=1)
    return np.where(selected >= 0, chosen, np.array(fill, values.dtype))
