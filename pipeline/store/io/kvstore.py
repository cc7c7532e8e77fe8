"""The one way to storage: TensorStore's key-value store, on a local path, `gs://`, `s3://` or `memory://`.

Everything that can fail while reading or writing is turned into a StoreError here.
"""

import itertools
import os
import re
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import tensorstore as ts

from pipeline.core.addresses import unusable_store_path
from pipeline.core.cores import num_cores
from pipeline.core.errors import ConfigError, StoreError, StoreInvalid
from pipeline.store.io.directories import is_linked, make_directories

# TensorStore reads these with its first request. By itself it waits for ever for a server that says nothing.
os.environ.setdefault("TENSORSTORE_CURL_CONNECT_TIMEOUT_SECONDS", "30")
os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS", "60")
os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES", "1")

_RETRIES = ("gcs_request_retries", "s3_request_retries")
_CONCURRENCY = ("gcs_request_concurrency", "s3_request_concurrency", "file_io_concurrency")

# How many small objects to have asked for. TensorStore has fewer requests under way; the rest wait inside it.
_KEYS_AHEAD = 256

# TensorStore raises ValueError, as do mistakes in a program. A failed operation's message begins with the name of a
# status, or, where that is INVALID_ARGUMENT, has one of these parts.
_FAILED_OPERATION = re.compile(
    r"^(CANCELLED|UNKNOWN|DEADLINE_EXCEEDED|NOT_FOUND|ALREADY_EXISTS|PERMISSION_DENIED|RESOURCE_EXHAUSTED"
    r"|FAILED_PRECONDITION|ABORTED|OUT_OF_RANGE|INTERNAL|UNAVAILABLE|DATA_LOSS|UNAUTHENTICATED): "
    r"|^Error (opening|reading|writing|deleting) |^Failed to .*os_error_code=|HTTP response code",
    re.DOTALL,
)

# How long to wait before each time that an object is read again which seems damaged or missing.
_REREAD_DELAYS_S = (0.05, 0.2, 0.8, 2.0)
_LOCAL_REREAD_DELAYS_S = (0.0,)

T = TypeVar("T")

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
    ("error reading shard", StoreInvalid, DAMAGE_REMEDY),
    ("propagated bounds", StoreInvalid, DAMAGE_REMEDY),  # rows beyond the array's shape
    ("not permitted", StoreError, _PERMISSION_REMEDY),
    ("not a directory", StoreInvalid, _FILE_REMEDY),
    ("file exists", StoreInvalid, _FILE_REMEDY),
    ("is a directory", StoreInvalid, "A folder stands in the way: choose another store.path."),
    ("file name too long", StoreInvalid, "Choose a shorter store.path."),
    ("too many levels of symbolic links", StoreInvalid, "Choose another store.path."),
    ('not_found: error opening "zarr3"', StoreInvalid, DAMAGE_REMEDY),
    (
        'failed_precondition: error opening "zarr3"',
        StoreInvalid,
        "The array was edited: delete its zarr.json, which the next run writes anew, or choose another store.path.",
    ),
)
_ANY_REMEDY = "What was committed before stays valid; once the cause is gone, run the same command again."


_NOT_FILES = {
    "folder": stat.S_ISDIR,
    "pipe": stat.S_ISFIFO,
    "socket": stat.S_ISSOCK,
    "device": lambda mode: stat.S_ISCHR(mode) or stat.S_ISBLK(mode),
}

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
    AWS_ENDPOINT_URL, and AWS_REGION or AWS_DEFAULT_REGION. Raises StoreInvalid for what is no place of a store: an
    empty path, `~` of nobody, a URL of another scheme, or without a bucket, or with credentials.
    """
    path = os.fspath(path)
    if reason := unusable_store_path(path):
        raise StoreInvalid(reason)
    if "://" in path:
        try:
            spec = ts.KvStore.Spec(path.rstrip("/") + "/").to_json()
        except ValueError as error:
            raise StoreInvalid(f"the store's path is {path!r}, which is no address of a store: {error}.") from error
        spec |= _s3_service() if path.startswith("s3://") else {}
    else:
        spec = {"driver": "file", "path": local_directory(path).rstrip("/") + "/"}
    resources = {} if own_requests is None else {name: {"limit": own_requests} for name in _CONCURRENCY}
    opening = ts.KvStore.open(spec, context=ts.Context(resources, parent=context()))
    with store_errors(path):
        return opening.result()


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
    """The object's bytes, or None where there is none. Raises StoreError; see `require_file`."""
    return next(read_keys(kvstore, [key]))


def read_keys(kvstore: ts.KvStore, keys: list[str]) -> Iterator[bytes | None]:
    """The objects' bytes, in order, None where there is none; many are asked for at once. Raises StoreError; see
    `require_file`."""
    reads: deque[tuple[str, ts.Future]] = deque()
    for key in keys:
        require_file(kvstore, key)
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
    """Of each object its bytes (None where there is none) and its generation, which each write changes. Raises
    StoreError; see `require_file`."""
    for key in keys:
        require_file(kvstore, key)
    reads = [kvstore.read(key) for key in keys]
    values = [_read_value(kvstore, key, read) for key, read in zip(keys, reads, strict=True)]
    return [(value, read.result().stamp.generation) for value, read in zip(values, reads, strict=True)]


def read_checked(kvstore: ts.KvStore, keys: Sequence[str], check: Callable[[str, bytes | None], T]) -> Iterator[T]:
    """`check(key, content)` of each object, in order. The content is None where there is no object; `check` decides
    whether that is wrong. An object that it refuses with StoreInvalid is read again, a few times; then it is raised.
    """
    for key, content in zip(keys, read_keys(kvstore, list(keys)), strict=True):
        yield _checked(kvstore, key, content, check)


