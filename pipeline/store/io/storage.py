"""All access to storage: objects at a local path, `gs://`, `s3://` or `memory://`, through TensorStore, and (read-only)
in a dataset repository of the Hugging Face Hub, `hf://`.

Every failure to read or write is raised as a StoreError.
"""

import errno
import itertools
import os
import random
import secrets
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import tensorstore as ts

from pipeline.core.addresses import HUB_SCHEME, unusable_store_path
from pipeline.core.arguments import require_not_forked
from pipeline.core.cores import num_cores
from pipeline.core.errors import ConfigError, StoreInvalid
from pipeline.store.io.directories import make_directories, sync_directory
from pipeline.store.io.failures import DAMAGE_REMEDY, storage_errors

if TYPE_CHECKING:
    from pipeline.store.io.hub_files import HubFiles

# TensorStore reads these at its first request. Without them it waits forever for a server that does not answer.
_TIMEOUTS = {
    "TENSORSTORE_CURL_CONNECT_TIMEOUT_SECONDS": "30",
    "TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": "60",
    "TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES": "1",
}

_RETRIES = ("gcs_request_retries", "s3_request_retries", "http_request_retries")
_MAX_DELAY = 8  # times the first delay: a process writes again about 10 s after an outage
_DELAY_FACTORS = (0.75, 1.25)  # the fifth attempts of many processes are spread over 8 s, the seventh ones over 16 s
_RATE_LIMITER = "experimental_gcs_rate_limiter"
_WRITE_RATE_DOUBLES_AFTER = "20m"  # as the limit of a bucket does; https://cloud.google.com/storage/docs/request-rate
_NUM_REQUESTS = 32  # TensorStore's default number of concurrent requests
_HTTP_THREADS = (4, _NUM_REQUESTS)  # from TensorStore's default
_CONCURRENCY = ("gcs_request_concurrency", "s3_request_concurrency", "file_io_concurrency", "http_request_concurrency")

# How many reads or writes of small objects to start ahead. TensorStore queues those beyond its concurrency.
_KEYS_AHEAD = 256

# Delays before an object that seems damaged or missing is read again.
_REREAD_DELAYS_S = (0.05, 0.2, 0.8, 2.0)
_SETTLED_REREAD_DELAYS_S = (0.0,)

T = TypeVar("T")
Buffer = bytes | memoryview

NO_OBJECT = b"\2"  # the storage generation of an object that does not exist

_REUSED_BYTES = 1 << 20  # contents from this size on are joined in memory that is kept: new memory costs page faults
LOCK_SUFFIX = ".__lock"  # of temporary local files, which TensorStore's listings omit; a killed process leaves them
_NO_HARD_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)

# Of local objects that are read whole, so that a sparse file does not fill the memory.
_MAX_BYTES = {".json": 1 << 27, ".parquet": 1 << 31, ".csc": 1 << 31}

_NOT_FILES = {
    "folder": stat.S_ISDIR,
    "pipe": stat.S_ISFIFO,
    "socket": stat.S_ISSOCK,
    "device": lambda mode: stat.S_ISCHR(mode) or stat.S_ISBLK(mode),
}


