"""The one way to storage: TensorStore's key-value store, on a local path, `gs://`, `s3://` or `memory://`.

Everything that can fail while reading or writing is turned into a StoreError here.
"""

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import tensorstore as ts

from pipeline.allocator import num_cores
from pipeline.errors import ConfigError, StoreError, StoreInvalid

# TensorStore reads these with its first request. By itself it waits for ever for a server that says nothing.
os.environ.setdefault("TENSORSTORE_CURL_CONNECT_TIMEOUT_SECONDS", "30")
os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS", "60")
os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES", "1")

_RETRIES = ("gcs_request_retries", "s3_request_retries")
_CONCURRENCY = ("gcs_request_concurrency", "s3_request_concurrency", "file_io_concurrency")

# How many small objects to have asked for. TensorStore has fewer requests under way; the rest wait inside it.
_KEYS_AHEAD = 256

# What TensorStore raises: ValueError for a failed operation or unreadable data, NotImplementedError (a RuntimeError)
# for a read-only driver, OSError from the file system.
TENSORSTORE_ERRORS = (ValueError, OSError, RuntimeError)

_NO_OBJECT = b"\2"  # the storage generation of an object that does not exist

_PERMISSION_REMEDY = "Give this user the permission, or choose another store.path."
_FILE_REMEDY = "A file stands in the way: choose another store.path."
_FULL_REMEDY = "Free space, then run the same command again; it resumes."
DAMAGE_REMEDY = "The object is damaged: run pipeline.verify, which lists all damage and says how to repair it."
_CAUSES = (  # a sign in the message, what is raised, the remedy; the first that is found counts
    ("read-only file system", StoreError, "Choose another store.path."),
    ("no space left", StoreError, f"The disk is full. {_FULL_REMEDY}"),
    ("disk quota exceeded", StoreError, f"The quota is used up. {_FULL_REMEDY}"),
    ("permission", StoreError, _PERMISSION_REMEDY),
    ("data_loss", StoreInvalid, DAMAGE_REMEDY),
    ("requested byte range", StoreInvalid, DAMAGE_REMEDY),
    ("not permitted", StoreError, _PERMISSION_REMEDY),
    ("not a directory", StoreInvalid, _FILE_REMEDY),
    ("file exists", StoreInvalid, _FILE_REMEDY),
    ("unsupported url scheme", StoreInvalid, "Use a local path, gs:// or s3://."),
    (
        'failed_precondition: error opening "zarr3"',
        StoreInvalid,
        "The array was edited: delete its zarr.json, which the next run writes anew, or choose another store.path.",
    ),
)
_ANY_REMEDY = "What was committed before stays valid; once the cause is gone, run the same command again."


# All stores of the process share the limits on concurrent requests, and `memory://` is one store.
_process = ts.Context()


def configure_storage(
    retries: int = 16, retry_delay_s: float = 1.0, concurrency: int | None = None, copy_threads: int | None = None
) -> None:
    """Sets how the stores that this process opens from now on treat storage.

    A request that fails is sent again up to `retries` times: after `retry_delay_s` seconds, then after twice as long
    each time, at most 32 times as long. `concurrency`: requests (of local paths: files) under way at once; None: 32, or
    as many files as there are cores and at least 4. `copy_threads`: threads that encode and decode; None: the cores.
    Local store shards without compression are encoded by the threads that write them.
    Raises ConfigError for a value that is out of range.
    """
    global _context, _file_threads
    delays = {"initial_delay": f"{retry_delay_s}s", "max_delay": f"{32 * retry_delay_s}s"}
    spec: dict[str, Any] = {name: {"max_retries": retries, **delays} for name in _RETRIES}
    if concurrency is not None:
        spec |= {name: {"limit": concurrency} for name in _CONCURRENCY}
    if copy_threads is not None:
        spec["data_copy_concurrency"] = {"limit": copy_threads}
    try:
        if retry_delay_s < 0:
            raise ValueError(f"a delay of {retry_delay_s} s is less than none")
        _context = ts.Context(spec, parent=_process)
        _file_threads = ThreadPoolExecutor(concurrency or max(4, num_cores()), "shard-files")
    except ValueError as error:
        raise ConfigError(f"store.retries, retry_delay_s, concurrency or copy_threads: {error}.") from error


configure_storage()


def context() -> ts.Context:
    """The context in which this process opens key-value stores and arrays."""
    return _context


def file_threads() -> Executor:
    """The threads that write this process's local store shards; as many as `concurrency`."""
    return _file_threads


