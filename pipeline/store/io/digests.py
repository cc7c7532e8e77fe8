"""Digests that commit records and the root name. An object that was exchanged or edited has another, even if valid."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from crc32c import crc32c  # unlike google_crc32c it takes any buffer, and releases the interpreter's lock
from jaxtyping import Shaped

_HEX_DIGITS = 16


class ValuesDigest:
    """The digest of one array's values in a block: of the crc32c of each chunk (decoded, little-endian), in order.

    It does not depend on the compression. An object that Zarr leaves out has the digest of its fill values. A shard
    without compression has the same crc32c after each chunk.
    """

    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._sha256 = hashlib.sha256()
        self._begun = bytearray()  # the first bytes of a chunk, until the rest is added

    def add_checksum(self, checksum: bytes) -> None:
        """The next chunk's crc32c, as 4 bytes."""
        self._sha256.update(checksum)

    def add_values(self, values: Shaped[np.ndarray, "..."]) -> None:
        """The next values; chunks may begin in one call and end in another."""
        content = memoryview(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
        if self._begun:
            missing = self._chunk_bytes - len(self._begun)
            self._begun += content[:missing]
            content = content[missing:]
            if len(self._begun) < self._chunk_bytes:
                return
            self.add_checksum(chunk_checksum(self._begun))
            self._begun = bytearray()
        whole = len(content) // self._chunk_bytes * self._chunk_bytes
        for start in range(0, whole, self._chunk_bytes):
            self.add_checksum(chunk_checksum(content[start : start + self._chunk_bytes]))
        self._begun += content[whole:]

    def hexdigest(self) -> str:
        return self._sha256.hexdigest()[:_HEX_DIGITS]


def values_digest(values: Shaped[np.ndarray, "R ..."], chunk_shape: Sequence[int]) -> str:
    """The digest of a whole block's values."""
    digest = ValuesDigest(int(np.prod(chunk_shape)) * values.itemsize)
    digest.add_values(values)
    return digest.hexdigest()


def repeated_chunk_digest(chunk: Shaped[np.ndarray, "..."], num_chunks: int) -> str:
    """The digest of a block whose chunks are all the same."""
    digest = ValuesDigest(chunk.nbytes)
    checksum = chunk_checksum(memoryview(np.ascontiguousarray(chunk).reshape(-1).view(np.uint8)))
    for _ in range(num_chunks):
        digest.add_checksum(checksum)
    return digest.hexdigest()


def chunk_checksum(chunk: memoryview | bytes | bytearray) -> bytes:
    """The crc32c of a chunk, as Zarr's codec of that name writes it."""
    return crc32c(chunk).to_bytes(4, "little")


def json_digest(content: Any) -> str:
    """sha256, as hex, of the canonical JSON of plain values."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def objects_digest(objects: Mapping[str, bytes]) -> str:
    """sha256, as hex, of the sorted list of the objects' keys, each with the sha256 of its content."""
    return json_digest([[key, hashlib.sha256(objects[key]).hexdigest()] for key in sorted(objects)])


def array_digest(zarr_json: Mapping[str, Any]) -> str:
    """The digest of an array's metadata without its number of rows, which changes while a store is written."""
    shape = [None, *zarr_json["shape"][1:]]
    return json_digest({**zarr_json, "shape": shape})[:_HEX_DIGITS]