class KeyValueStore:
    """Objects by key. Methods raise StoreError if the storage fails.

    directory: the local directory of the objects, with a trailing slash; None for other kinds of storage.
    is_remote: whether requests go through a network, so that one may fail or get a wrong answer.
    """

    def __init__(self, kvstore: "ts.KvStore | HubFiles") -> None:
        self.kvstore = kvstore
        self._spec = kvstore.spec().to_json() if isinstance(kvstore, ts.KvStore) else {"driver": "hf"}
        self.directory: str | None = self._spec["path"] if self._spec["driver"] == "file" else None
        self.is_remote: bool = self._spec["driver"] not in ("file", "memory")
        self._joined, self._joining = bytearray(), threading.Lock()  # the content that is about to be sent

    def url(self, key: str) -> str:
        """The URL or path of an object, for messages."""
        if self._spec["driver"] == "s3":  # TensorStore has no URL for an S3 endpoint
            return f"s3://{self._spec['bucket']}/{self._spec.get('path', '')}{key}"
        return self.kvstore.url + key

    @contextmanager
    def errors(self, key: str) -> Iterator[None]:
        """`storage_errors` for an object."""
        with storage_errors(self.url(key)):
            yield

    def read(self, key: str) -> bytes | None:
        """The object's bytes; None if it does not exist. See `require_file`."""
        return next(self.read_many([key]))

    def read_many(self, keys: Sequence[str], ranges: Iterable[tuple[int, int]] | None = None) -> Iterator[bytes | None]:
        """The objects' bytes in order, None for one that does not exist; many are read concurrently. `ranges`: the
        bytes (start, stop) to read from each object. See `require_file`."""
        require_not_forked("TensorStore")
        reads: deque[tuple[str, ts.Future]] = deque()
        slices = itertools.repeat(None) if ranges is None else itertools.starmap(slice, ranges)
        for key, byte_range in zip(keys, slices, strict=False):
            self.require_file(key)
            reads.append((key, self.kvstore.read(key, byte_range=byte_range)))
            if len(reads) > _KEYS_AHEAD:
                yield self._value(*reads.popleft())
        while reads:
            yield self._value(*reads.popleft())

    def _value(self, key: str, read: ts.Future) -> bytes | None:
        with self.errors(key):
            result = read.result()
        return result.value if result.state == "value" else None

    def read_with_generations(self, keys: list[str]) -> list[tuple[bytes | None, bytes]]:
        """Each object's bytes (None if it does not exist) and its generation, which every write changes. See
        `require_file`."""
        for key in keys:
            self.require_file(key)
        reads = [self.kvstore.read(key) for key in keys]
        values = [self._value(key, read) for key, read in zip(keys, reads, strict=True)]
        return [(value, read.result().stamp.generation) for value, read in zip(values, reads, strict=True)]

    def read_checked(self, keys: Sequence[str], check: Callable[[str, bytes | None], T]) -> Iterator[T]:
        """The results of `check(key, content)` for each object, in order.

        The content is None if the object does not exist. If `check` raises StoreInvalid, the object is read again, a
        few times, before the error is raised.
        """
        for key, content in zip(keys, self.read_many(list(keys)), strict=True):
            yield self._checked(key, content, check)

    def _checked(self, key: str, content: bytes | None, check: Callable[[str, bytes | None], T]) -> T:
        contents = itertools.chain([content], (self.read(key) for _ in itertools.count()))
        return self.retry_read(lambda: check(key, next(contents)))

    def retry_read(self, read: Callable[[], T]) -> T:
        """Returns `read()`, calling it again, a few times, if it raises StoreInvalid.

        A storage service may return half an object, or report it as missing, and answer correctly the next time. If
        calls of `retry_read` are nested, only the innermost retries.
        """
        delays_s = None
        while True:
            try:
                return read()
            except StoreInvalid as error:
                if error.was_read_again:
                    raise
                delays_s = delays_s or iter(_REREAD_DELAYS_S if self.is_remote else _SETTLED_REREAD_DELAYS_S)
                if (delay_s := next(delays_s, None)) is None:
                    error.was_read_again = True
                    raise
                time.sleep(delay_s)

    def list_keys(self, prefix: str = "", start: str = "") -> list[str]:
        """The keys >= `start` that begin with `prefix`, sorted."""
        [keys] = self.list_ranges([(max(prefix, start), end_of_prefix(prefix))])
        return keys

    def list_ranges(self, ranges: Sequence[tuple[str, str]]) -> list[list[str]]:
        """The keys in each range (start, stop), sorted; an empty stop is the end. The ranges are listed
        concurrently."""
        listings = [self.kvstore.list(ts.KvStore.KeyRange(*key_range)) for key_range in ranges]
        listed = []
        for (first, after), listing in zip(ranges, listings, strict=True):
            with self.errors(first):
                names = [name.decode(errors="replace") for name in listing.result()]
            # Some servers with the GCS protocol ignore the range.
            listed.append(sorted(key for key in names if key >= first and (key < after or not after)))
        return listed

    def put(self, key: str, *parts: Buffer) -> bool:
        """Writes an object durably unless it exists. Returns whether this call wrote it: if several processes try, one
        succeeds. The content is the `parts`, in order.

        False does not mean that another process wrote it: an earlier attempt's answer may have been lost on the way.
        """
        self.require_file(key)
        with self.errors(key):
            return self._put_remote(key, parts) if self.directory is None else self._put_file(key, parts)

    def _put_remote(self, key: str, parts: Sequence[Buffer]) -> bool:
        num_bytes, offset = sum(map(len, parts)), 0
        if num_bytes < _REUSED_BYTES:
            return bool(self.kvstore.write(key, b"".join(parts), if_equal=NO_OBJECT).result().generation)
        with self._joining:  # TensorStore copies the content before `write` returns
            del self._joined[num_bytes:]
            self._joined.extend(bytes(num_bytes - len(self._joined)))
            with memoryview(self._joined) as joined:
                for part in parts:
                    joined[offset : offset + len(part)] = part
                    offset += len(part)
            write = self.kvstore.write(key, self._joined, if_equal=NO_OBJECT)
        return bool(write.result().generation)

    def _put_file(self, key: str, parts: Sequence[Buffer]) -> bool:
        path = self.directory + key
        directory = os.path.dirname(path)
        make_directories(directory, self.directory)
        is_new = not os.path.lexists(path) and _write_and_link(path, parts)
        # Also if another process wrote the file: a record that names it may be on the disk before that process ends.
        sync_directory(directory)
        return is_new

    def start_write(self, key: str, value: bytes | None, if_equal: bytes | None = None) -> ts.Future:
        """Starts writing an object (None deletes it). Raises StoreInvalid for a store on the Hub; see `require_file`.

        A local object's directories are first created durably: TensorStore only syncs the file and its last directory.
        """
        self.require_file(key)
        if value is not None and self.directory is not None:
            with self.errors(key):
                make_directories(os.path.dirname(self.directory + key), self.directory)
        return self.kvstore.write(key, value, if_equal=if_equal)

    def write(self, key: str, value: bytes | None) -> None:
        """Writes an object durably (None deletes it)."""
        write = self.start_write(key, value)
        with self.errors(key):
            write.result()

    def write_if_unchanged(self, key: str, value: bytes | None, generation: bytes) -> bytes | None:
        """Writes an object (None deletes it) if its generation is unchanged. Returns the new one; None if it changed.

        S3 has no conditional deletion: TensorStore compares the generation just before it deletes.
        """
        write = self.start_write(key, value, generation)
        with self.errors(key):
            return write.result().generation or None

    def file_problem(self, key: str) -> str | None:
        """What is wrong if there is something other than a file at a key of a local store, or if the file's content may
        come from elsewhere, through a symbolic link; None if there is nothing."""
        if self.directory is None:
            return None
        path = self.directory
        try:
            for part in key.split("/"):
                path = os.path.join(path, part)
                status = os.lstat(path)
                mode, size = status.st_mode, status.st_size
                if stat.S_ISLNK(mode):
                    return "is a symbolic link or in a linked directory, expected the store's own file"
        except OSError:  # absent, or reading the object will raise an error with the reason
            return None
        kind = next((name for name, is_kind in _NOT_FILES.items() if is_kind(mode)), None)
        most = _MAX_BYTES.get(os.path.splitext(key)[1], size)
        if kind is None and size > most:
            return f"has {size:,} bytes, expected at most {most:,}"
        return kind and f"is a {kind}, expected a file"

    def require_file(self, key: str) -> None:
        """Raises StoreInvalid if there is something other than the store's own file at a key of a local store.
        TensorStore treats a folder, a socket or a broken link as an absent object, follows other links, and waits
        forever for a pipe."""
        if problem := self.file_problem(key):
            raise StoreInvalid(f"{self.url(key)} {problem}. {DAMAGE_REMEDY}")