def local_directory(path: str) -> str:
    """The absolute path of a local store; `~` is the home directory."""
    return os.path.abspath(os.path.expanduser(path))


def open_kvstore(path: str | os.PathLike[str], own_requests: int | None = None) -> ts.KvStore:
    """The key-value store at `path`: a local path (`~` is the home directory) or a URL. Nothing is created or read.

    With `own_requests`, so many requests may be under way besides those of all others, instead of in a row with them.

    `s3://` is Amazon's unless the environment names another service, as for Amazon's own tools: AWS_ENDPOINT_URL_S3 or
    AWS_ENDPOINT_URL, and AWS_REGION or AWS_DEFAULT_REGION. Raises StoreInvalid for a URL whose scheme TensorStore does
    not know.
    """
    path = os.fspath(path)
    with store_errors(path):
        if "://" in path:
            spec = ts.KvStore.Spec(path.rstrip("/") + "/").to_json() | (
                _s3_service() if path.startswith("s3://") else {}
            )
        else:
            spec = {"driver": "file", "path": local_directory(path).rstrip("/") + "/"}
        resources = {} if own_requests is None else {name: {"limit": own_requests} for name in _CONCURRENCY}
        return ts.KvStore.open(spec, context=ts.Context(resources, parent=context())).result()


def _s3_service() -> dict[str, str]:
    """What of a key-value store's spec leads to another service than Amazon's."""
    names = {
        "endpoint": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
        "aws_region": ("AWS_REGION", "AWS_DEFAULT_REGION"),
    }
    found = {key: next(filter(None, map(os.environ.get, variables)), None) for key, variables in names.items()}
    return {key: value for key, value in found.items() if value} if found["endpoint"] else {}


def object_url(kvstore: ts.KvStore, key: str) -> str:
    """Where an object lies, for messages."""
    spec = kvstore.spec().to_json()
    if spec["driver"] == "s3":  # TensorStore gives no URL where there is an endpoint
        return f"s3://{spec['bucket']}/{spec.get('path', '')}{key}"
    return kvstore.url + key


def read_key(kvstore: ts.KvStore, key: str) -> bytes | None:
    """The object's bytes, or None where there is none. Raises StoreError."""
    return next(read_keys(kvstore, [key]))


def read_keys(kvstore: ts.KvStore, keys: list[str]) -> Iterator[bytes | None]:
    """The objects' bytes, in order, None where there is none; many are asked for at once. Raises StoreError."""
    reads: deque[tuple[str, ts.Future]] = deque()
    for key in keys:
        reads.append((key, kvstore.read(key)))
        if len(reads) > _KEYS_AHEAD:
            yield _read_value(kvstore, *reads.popleft())
    while reads:
        yield _read_value(kvstore, *reads.popleft())


def _read_value(kvstore: ts.KvStore, key: str, read: ts.Future) -> bytes | None:
    with store_errors(object_url(kvstore, key)):
        found = read.result()
    return found.value if found.state == "value" else None


def read_with_generations(kvstore: ts.KvStore, keys: list[str]) -> list[tuple[bytes | None, bytes]]:
    """Of each object its bytes (None where there is none) and its generation, which each write changes."""
    reads = [kvstore.read(key) for key in keys]
    values = [_read_value(kvstore, key, read) for key, read in zip(keys, reads, strict=True)]
    return [(value, read.result().stamp.generation) for value, read in zip(values, reads, strict=True)]


def write_key(kvstore: ts.KvStore, key: str, value: bytes | None) -> None:
    """Writes an object durably (None deletes it). Raises StoreError."""
    with store_errors(object_url(kvstore, key)):
        kvstore.write(key, value).result()


def write_if_absent(kvstore: ts.KvStore, key: str, value: bytes) -> bool:
    """Writes an object unless there is one; says whether it did. Of several processes, one succeeds."""
    return write_if_unchanged(kvstore, key, value, _NO_OBJECT) is not None


def write_if_unchanged(kvstore: ts.KvStore, key: str, value: bytes | None, generation: bytes) -> bytes | None:
    """Writes an object (None deletes it) if it still has this generation; returns the new one, or None.

    S3 has no conditional deletion: TensorStore looks just before. Raises StoreError.
    """
    with store_errors(object_url(kvstore, key)):
        return kvstore.write(key, value, if_equal=generation).result().generation or None


def list_keys(kvstore: ts.KvStore, prefix: str) -> list[str]:
    """The keys under `prefix` (not empty), sorted. Raises StoreError."""
    after = prefix[:-1] + chr(ord(prefix[-1]) + 1)
    with store_errors(object_url(kvstore, prefix)):
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
