"""Activations that were captured while the model wrote, kept beside its groups until they are in blocks.

Of each group and array one object: the tokens of the group's documents, one document after the other, [n, D], little
endian, without a header. They are written before the group itself, and deleted when the store is complete.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import tensorstore as ts

from pipeline.errors import StoreInvalid
from pipeline.store.groups import GENERATED_PREFIX, group_key, stream_prefix
from pipeline.store.kvstore import list_keys, read_key, write_key

_SUFFIX = ".activations"


def kept_key(stream: int, index: int, array: str) -> str:
    """The object's key, relative to the store."""
    return f"{group_key(stream, index).removesuffix('.parquet')}.{array}{_SUFFIX}"


def first_without_kept(kvstore: ts.KvStore, stream: int, groups: range, arrays: Sequence[str]) -> int:
    """The first of a stream's `groups` whose activations are not there, or where they stop."""
    found = set(list_keys(kvstore, stream_prefix(stream)))
    lacking = (index for index in groups if not {kept_key(stream, index, array) for array in arrays} <= found)
    return next(lacking, groups.stop)


def write_kept(kvstore: ts.KvStore, stream: int, index: int, arrays: Mapping[str, np.ndarray]) -> None:
    for name, values in arrays.items():
        write_key(kvstore, kept_key(stream, index, name), np.ascontiguousarray(values).tobytes())


def read_kept(
    kvstore: ts.KvStore, stream: int, index: int, array: str, dtype: np.dtype, shape: tuple[int, int]
) -> np.ndarray:
    """[n, D], as `shape` says. Raises StoreInvalid where it is missing, or of another size."""
    key = kept_key(stream, index, array)
    content = read_key(kvstore, key)
    if content is None or len(content) != shape[0] * shape[1] * dtype.itemsize:
        raise StoreInvalid(f"{key} is missing or damaged. Delete it, and run the same command again.")
    return np.frombuffer(content, dtype).reshape(shape)


def delete_kept(kvstore: ts.KvStore) -> None:
    for key in list_keys(kvstore, GENERATED_PREFIX):
        if key.endswith(_SUFFIX):
            write_key(kvstore, key, None)