@dataclass(frozen=True)
class StorageOptions:
    """How a process uses storage.

    retries: how often a failed request is sent again.
    retry_delay_s: seconds before the first retry. The delay doubles with each retry, up to 8 times the first. Each
    context multiplies its delays by a random factor: TensorStore adds no jitter to the maximum delay, so processes
    refused at the same time would keep retrying at the same time.
    concurrency: the maximum number of concurrent requests, or files at local paths. None: 32 requests, or as many files
    as cores, at least 4.
    copy_threads: threads with which TensorStore decodes chunks; None: as many as cores. Store shards are encoded by the
    threads that write them.
    writes_per_s: the rate of this process's writes and deletions to `gs://`, which doubles every 20 minutes. Retries do
    not count. Up to 2,000 unused writes are carried over. None: no limit.
    """

    retries: int = 60
    retry_delay_s: float = 1.0
    concurrency: int | None = None
    copy_threads: int | None = None
    writes_per_s: float | None = None

    def context(self) -> ts.Context:
        """TensorStore's context with these options. Raises ConfigError for a value that is out of range."""
        delay_s = self.retry_delay_s * random.uniform(*_DELAY_FACTORS)
        delays = {"initial_delay": f"{delay_s:.9f}s", "max_delay": f"{_MAX_DELAY * delay_s:.9f}s"}
        spec: dict[str, Any] = {name: {"max_retries": self.retries, **delays} for name in _RETRIES}
        if self.concurrency is not None:
            spec |= {name: {"limit": self.concurrency} for name in _CONCURRENCY}
        if self.copy_threads is not None:
            spec["data_copy_concurrency"] = {"limit": self.copy_threads}
        if self.writes_per_s is not None:
            spec[_RATE_LIMITER] = {"write_rate": self.writes_per_s, "doubling_time": _WRITE_RATE_DOUBLES_AFTER}
        try:
            if self.retry_delay_s < 0:
                raise ValueError(f"expected a retry delay of at least 0 s, got {self.retry_delay_s}")
            if self.writes_per_s is not None and not self.writes_per_s > 0:  # TensorStore would abort the process
                raise ValueError(f"expected more than 0 writes per second, got {self.writes_per_s}")
            return ts.Context(spec, parent=_process_context())
        except ValueError as error:
            options = "store.retries, retry_delay_s, concurrency, copy_threads or ramp_up"
            raise ConfigError(f"{options}: {error}.") from error


