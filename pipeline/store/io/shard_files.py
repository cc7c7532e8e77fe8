"""Store shards as local files: encoded from the job's buffers and written without a copy in between, and read directly
into a reader's buffers.

For the same bytes, TensorStore reaches 0.6 to 0.7 of this write speed, copies every block in memory, and takes more CPU
time to read (docs/performance.md). It is used for everything else: compressed chunks and all other kinds of storage.
"""

import fcntl
import math
import os
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np
from jaxtyping import Shaped

from pipeline.store.io.digests import ValuesDigest, chunk_checksum
from pipeline.store.io.directories import make_directories, sync_directory

_CHECKSUM_BYTES = 4
_INDEX_ENTRY_BYTES = 16  # offset and size
_ABSENT = (1 << 64) - 1  # index entry of a chunk with only fill values, which is not written


class ShardFiles:
    """Writes store shards below the directory `root`, in `threads`."""

    def __init__(self, root: Path, threads: Executor) -> None:
        self._root = root
        self._threads = threads

    def write(
        self, key: str, values: Shaped[np.ndarray, "R ..."], chunk_shape: Sequence[int], fill: int
    ) -> Future[str]:
        """Starts writing a block of an array. Its file replaces an earlier one only when all of it is on the disk.

        If every value is the fill value, the file is deleted instead, as TensorStore does. `values` is not copied: do
        not change it until the future is done. The future returns the values' digest, or raises OSError if writing
        failed; an earlier file is then unchanged.
        """
        return self._threads.submit(self._write, key, values, chunk_shape, fill)

    def _write(self, key: str, values: Shaped[np.ndarray, "R ..."], chunk_shape: Sequence[int], fill: int) -> str:
        digest = ValuesDigest(math.prod(chunk_shape) * values.itemsize)
        _write_durably(self._root, key, encode_shard(values, chunk_shape, fill, digest))
        return digest.hexdigest()


def encode_shard(
    values: Shaped[np.ndarray, "R ..."], chunk_shape: Sequence[int], fill: int, digest: ValuesDigest
) -> Iterator[memoryview | bytes]:
    """The parts of a Zarr v3 shard, in order: each chunk and its crc32c, then the index of the chunks and its crc32c.
    Adds the chunks' checksums to `digest`.

    Chunks must be whole rows or part of one row, as from `StoreLayout.chunk_shape`, so that the chunks in order are the
    memory of `values`. Yields nothing if every value is the fill value.
    """
    values = np.ascontiguousarray(values)
    content = memoryview(values.reshape(-1).view(np.uint8))
    fill_chunk = np.full(math.prod(chunk_shape), fill, values.dtype).tobytes()
    fill_checksum = chunk_checksum(fill_chunk)
    fill_value = fill_chunk[: values.itemsize]
    index = []
    offset = 0
    for start in range(0, len(content), len(fill_chunk)):
        chunk = content[start : start + len(fill_chunk)]
        if chunk[: len(fill_value)] == fill_value and bytes(chunk) == fill_chunk:
            index += [_ABSENT, _ABSENT]
            digest.add_checksum(fill_checksum)
            continue
        checksum = chunk_checksum(chunk)
        digest.add_checksum(checksum)
        yield chunk
        yield checksum
        index += [offset, len(chunk) + len(checksum)]
        offset += len(chunk) + len(checksum)
    if offset == 0:
        return
    encoded_index = struct.pack(f"<{len(index)}Q", *index)
    yield encoded_index
    yield chunk_checksum(encoded_index)


def read_chunks(
    path: str, num_chunks: int, first: int, out: Shaped[np.ndarray, "R ..."], chunk_shape: Sequence[int]
) -> bool:
    """Reads chunks from a shard file with `num_chunks` chunks, starting at chunk `first`, and checks their crc32c.

    out: receives the values. Its shape is whole chunks, as `encode_shard` expects them; its rows need not be adjacent
    in memory. Returns False, leaving `out` undefined, if there is no such file, if a chunk is absent because it has
    only fill values, or if anything is damaged. TensorStore then reads these values or reports the damage.
    """
    rows, positions, *_ = chunk_shape
    values = out.view(f"u{out.itemsize}")
    buffer = np.empty(chunk_shape, values.dtype)  # for chunks that are not contiguous in `out`
    starts = [(row, position) for row in range(0, out.shape[0], rows) for position in range(0, out.shape[1], positions)]
    size, checksum = buffer.nbytes, bytearray(_CHECKSUM_BYTES)
    try:
        with open(path, "rb", buffering=0) as file:
            index = _read_index(file, num_chunks)[first : first + len(starts)]
            for (row, position), (offset, stored_size) in zip(starts, index, strict=True):
                target = values[row : row + rows, position : position + positions]
                chunk = target if target.flags.c_contiguous else buffer
                if stored_size != size + _CHECKSUM_BYTES:
                    return False
                file.seek(offset)
                if file.readinto(chunk) != size or file.readinto(checksum) != _CHECKSUM_BYTES:
                    return False
                if chunk_checksum(chunk) != checksum:
                    return False
                if chunk is buffer:
                    target[...] = buffer
    except (OSError, ValueError, OverflowError):
        return False
    return True


def _read_index(file: BinaryIO, num_chunks: int) -> list[list[int]]:
    """The offset and size of each chunk of a shard. Raises ValueError if the index is damaged, and OSError."""
    size = _INDEX_ENTRY_BYTES * num_chunks
    file.seek(-size - _CHECKSUM_BYTES, os.SEEK_END)
    encoded = file.read(size + _CHECKSUM_BYTES)
    if chunk_checksum(encoded[:size]) != encoded[size:]:
        raise ValueError("the index of the shard is damaged")
    return np.frombuffer(encoded, "<u8", 2 * num_chunks).reshape(-1, 2).tolist()


def _write_durably(root: Path, key: str, parts: Iterator[memoryview | bytes]) -> None:
    path = root / key
    make_directories(path.parent, root)
    temporary = path.with_name(f"{path.name}.__lock")  # TensorStore's name, which its listings leave out
    with _open_locked(temporary) as file:
        try:
            file.writelines(parts)
            if file.tell() == 0:
                path.unlink(missing_ok=True)
                temporary.unlink()
            else:
                file.flush()
                os.fsync(file.fileno())
                temporary.rename(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    sync_directory(path.parent)


@contextmanager
def _open_locked(path: Path) -> Iterator[BinaryIO]:
    """A locked, empty file at this path, new or left by a killed process. Other writers wait, including TensorStore."""
    while True:
        with path.open("ab") as file:
            _lock(file)
            is_current = False  # it is not if another process renamed or deleted it before we got the lock
            with suppress(FileNotFoundError):
                is_current = path.stat().st_ino == os.fstat(file.fileno()).st_ino
            if is_current:
                file.truncate(0)
                file.seek(0)  # truncating does not change the position, which append mode set to the end
                yield file
                return


def _lock(file: BinaryIO) -> None:
    """Waits for the lock that TensorStore uses: on Linux, an open file description lock, which flock would ignore."""
    if hasattr(fcntl, "F_OFD_SETLKW"):
        whole_file = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)  # C's struct flock
        fcntl.fcntl(file, fcntl.F_OFD_SETLKW, whole_file)
    else:
        fcntl.flock(file, fcntl.LOCK_EX)
