"""Activations captured during generation, kept with the groups until they are stored in blocks.

A group has one object per array: the activations [n, D] of its documents' tokens, document after document, as
little-endian values without a header, followed by the sha256 of the object's key and these values. They are written
before the group's parquet file, and deleted when the store is complete.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from pipeline.core.errors import StoreError, StoreInvalid
from pipeline.store.format.keys import stream_prefix
from pipeline.store.generated.group_keys import GENERATED_PREFIX, group_key
from pipeline.store.io.storage import Storage

_SUFFIX = ".activations"


def kept_key(stream: int, index: int, array: str) -> str:
    """The key of a group's activations of an array, relative to the store."""
    return f"{group_key(stream, index).removesuffix('.parquet')}.{array}{_SUFFIX}"


def first_without_kept(storage: Storage, stream: int, groups: range, arrays: Sequence[str]) -> int:
    """The first of a stream's `groups` without activations of all `arrays`; the end of `groups` if all have them."""
    stored = set(storage.list_keys(stream_prefix(GENERATED_PREFIX, stream)))
    lacking = (index for index in groups if not {kept_key(stream, index, array) for array in arrays} <= stored)
    return next(lacking, groups.stop)


def write_kept(storage: Storage, stream: int, index: int, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes a group's activations [n, D] durably, by array name. Raises StoreError."""
    for name, values in arrays.items():
        key, content = kept_key(stream, index, name), np.ascontiguousarray(values).tobytes()
        storage.write(key, content + _checksum(key, content))


def read_kept(
    storage: Storage, stream: int, index: int, array: str, dtype: np.dtype, shape: tuple[int, int]
) -> np.ndarray:
    """Reads a group's activations of an array, [n, D] as in `shape`. Raises StoreError if they are missing, and
    StoreInvalid if they are damaged."""
    num_bytes = shape[0] * shape[1] * dtype.itemsize

    def check(key: str, content: bytes | None) -> np.ndarray:
        if content is None:  # perhaps because another run has just completed the store
            raise StoreError(f"{key} is missing. Run the same command again to rewrite it.")
        for what in _damage(key, content, num_bytes):
            raise StoreInvalid(f"{key} {what}. Delete it, and run the same command again.")
        return np.frombuffer(content[:num_bytes], dtype).reshape(shape)

    [values] = storage.read_checked([kept_key(stream, index, array)], check)
    return values


def check_kept(
    storage: Storage, stream: int, index: int, num_tokens: int, token_bytes: Mapping[str, int]
) -> Iterator[tuple[str, str]]:
    """The key of each damaged object of a group with `num_tokens` tokens, and what is wrong. Missing objects are valid.

    token_bytes: bytes of activations per token, by array name.
    """
    for array, size in token_bytes.items():
        key = kept_key(stream, index, array)
        if what := storage.file_problem(key):
            yield key, what
        elif (content := storage.read(key)) is not None:
            yield from ((key, what) for what in _damage(key, content, num_tokens * size))


def _checksum(key: str, content: bytes) -> bytes:
    return hashlib.sha256(key.encode() + content).digest()


def _damage(key: str, content: bytes, num_bytes: int) -> Iterator[str]:
    values, checksum = content[:num_bytes], content[num_bytes:]
    if len(values) < num_bytes or len(checksum) != hashlib.sha256().digest_size:
        yield f"has {len(content)} bytes, expected {num_bytes} and a checksum"
    elif checksum != _checksum(key, values):
        yield "does not match its own checksum"


def kept_keys(storage: Storage) -> list[str]:
    """The keys of all kept activations, relative to the store."""
    return [key for key in storage.list_keys(GENERATED_PREFIX) if key.endswith(_SUFFIX)]