DEFAULT_OPTIONS = StorageOptions()


class Storage(KeyValueStore):
    """The storage of one activation store, and the resources that its requests share. Use `Storage.open`.

    path: as given, or with the commit for the Hub. context: the TensorStore context for opening the store's arrays.
    """

    def __init__(
        self, path: str, kvstore: "ts.KvStore | HubFiles", context: ts.Context, options: StorageOptions
    ) -> None:
        super().__init__(kvstore)
        self.path = path
        self.context = context
        self._options = options

    @classmethod
    def open(cls, address: "StorageLike", options: StorageOptions = DEFAULT_OPTIONS) -> "Storage":
        """Opens a local path (`~` is the home directory) or a URL; returns a Storage unchanged. Does not create or read
        any object.

        `hf://datasets/owner/name[@revision]` is resolved to a commit, which becomes part of `path`. `s3://` is Amazon's
        service unless the environment names a different one, as for Amazon's own tools: AWS_ENDPOINT_URL_S3 or
        AWS_ENDPOINT_URL, and AWS_REGION or AWS_DEFAULT_REGION.

        Raises StoreInvalid for an unusable path (empty, `~` of an unknown user, a URL with an unknown scheme, without
        a bucket or with credentials) and if the Hub refuses access; ConfigError for options that are out of range;
        HubUnavailable; StoreError.
        """
        if isinstance(address, Storage):
            return address
        return cls._open(os.fspath(address), options.context(), options)

    @classmethod
    def _open(cls, path: str, context: ts.Context, options: StorageOptions) -> "Storage":
        require_not_forked("TensorStore")
        if path.startswith(HUB_SCHEME):
            from pipeline.store.io.hub_files import open_hub_files  # imports huggingface_hub

            files = open_hub_files(path, options.concurrency)
            return cls(files.url.rstrip("/"), files, context, options)
        spec = _kvstore_spec(path)
        if options.writes_per_s is not None:
            spec |= {_RATE_LIMITER: _RATE_LIMITER}
        set_request_defaults()
        opening = ts.KvStore.open(spec, context=context)
        with storage_errors(path):
            return cls(path, opening.result(), context, options)

    def with_own_requests(self, limit: int) -> "Storage":
        """The same storage with its own limit of concurrent requests, so that they do not queue behind others."""
        context = ts.Context({name: {"limit": limit} for name in _CONCURRENCY}, parent=self.context)
        return self._open(self.path, context, replace(self._options, concurrency=limit))

    def folder_spec(self, name: str) -> dict[str, Any]:
        """TensorStore's spec of the folder `name`, to be opened in `context` or a child context.

        TensorStore applies the rate limit only if the spec contains it, and omits it from specs that it returns.
        """
        limit = {} if self._options.writes_per_s is None else {_RATE_LIMITER: _RATE_LIMITER}
        return (self.kvstore / name / "").spec().to_json() | limit

    def start_put(self, key: str, parts: Sequence[Buffer]) -> Future[bool]:
        """Starts `put`. The parts are not copied: do not change them until the future is done."""
        return self.put_threads.submit(self.put, key, *parts)

    @cached_property
    def put_threads(self) -> Executor:
        """The threads that encode and put objects, as many as `concurrency`."""
        default = _NUM_REQUESTS if self.directory is None else max(4, num_cores())
        return ThreadPoolExecutor(self._options.concurrency or default, "puts")


