"""Store shards as files: encoded from the job's buffers and written to a local disk, without a copy in between, and
read into the memory that a reader gathers from.

TensorStore writes the same bytes at 0.6 to 0.7 of this speed and with a copy of every block in memory, and takes more
CPU time to read them (docs/performance.md). It writes and reads all else: compressed chunks and every other kind of
storage.
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
_ABSENT = (1 << 64) - 1  # in a shard's index: of a chunk that holds the fill value alone, which is not written


class ShardFiles:
    """Writes store shards below a directory, as many at a time as there are `threads`."""

    def __init__(self, root: Path, threads: Executor) -> None:
        self._root = root
        self._threads = threads

    def write(
        self, key: str, values: Shaped[np.ndarray, "R ..."], chunk_shape: Sequence[int], fill: int
    ) -> Future[str]:
        """Starts writing an object, which replaces an earlier one once all of it is on the disk. As TensorStore does,
        deletes it instead where every value is the fill value.

        `values` is not copied: leave it untouched until the future is done. That gives the values' digest, or raises
        OSError where writing failed; an earlier object then stays.
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
    The chunks' checksums go into `digest`, too.

    Chunks must be whole rows or a part of one row, as `StoreLayout.chunk_shape`'s are: one after the other they are
    `values` as it lies in memory. Nothing at all where every chunk holds the fill value alone.
    """
    values = np.ascontiguousarray(values)
    content = memoryview(values.reshape(-1).view(np.uint8))
    empty = np.full(math.prod(chunk_shape), fill, values.dtype).tobytes()
    checksum_of_empty = chunk_checksum(empty)
    first = empty[: values.itemsize]
    index = []
    offset = 0
    for start in range(0, len(content), len(empty)):
        chunk = content[start : start + len(empty)]
        if chunk[: len(first)] == first and bytes(chunk) == empty:
            index += [_ABSENT, _ABSENT]
            digest.add_checksum(checksum_of_empty)
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
    """Reads chunks of a shard file that has `num_chunks`, from chunk `first` on, into `out`, and checks their crc32c.

    `out` has the shape of whole chunks, which are as `encode_shard` has them; its rows may be apart in memory. Returns
    False, with anything in `out`, where there is no such file, where a chunk is absent, since it holds the fill value,
    and where anything is damaged: TensorStore gives these values, or says what is wrong.
    """
    rows, positions, *_ = chunk_shape
    values = out.view(f"u{out.itemsize}")
    own = np.empty(chunk_shape, values.dtype)  # for chunks that are not contiguous in `out`
    places = [(row, position) for row in range(0, out.shape[0], rows) for position in range(0, out.shape[1], positions)]
    size, checksum = own.nbytes, bytearray(_CHECKSUM_BYTES)
    try:
        with open(path, "rb", buffering=0) as file:
            index = _read_index(file, num_chunks)[first : first + len(places)]
            for (row, position), (offset, stored_size) in zip(places, index, strict=True):
                target = values[row : row + rows, position : position + positions]
                chunk = target if target.flags.c_contiguous else own
                if stored_size != size + _CHECKSUM_BYTES:
                    return False
                file.seek(offset)
                if file.readinto(chunk) != size or file.readinto(checksum) != _CHECKSUM_BYTES:
                    return False
                if chunk_checksum(chunk) != checksum:
                    return False
                if chunk is own:
                    target[...] = own
    except (OSError, ValueError, OverflowError):
        return False
    return True


def _read_index(file: BinaryIO, num_chunks: int) -> list[list[int]]:
    """Offset and size of each chunk of a shard. Raises ValueError where it is damaged, and OSError."""
    size = _INDEX_ENTRY_BYTES * num_chunks
    file.seek(-size - _CHECKSUM_BYTES, os.SEEK_END)
    encoded = file.read(size + _CHECKSUM_BYTES)
    if chunk_checksum(encoded[:size]) != encoded[size:]:
        raise ValueError("the index of the shard is damaged")
    return np.frombuffer(encoded, "<u8", 2 * num_chunks).reshape(-1, 2).tolist()


def _write_durably(root: Path, key: str, parts: Iterator[memoryview | bytes]) -> None:
    path = root / key
    make_directories(path.parent, root)
    temporary = path.with_name(f"{path.name}.__lock")  # TensorStore's name for it, which listings leave out
    with _opened_alone(temporary) as file:
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
def _opened_alone(path: Path) -> Iterator[BinaryIO]:
    """An empty file at this path, new or left behind by a process that was killed. Others wait, TensorStore's too."""
    while True:
        with path.open("ab") as file:
            _lock(file)
            is_current = False  # else another has renamed or deleted it meanwhile
            with suppress(FileNotFoundError):
                is_current = path.stat().st_ino == os.fstat(file.fileno()).st_ino
            if is_current:
                file.truncate(0)
                file.seek(0)  # of a file that is appended to, truncating leaves the position where it was
                yield file
                return


def _lock(file: BinaryIO) -> None:
    """Waits for the lock that TensorStore takes: of the open file on Linux, which is another than flock's."""
    if hasattr(fcntl, "F_OFD_SETLKW"):
        whole_file = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)  # C's struct flock
        fcntl.fcntl(file, fcntl.F_OFD_SETLKW, whole_file)
    else:
        fcntl.flock(file, fcntl.LOCK_EX)
