"""The one way to storage: TensorStore's key-value store, on a local path, `gs://`, `s3://` or `memory://`.

Everything that can fail while reading or writing is turned into a StoreError here.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import tensorstore as ts

from pipeline.errors import StoreError, StoreInvalid

# One context for the process: all stores share the limits on concurrent requests, and `memory://` is one store.
CONTEXT = ts.Context()

# What TensorStore raises: ValueError for a failed operation or unreadable data, NotImplementedError (a RuntimeError)
# for a read-only driver, OSError from the file system.
TENSORSTORE_ERRORS = (ValueError, OSError, RuntimeError)

_NO_OBJECT = b"\2"  # the storage generation of an object that does not exist

_FULL_REMEDY = "Free space, then run the same command again; it resumes."
DAMAGE_REMEDY = "The object is damaged: run pipeline.verify, which lists all damage and says how to repair it."
_CAUSES = (  # a sign in the message, what is raised, the remedy; the first that is found counts
    ("read-only file system", StoreError, "Choose another store.path."),
    ("no space left", StoreError, f"The disk is full. {_FULL_REMEDY}"),
    ("disk quota exceeded", StoreError, f"The quota is used up. {_FULL_REMEDY}"),
    ("permission", StoreError, "Give this user the permission, or choose another store.path."),
    ("data_loss", StoreInvalid, DAMAGE_REMEDY),
    ("requested byte range", StoreInvalid, DAMAGE_REMEDY),
    ("not a directory", StoreInvalid, "A file stands in the way: choose another store.path."),
    ("unsupported url scheme", StoreInvalid, "Use a local path, gs:// or s3://."),
    (
        'failed_precondition: error opening "zarr3"',
        StoreInvalid,
        "The array was edited: delete its zarr.json, which the next run writes anew, or choose another store.path.",
    ),
)
_ANY_REMEDY = "What was committed before stays valid; once the cause is gone, run the same command again."


def open_kvstore(path: str | os.PathLike[str]) -> ts.KvStore:
    """The key-value store at `path`: a local path (`~` is the home directory) or a URL. Nothing is created or read.

    Raises StoreInvalid for a URL whose scheme TensorStore does not know.
    """
    path = os.fspath(path)
    if "://" in path:
        with store_errors(path):
            return ts.KvStore.open(path.rstrip("/") + "/", context=CONTEXT).result()
    spec = {"driver": "file", "path": os.path.abspath(os.path.expanduser(path)).rstrip("/") + "/"}
    return ts.KvStore.open(spec, context=CONTEXT).result()


def read_key(kvstore: ts.KvStore, key: str) -> bytes | None:
    """The object's bytes, or None where there is none. Raises StoreError."""
    return next(read_keys(kvstore, [key]))


def read_keys(kvstore: ts.KvStore, keys: list[str]) -> Iterator[bytes | None]:
    """The objects' bytes, None where there is none; all requests are under way at once. Raises StoreError."""
    futures = [kvstore.read(key) for key in keys]
    for key, future in zip(keys, futures, strict=True):
        with store_errors(kvstore.url + key):
            found = future.result()
        yield found.value if found.state == "value" else None


def write_key(kvstore: ts.KvStore, key: str, value: bytes | None) -> None:
    """Writes an object durably (None deletes it). Raises StoreError."""
    with store_errors(kvstore.url + key):
        kvstore.write(key, value).result()


def write_if_absent(kvstore: ts.KvStore, key: str, value: bytes) -> bool:
    """Writes an object unless there is one; says whether it did. Of several processes, one succeeds."""
    with store_errors(kvstore.url + key):
        return kvstore.write(key, value, if_equal=_NO_OBJECT).result().generation != b""


def list_keys(kvstore: ts.KvStore, prefix: str) -> list[str]:
    """The keys under `prefix` (not empty), sorted. Raises StoreError."""
    after = prefix[:-1] + chr(ord(prefix[-1]) + 1)
    with store_errors(kvstore.url + prefix):
        found = kvstore.list(ts.KvStore.KeyRange(prefix, after)).result()
    # Some servers of the GCS protocol ignore the range's end.
    return sorted(key for key in map(bytes.decode, found) if key.startswith(prefix))


@contextmanager
def store_errors(subject: str) -> Iterator[None]:
    """Turns what TensorStore raises into a StoreError that names `subject`, the cause and a remedy.

    It is a StoreInvalid where the cause is one that no retry heals.
    """
    try:
        yield
    except TENSORSTORE_ERRORS as error:
        text = str(error).partition(" [tensorstore_spec=")[0]
        causes = ((kind, remedy) for sign, kind, remedy in _CAUSES if sign in text.lower())
        kind, remedy = next(causes, (StoreError, _ANY_REMEDY))
        raise kind(f"{subject}: {text}. {remedy}") from error
