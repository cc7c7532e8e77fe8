"""The content of a store shard, encoded and decoded: chunks, each with its crc32c, then the index of the chunks with
its crc32c, as Zarr v3's sharding codec defines it
(https://zarr-specs.readthedocs.io/en/latest/v3/codecs/sharding-indexed/index.html).

Chunks are whole rows or part of one row, as from `StoreLayout.chunk_shape`, so that the chunks in order are the values
in order. A chunk of fill values is absent. The digest of a block's values is made of the crc32c of its chunks (decoded,
those of fill values too), so it does not depend on the compression.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
from crc32c import crc32c  # unlike google_crc32c it accepts any buffer and releases the GIL
from jaxtyping import Shaped, UInt64

Buffer = bytes | memoryview

CHECKSUM_BYTES = 4
ABSENT = (1 << 64) - 1  # offset and size, in the index, of a chunk that has only fill values
_ENTRY_BYTES = 16  # offset and size
_DIGEST_DIGITS = 16
_ZSTD_LEVEL = 1
_PIECE_BYTES = 64 << 20  # of a shard, read at a time by `decoded_chunks`


@dataclass(frozen=True)
class ShardFormat:
    """How the store shards of one array are encoded.

    shape: of a store shard. chunk_shape: divides it. fill: the value of absent chunks. compression: none or zstd.
    """

    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    dtype: np.dtype
    fill: int
    compression: str

    @cached_property
    def num_chunks(self) -> int:
        return math.prod(self.shape) // math.prod(self.chunk_shape)

    @cached_property
    def chunk_bytes(self) -> int:
        """Bytes of a decoded chunk."""
        return math.prod(self.chunk_shape) * self.dtype.itemsize

    @property
    def index_bytes(self) -> int:
        """Bytes of the index with its checksum, at the end of the shard."""
        return _ENTRY_BYTES * self.num_chunks + CHECKSUM_BYTES

    @property
    def stored_chunk_limits(self) -> tuple[int, int]:
        """The least and the largest number of bytes of a stored chunk with its checksum."""
        if self.compression == "none":
            return (self.chunk_bytes + CHECKSUM_BYTES,) * 2
        return CHECKSUM_BYTES + 1, self.chunk_bytes + self.chunk_bytes // 128 + 1024  # more than zstd needs

    @cached_property
    def fill_chunk(self) -> bytes:
        return np.full(math.prod(self.chunk_shape), self.fill, self.dtype).tobytes()


def values_digest(checksums: Iterable[bytes]) -> str:
    """The digest of a block's values in an array, from the crc32c of each decoded chunk, in order."""
    return hashlib.sha256(b"".join(checksums)).hexdigest()[:_DIGEST_DIGITS]


def checksum(content: Buffer) -> bytes:
    """The crc32c, 4 bytes, as Zarr's `crc32c` codec writes it."""
    return crc32c(content).to_bytes(CHECKSUM_BYTES, "little")


def encode_shard(values: Shaped[np.ndarray, "..."], format: ShardFormat) -> tuple[list[Buffer], bytes]:
    """The parts of a shard in order, and its chunks' checksums (decoded). Uncompressed chunks are views of `values`."""
    values = np.ascontiguousarray(values)
    if (values.dtype, values.shape) != (format.dtype, format.shape):
        raise ValueError(f"a store shard is {format.dtype} {format.shape}, got {values.dtype} {values.shape}")
    content = memoryview(values.reshape(-1).view(np.uint8))
    fill_checksum, fill_value = checksum(format.fill_chunk), format.fill_chunk[: values.itemsize]
    codec = _codec(format)
    parts: list[Buffer] = []
    index = np.full((format.num_chunks, 2), ABSENT, "<u8")
    checksums, offset = [], 0
    for number in range(format.num_chunks):
        chunk = content[number * format.chunk_bytes : (number + 1) * format.chunk_bytes]
        if chunk[: len(fill_value)] == fill_value and bytes(chunk) == format.fill_chunk:
            checksums.append(fill_checksum)
            continue
        stored, stored_checksum = chunk, checksum(chunk)
        checksums.append(stored_checksum)
        if codec is not None:
            stored = codec.compress(chunk, asbytes=True)
            stored_checksum = checksum(stored)
        parts += [stored, stored_checksum]
        index[number] = offset, len(stored) + CHECKSUM_BYTES
        offset += len(stored) + CHECKSUM_BYTES
    encoded_index = index.tobytes()
    return [*parts, encoded_index, checksum(encoded_index)], b"".join(checksums)


