"""Activations captured during generation, kept with the groups until they are stored in blocks.

A group has one object per array: the activations [n, D] of its documents' tokens, document after document, as
little-endian values without a header, followed by the sha256 of the object's key and these values. The key contains a
digest of the documents, so that a group never meets activations of other completions, which another run generated. The
objects are put before the group's parquet file, and deleted when the store is complete.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pipeline.core.errors import StoreError, StoreInvalid
from pipeline.store.generated.group_keys import GENERATED_PREFIX, group_key
from pipeline.store.io.storage import Storage

_SUFFIX = ".activations"


class KeptGroup(NamedTuple):
    """The group that activations belong to. digest: `documents_digest` of its documents."""

    stream: int
    index: int
    digest: str

    def key(self, array: str) -> str:
        """The key of its activations of an array, relative to the store."""
        return f"{group_key(self.stream, self.index).removesuffix('.parquet')}.{array}.{self.digest}{_SUFFIX}"


def documents_digest(documents: Iterable[Sequence[int]]) -> str:
    """A digest of a group's documents, the tokens of each: prompt and completion."""
    tokens = [list(map(int, document)) for document in documents]
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16]


def has_kept(storage: Storage, group: KeptGroup, arrays: Iterable[str]) -> bool:
    """Whether the store has a group's activations of all `arrays`. Raises StoreError."""
    stored = storage.list_keys(group_key(group.stream, group.index).removesuffix("parquet"))
    return {group.key(array) for array in arrays} <= set(stored)


def put_kept(storage: Storage, group: KeptGroup, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes a group's activations [n, D] durably, by array name, unless the store has them. Raises StoreError."""
    for name, values in arrays.items():
        key, content = group.key(name), np.ascontiguousarray(values).tobytes()
        storage.put(key, content, _checksum(key, content))


def read_kept(storage: Storage, group: KeptGroup, array: str, dtype: np.dtype, shape: tuple[int, int]) -> np.ndarray:
    """Reads a group's activations of an array, [n, D] as in `shape`. Raises StoreError if they are missing, and
    StoreInvalid if they are damaged."""
    num_bytes = shape[0] * shape[1] * dtype.itemsize

    def check(key: str, content: bytes | None) -> np.ndarray:
        if content is None:  # perhaps because another run has just completed the store
            raise StoreError(f"{key} is missing. Run the same command again to rewrite it.")
        for what in _damage(key, content, num_bytes):
            raise StoreInvalid(f"{key} {what}. Delete it, and run the same command again.")
        return np.frombuffer(content[:num_bytes], dtype).reshape(shape)

    [values] = storage.read_checked([group.key(array)], check)
    return values


def check_kept(
    storage: Storage, group: KeptGroup, num_tokens: int, token_bytes: Mapping[str, int]
) -> Iterator[tuple[str, str]]:
    """The key of each damaged object of a group with `num_tokens` tokens, and what is wrong. Missing objects are valid.

    token_bytes: bytes of activations per token, by array name.
    """
    for array, size in token_bytes.items():
        key = group.key(array)
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