StorageLike = Storage | str | os.PathLike[str]


def end_of_prefix(prefix: str) -> str:
    """The first string after all those with this prefix; the empty string for the empty prefix."""
    return prefix and prefix[:-1] + chr(ord(prefix[-1]) + 1)


def write_many(storage: KeyValueStore, contents: Iterable[tuple[str, bytes | None]]) -> None:
    """Writes objects durably and concurrently (content None deletes one). Raises StoreError."""
    writes: deque[tuple[str, ts.Future]] = deque()

    def wait() -> None:
        key, write = writes.popleft()
        with storage.errors(key):
            write.result()

    for key, content in contents:
        writes.append((key, storage.start_write(key, content)))
        if len(writes) > _KEYS_AHEAD:
            wait()
    while writes:
        wait()


def _write_and_link(path: str, parts: Sequence[Buffer]) -> bool:
    """Writes a file unless it exists, all of it or nothing, and returns whether it did. The caller syncs the
    directory."""
    temporary = f"{path}.{secrets.token_hex(4)}{LOCK_SUFFIX}"
    try:
        with open(temporary, "xb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_HARD_LINKS:
                raise
            raise StoreInvalid(
                f"{path} cannot be written: its file system has no hard links ({error}). Choose a store.path on "
                "another file system; give a mounted bucket by its URL."
            ) from error
        return True
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary)


def set_request_defaults() -> None:
    """Sets TensorStore's timeouts for servers that do not answer, and as many HTTP threads as cores, 4 to 32. Does not
    override variables that the environment already has.

    These threads encrypt and copy all data, so TensorStore's default of 4 is too few for a host with a hundred cores.
    On two cores, 4, 16 and 32 threads were equally fast; one was slower.
    """
    least, most = _HTTP_THREADS
    threads = {"TENSORSTORE_HTTP_THREADS": str(max(least, min(num_cores(), most)))}
    for name, value in (_TIMEOUTS | threads).items():
        os.environ.setdefault(name, value)


@cache
def _process_context() -> ts.Context:
    """The context of all stores in the process: they share limits on concurrent requests, and `memory://`."""
    return ts.Context()


def local_directory(path: str) -> str:
    """The absolute path of a local store; `~` is the home directory."""
    return os.path.abspath(os.path.expanduser(path))


def _kvstore_spec(path: str) -> dict[str, Any]:
    """TensorStore's spec of the storage at `path`. Raises StoreInvalid for an unusable path."""
    if reason := unusable_store_path(path):
        raise StoreInvalid(reason)
    if "://" not in path:
        return {"driver": "file", "path": local_directory(path).rstrip("/") + "/"}
    try:
        spec = ts.KvStore.Spec(path.rstrip("/") + "/").to_json()
    except ValueError as error:
        raise StoreInvalid(f"the store's path is {path!r}, which is not a store address: {error}.") from error
    return spec | (_s3_service() if path.startswith("s3://") else {})


def _s3_service() -> dict[str, str]:
    """The part of a key-value store's spec for an S3 service other than Amazon's; {} for Amazon's."""
    variables = {
        "endpoint": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
        "aws_region": ("AWS_REGION", "AWS_DEFAULT_REGION"),
    }
    values = {key: next(filter(None, map(os.environ.get, names)), None) for key, names in variables.items()}
    return {key: value for key, value in values.items() if value} if values["endpoint"] else {}
