"""The digests in commit records and the root: they reveal an object that was replaced or edited, even if valid."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from crc32c import crc32c  # unlike google_crc32c it accepts any buffer and releases the GIL
from jaxtyping import Shaped

_HEX_DIGITS = 16


class ValuesDigest:
    """The digest of one array's values in a block: the sha256 of the crc32c of each chunk (decoded, little-endian).

    It does not depend on the compression; in an uncompressed shard, the same crc32c follows each chunk. If all values
    are the fill value and there is no object, it is the digest of those values.
    """

    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._sha256 = hashlib.sha256()
        self._partial = bytearray()  # the first bytes of a chunk whose other bytes are yet to be added

    def add_checksum(self, checksum: bytes) -> None:
        """Adds the next chunk's crc32c, 4 bytes."""
        self._sha256.update(checksum)

    def add_values(self, values: Shaped[np.ndarray, "..."]) -> None:
        """Adds the next values. A chunk may be divided between calls."""
        content = memoryview(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
        if self._partial:
            missing = self._chunk_bytes - len(self._partial)
            self._partial += content[:missing]
            content = content[missing:]
            if len(self._partial) < self._chunk_bytes:
                return
            self.add_checksum(chunk_checksum(self._partial))
            self._partial = bytearray()
        whole = len(content) // self._chunk_bytes * self._chunk_bytes
        for start in range(0, whole, self._chunk_bytes):
            self.add_checksum(chunk_checksum(content[start : start + self._chunk_bytes]))
        self._partial += content[whole:]

    def hexdigest(self) -> str:
        return self._sha256.hexdigest()[:_HEX_DIGITS]


def values_digest(values: Shaped[np.ndarray, "R ..."], chunk_shape: Sequence[int]) -> str:
    """The `ValuesDigest` of a whole block's values."""
    digest = ValuesDigest(int(np.prod(chunk_shape)) * values.itemsize)
    digest.add_values(values)
    return digest.hexdigest()


def repeated_chunk_digest(chunk: Shaped[np.ndarray, "..."], num_chunks: int) -> str:
    """The `ValuesDigest` of a block in which every chunk has the same values."""
    digest = ValuesDigest(chunk.nbytes)
    checksum = chunk_checksum(memoryview(np.ascontiguousarray(chunk).reshape(-1).view(np.uint8)))
    for _ in range(num_chunks):
        digest.add_checksum(checksum)
    return digest.hexdigest()


def chunk_checksum(chunk: memoryview | bytes | bytearray) -> bytes:
    """The crc32c of a chunk, 4 bytes, as Zarr's `crc32c` codec writes it."""
    return crc32c(chunk).to_bytes(4, "little")


def json_digest(content: Any) -> str:
    """The sha256 of the canonical JSON of plain values, as hex."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def objects_digest(objects: Mapping[str, bytes]) -> str:
    """The sha256, as hex, of a list of the objects' keys in order, each with the sha256 of its content."""
    return json_digest([[key, hashlib.sha256(objects[key]).hexdigest()] for key in sorted(objects)])


def array_digest(zarr_json: Mapping[str, Any]) -> str:
    """The digest of an array's metadata, without the number of rows, which changes when a store is completed."""
    shape = [None, *zarr_json["shape"][1:]]
    return json_digest({**zarr_json, "shape": shape})[:_HEX_DIGITS]