def decode_shard(content: Buffer, format: ShardFormat) -> tuple[Shaped[np.ndarray, "..."], bytes]:
    """The values of a shard, and its chunks' checksums (decoded). Raises ValueError, saying what is wrong, if the shard
    is damaged."""
    content, checksums = memoryview(content), []
    index = decode_index(content[-format.index_bytes :], format)
    if len(content) != int(index[index[:, 1] != ABSENT, 1].sum()) + format.index_bytes:
        raise ValueError(f"its {len(content)} bytes are not those of its chunks and index")
    chunks = np.full((format.num_chunks, *format.chunk_shape), format.fill, format.dtype)
    for number, (values, chunk_checksum) in enumerate(decoded_chunks(lambda *part: content[slice(*part)], format)):
        checksums.append(chunk_checksum)
        if values is not None:
            chunks[number] = values
    return chunks.reshape(format.shape), b"".join(checksums)


def decoded_chunks(
    read: Callable[[int, int | None], Buffer], format: ShardFormat
) -> Iterator[tuple[Shaped[np.ndarray, "..."] | None, bytes]]:
    """A shard's chunks in order, None for one of fill values, each with its checksum (decoded). read: returns bytes of
    the shard, from the first up to the second number, as for a slice. Raises ValueError, saying what is wrong, if the
    shard is damaged."""
    index = decode_index(read(-format.index_bytes, None), format).tolist()
    absent, chunks_at_once = checksum(format.fill_chunk), max(1, _PIECE_BYTES // format.stored_chunk_limits[1])
    for first in range(0, len(index), chunks_at_once):
        some = index[first : first + chunks_at_once]
        present = [entry for entry in some if entry[1] != ABSENT]  # they follow each other without gaps
        start = present[0][0] if present else 0
        piece = memoryview(read(start, sum(present[-1])) if present else b"")
        for offset, size in some:
            if size == ABSENT:
                yield None, absent
            else:
                stored = piece[offset - start :][:size]
                values, chunk_checksum = decode_chunk(stored, format), bytes(stored[-CHECKSUM_BYTES:])
                if format.compression != "none":
                    chunk_checksum = checksum(memoryview(values.reshape(-1).view(np.uint8)))
                yield values, chunk_checksum


def decode_index(content: Buffer, format: ShardFormat) -> UInt64[np.ndarray, "chunks 2"]:
    """The offset and size of each stored chunk with its checksum; both are ABSENT for a chunk of fill values.

    content: the last `format.index_bytes` of a shard. Chunks must follow each other without gaps, so that the offsets
    and sizes are bounded. Raises ValueError, saying what is wrong, if the index is damaged.
    """
    content = memoryview(content)
    if len(content) != format.index_bytes:
        raise ValueError(f"its index has {len(content)} bytes, expected {format.index_bytes}")
    if checksum(content[:-CHECKSUM_BYTES]) != content[-CHECKSUM_BYTES:]:
        raise ValueError("its index does not match its checksum")
    index = np.frombuffer(content[:-CHECKSUM_BYTES], "<u8").reshape(-1, 2)
    is_absent = (index == ABSENT).all(axis=1)
    offsets, sizes = index[~is_absent].T
    least, most = format.stored_chunk_limits
    if not ((least <= sizes) & (sizes <= most)).all() or (offsets != np.cumsum(sizes) - sizes).any():
        raise ValueError("its index has impossible offsets or sizes")
    return index


def decode_chunk(stored: Buffer, format: ShardFormat) -> Shaped[np.ndarray, "..."]:
    """The values of a stored chunk, which its checksum follows, perhaps a read-only view of `stored`. Raises
    ValueError, saying what is wrong, if the chunk is damaged."""
    stored = memoryview(stored)
    content = stored[:-CHECKSUM_BYTES]
    if checksum(content) != stored[-CHECKSUM_BYTES:]:
        raise ValueError("a chunk does not match its checksum")
    codec = _codec(format)
    if codec is not None:
        try:
            content = codec.decompress(content, decompressed_size=format.chunk_bytes)
        except OSError as error:
            raise ValueError(f"a chunk cannot be decompressed: {error}") from error
    if len(content) != format.chunk_bytes:
        raise ValueError(f"a chunk has {len(content)} bytes, expected {format.chunk_bytes}")
    return np.frombuffer(content, format.dtype).reshape(format.chunk_shape)


def _codec(format: ShardFormat) -> pa.Codec | None:
    return None if format.compression == "none" else pa.Codec("zstd", compression_level=_ZSTD_LEVEL)
