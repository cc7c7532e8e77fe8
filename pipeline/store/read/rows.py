"""Reading rows of an array into the caller's memory, and taking the slots of selected tokens from them.

Shapes: R rows, T positions per row, K slots per row for selected tokens (unused slots are -1 in `selected`).
"""

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Executor, Future
from contextlib import suppress

import numpy as np
import tensorstore as ts
from jaxtyping import Bool, Int32, Int64, Shaped

from pipeline.core.arguments import require_not_forked
from pipeline.core.errors import StoreInvalid
from pipeline.store.format.block_table import Block
from pipeline.store.format.layout import MIB, SELECTED, SIDE_ARRAYS
from pipeline.store.io.failures import VERIFY_REMEDY
from pipeline.store.io.shard_files import read_chunks
from pipeline.store.io.storage import KeyValueStore

# How many pieces are read concurrently: enough for a local disk. With more, TensorStore's buffers no longer reuse
# memory that was just freed (measured: 30 pieces cause 20 to 40 times as many page faults as 6).
READS_AHEAD = 6

# From remote storage, more pieces are read concurrently, up to this many bytes. A piece of 8 MiB takes two requests,
# for the shard's index and its chunks: 184 ms at 50 ms per request and 100 MB/s. So 1 GiB/s needs 24 pieces in flight.
REMOTE_BYTES_AHEAD = 256 * MIB


def read_runs(array: ts.TensorStore, rows: Int64[np.ndarray, " n"]) -> np.ndarray:
    """Reads the given rows, in the given order: [n, ...]. Raises StoreError for a damaged or unreadable chunk."""
    return RunsRead(array, rows).wait()


class RunsRead:
    """A started read of rows in any order: one concurrent read per run of consecutive rows."""

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
    """A started read of consecutive rows of an array into `out`.

    If `threads` is given and the rows are whole chunks of one uncompressed local store shard, a thread reads them from
    its file. TensorStore reads in all other cases, and if a chunk is damaged or absent. Raises StoreInvalid if there is
    something other than a file at a store shard's path.
    """

    def __init__(self, array: ts.TensorStore, first_row: int, out: np.ndarray, threads: Executor | None = None) -> None:
        require_not_forked("TensorStore")
        self._objects = KeyValueStore(array.kvstore)
        rows_per_shard = array.chunk_layout.write_chunk.shape[0]
        for shard in range(first_row // rows_per_shard, -(-(first_row + len(out)) // rows_per_shard)):
            self._objects.require_file(_shard_key(array, shard))
        rows = array[first_row : first_row + len(out)]
        self._rows = rows[ts.d[0].translate_to[0]]
        self._out = out
        self._file = None if threads is None else _start_file(array, first_row, out, self._objects.directory, threads)
        self._started: ts.WriteFutures | None = None if self._file else self._start()

    @property
    def num_bytes(self) -> int:
        return self._out.nbytes

    def _start(self) -> ts.WriteFutures:
        return ts.array(self._out).write(self._rows)

    def wait(self) -> None:
        """Waits until `out` is complete, retrying what seems damaged. Raises StoreError."""
        self._objects.retry_read(self._finish)

    def _finish(self) -> None:
        """Waits for the read. When called again, reads again."""
        file, self._file = self._file, None
        if file is not None and file.result():
            return
        read, self._started = self._started or self._start(), None
        with self._objects.errors(""):
            read.result()

    def abandon(self) -> None:
        """Waits until nothing is written to `out` any more, ignoring errors."""
        for read in (self._file, self._started):
            with suppress(Exception):
                if read is not None:
                    read.result()


class ReadsAhead:
    """A queue of started reads: READS_AHEAD of them, and more from remote storage.

    A context manager: on exit, it waits until none of them writes to memory any more, even after an error.
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
        """Adds a started read, and waits for the oldest ones if there are too many."""
        self._reads.append(read)
        self._bytes += read.num_bytes
        while len(self._reads) > READS_AHEAD and self._bytes > self._max_bytes:
            self._wait_for_oldest()

    def wait(self) -> None:
        """Waits for all reads. Raises StoreError."""
        while self._reads:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        read = self._reads.popleft()
        self._bytes -= read.num_bytes
        read.wait()


def has_plain_chunks(array: ts.TensorStore) -> bool:
    """Whether store shards are local files with uncompressed chunks which, in order, are the values in memory."""
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
    """Starts `read_chunks` for an array that `has_plain_chunks`; None if the rows are not whole chunks of one shard."""
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


def has_nonzero_positions(segments: Int32[np.ndarray, "n T"]) -> Bool[np.ndarray, " n"]:
    """Whether a row has a position other than 0: whether one of its document windows has two or more tokens."""
    return ((segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)).any(axis=1)


def require_selected(array: ts.TensorStore, block: Block, selected: Int32[np.ndarray, "rows K"]) -> None:
    """Raises StoreInvalid unless `selected`, of all rows of a block, has as many tokens as the block's record."""
    if (num_selected := np.count_nonzero(selected >= 0)) != block.activations:
        raise StoreInvalid(
            f"{KeyValueStore(array.kvstore).url('')} has {num_selected} tokens in block {block.block} of stream "
            f"{block.stream}, expected {block.activations} as in its record. {VERIFY_REMEDY}"
        )


def slot_side_arrays(sides: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The side arrays at the slots for activations: unchanged [R, T], or [R, K] at `selected` if it is among them."""
    sides = dict(sides)
    selected = sides.pop(SELECTED.name, None)
    if selected is None:
        return sides
    fills = {spec.name: spec.fill for spec in SIDE_ARRAYS}
    return {name: at_selected(values, selected, fills.get(name, 0)) for name, values in sides.items()}


def at_selected(
    values: Shaped[np.ndarray, "R T"], selected: Int32[np.ndarray, "R K"], fill: int
) -> Shaped[np.ndarray, "R K"]:
    """The values at the selected positions, and `fill` in unused slots."""
    selected_values = np.take_along_axis(values, np.maximum(selected, 0), axis=1)
    return np.where(selected >= 0, selected_values, np.array(fill, values.dtype))