def _checked(kvstore: ts.KvStore, key: str, content: bytes | None, check: Callable[[str, bytes | None], T]) -> T:
    contents = itertools.chain([content], (read_key(kvstore, key) for _ in itertools.count()))
    return repeated(kvstore, lambda: check(key, next(contents)))


def repeated(kvstore: ts.KvStore, read: Callable[[], T]) -> T:
    """What `read` returns. While it finds something damaged or missing (StoreInvalid), it is called again, a few times:
    a service may answer with half an object, or with none, and be right the next time.
    """
    delays_s = None
    while True:
        try:
            return read()
        except StoreInvalid:
            delays_s = delays_s or iter(_REREAD_DELAYS_S if is_remote(kvstore) else _LOCAL_REREAD_DELAYS_S)
            if (delay_s := next(delays_s, None)) is None:
                raise
            time.sleep(delay_s)


def is_remote(kvstore: ts.KvStore) -> bool:
    return kvstore.spec().to_json()["driver"] not in ("file", "memory")


def directory_of(kvstore: ts.KvStore) -> str | None:
    """The local directory that a key-value store is in; None for other kinds of storage."""
    spec = kvstore.spec().to_json()
    return spec["path"] if spec["driver"] == "file" else None


def require_no_links(kvstore: ts.KvStore, keys: Sequence[str]) -> None:
    """Raises StoreInvalid where an object of a local store is a symbolic link, or in a directory that is one: what is
    there need not be the store's."""
    if (root := directory_of(kvstore)) is None:
        return
    for key in keys:
        if is_linked(root + key, root):
            raise StoreInvalid(f"{root}{key} is a symbolic link, or in one: it is not the store's. Remove the link.")


def not_a_file(kvstore: ts.KvStore, key: str) -> str | None:
    """What is wrong where something else than a file is at a key of a local store; None where nothing is there."""
    if (root := directory_of(kvstore)) is None:
        return None
    try:
        mode = os.stat(root + key).st_mode
    except FileNotFoundError:
        return "is a symbolic link that leads nowhere, expected a file" if os.path.islink(root + key) else None
    except OSError:  # reading it says why
        return None
    found = next((name for name, is_kind in _NOT_FILES.items() if is_kind(mode)), None)
    return found and f"is a {found}, expected a file"


def require_file(kvstore: ts.KvStore, key: str) -> None:
    """Raises StoreInvalid where something else than a file is at a key of a local store. TensorStore takes a folder, a
    socket and a link that leads nowhere for an object that is absent, and waits for a pipe for ever."""
    if what := not_a_file(kvstore, key):
        raise StoreInvalid(f"{object_url(kvstore, key)} {what}. {DAMAGE_REMEDY}")


def start_write(kvstore: ts.KvStore, key: str, value: bytes | None, if_equal: bytes | None = None) -> ts.Future:
    """Starts writing an object (None deletes it). The directories of a local one are made first, and durable:
    TensorStore syncs the file, and of its directories only the last. Raises StoreError."""
    if value is not None and (root := directory_of(kvstore)) is not None:
        with store_errors(object_url(kvstore, key)):
            make_directories(os.path.dirname(root + key), root)
    return kvstore.write(key, value, if_equal=if_equal)


def write_key(kvstore: ts.KvStore, key: str, value: bytes | None) -> None:
    """Writes an object durably (None deletes it). Raises StoreError."""
    write = start_write(kvstore, key, value)
    with store_errors(object_url(kvstore, key)):
        write.result()


def write_if_absent(kvstore: ts.KvStore, key: str, value: bytes) -> bool:
    """Writes an object unless there is one; says whether it did. Of several processes, one succeeds."""
    return write_if_unchanged(kvstore, key, value, _NO_OBJECT) is not None


def write_if_unchanged(kvstore: ts.KvStore, key: str, value: bytes | None, generation: bytes) -> bytes | None:
    """Writes an object (None deletes it) if it still has this generation; returns the new one, or None.

    S3 has no conditional deletion: TensorStore looks just before. Raises StoreError.
    """
    write = start_write(kvstore, key, value, generation)
    with store_errors(object_url(kvstore, key)):
        return write.result().generation or None


def list_keys(kvstore: ts.KvStore, prefix: str) -> list[str]:
    """The keys under `prefix` (not empty), sorted. Raises StoreError."""
    after = prefix[:-1] + chr(ord(prefix[-1]) + 1)
    with store_errors(object_url(kvstore, prefix)):
        found = kvstore.list(ts.KvStore.KeyRange(prefix, after)).result()
    # Some servers of the GCS protocol ignore the range's end.
    return sorted(key for key in map(bytes.decode, found) if key.startswith(prefix))


@contextmanager
def store_errors(subject: str) -> Iterator[None]:
    """Turns a failed operation of TensorStore, or of the file system, into a StoreError that names `subject`, the cause
    and a remedy. It is a StoreInvalid where the cause is one that no retry heals.

    Put it around waiting for the operation, and nothing else: what is wrong with the program is raised as it is.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        text = str(error).partition(" [tensorstore_spec=")[0]
        if isinstance(error, ValueError) and not _FAILED_OPERATION.search(text):
            raise
        causes = ((kind, remedy) for sign, kind, remedy in _CAUSES if sign in text.lower())
        kind, remedy = next(causes, (StoreError, _ANY_REMEDY))
        raise kind(f"{subject}: {text}. {remedy}") from error
