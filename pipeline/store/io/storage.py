"""The one way to storage: objects on a local path, `gs://`, `s3://` or `memory://`, through TensorStore; and, to be
read only, in a data set repository of the Hugging Face Hub, `hf://`.

Whatever can fail while reading or writing is raised as a StoreError.
"""

import itertools
import os
import random
import stat
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import tensorstore as ts

from pipeline.core.addresses import HUB_REMEDY, HUB_SCHEME, unusable_store_path
from pipeline.core.cores import num_cores
from pipeline.core.errors import ConfigError, StoreError, StoreInvalid
from pipeline.store.io.directories import make_directories
from pipeline.store.io.failures import DAMAGE_REMEDY, HUB_REFUSAL, storage_errors

if TYPE_CHECKING:
    from pipeline.store.io.hub_relay import HubRelay

# TensorStore reads these with its first request. Without them it waits for ever for a server that does not answer.
_TIMEOUTS = {
    "TENSORSTORE_CURL_CONNECT_TIMEOUT_SECONDS": "30",
    "TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": "60",
    "TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES": "1",
}

_RETRIES = ("gcs_request_retries", "s3_request_retries", "http_request_retries")
_MAX_DELAY = 8  # times the first: after an outage a process writes again within some 10 s
_DELAY_FACTORS = (0.75, 1.25)  # the fifth attempts of many processes are spread over 8 s, the seventh ones over 16 s
_RATE_LIMITER = "experimental_gcs_rate_limiter"
_WRITE_RATE_DOUBLES_AFTER = "20m"  # as a bucket's; https://cloud.google.com/storage/docs/request-rate
_HTTP_THREADS = (4, 32)  # TensorStore's default; as many as it has requests under way by default
_CONCURRENCY = ("gcs_request_concurrency", "s3_request_concurrency", "file_io_concurrency", "http_request_concurrency")

# Reads and writes of small objects to start ahead. TensorStore has fewer requests under way; the rest wait inside it.
_KEYS_AHEAD = 256

# Seconds to wait before each new read of an object that seems damaged or missing.
_REREAD_DELAYS_S = (0.05, 0.2, 0.8, 2.0)
_SETTLED_REREAD_DELAYS_S = (0.0,)

T = TypeVar("T")

NO_OBJECT = b"\2"  # the storage generation of an object that does not exist

_NOT_FILES = {
    "folder": stat.S_ISDIR,
    "pipe": stat.S_ISFIFO,
    "socket": stat.S_ISSOCK,
    "device": lambda mode: stat.S_ISCHR(mode) or stat.S_ISBLK(mode),
}


class KeyValueStore:
    """Objects by key. Methods raise StoreError where the storage fails.

    `directory`: the local directory that the objects are in, with a slash at its end; None for other kinds of storage.
    `is_remote`: whether the objects are behind a network, where a request may fail or be answered wrongly.
    """

    def __init__(self, kvstore: ts.KvStore) -> None:
        self.kvstore = kvstore
        self._spec = kvstore.spec().to_json()
        self.directory: str | None = self._spec["path"] if self._spec["driver"] == "file" else None
        self.is_remote: bool = self._spec["driver"] not in ("file", "memory")
        self._hub, self._prefix = None, ""  # of the keys
        if self._spec["driver"] == "http":
            self._hub, self._prefix = _hub_relay().find(self._spec["path"])

    def url(self, key: str) -> str:
        """The URL or path of an object, for messages."""
        if self._hub is not None:
            return f"{self._hub.url}/{self._prefix}{key}"
        if self._spec["driver"] == "s3":  # TensorStore gives no URL where there is an endpoint
            return f"s3://{self._spec['bucket']}/{self._spec.get('path', '')}{key}"
        return self.kvstore.url + key

    @contextmanager
    def errors(self, key: str) -> Iterator[None]:
        """`storage_errors` of an object."""
        try:
            with storage_errors(self.url(key), *([] if self._hub is None else [HUB_REFUSAL])):
                yield
        except StoreError as error:
            if self._hub is None:
                raise
            raise type(error)(_hub_relay().named(str(error))) from error.__cause__

    def read(self, key: str) -> bytes | None:
        """The object's bytes, or None where there is none; see `require_file`."""
        return next(self.read_many([key]))

    def read_many(self, keys: Sequence[str], ranges: Iterable[tuple[int, int]] | None = None) -> Iterator[bytes | None]:
        """The objects' bytes, in order, None where there is none; many are asked for at once. `ranges`: of each object
        the bytes to read, from the first up to before the last. See `require_file`."""
        reads: deque[tuple[str, ts.Future]] = deque()
        slices = itertools.repeat(None) if ranges is None else itertools.starmap(slice, ranges)
        for key, wanted in zip(keys, slices, strict=False):
            self.require_file(key)
            reads.append((key, self.kvstore.read(key, byte_range=wanted)))
            if len(reads) > _KEYS_AHEAD:
                yield self._value(*reads.popleft())
        while reads:
            yield self._value(*reads.popleft())

    def _value(self, key: str, read: ts.Future) -> bytes | None:
        with self.errors(key):
            result = read.result()
        return result.value if result.state == "value" else None

    def read_with_generations(self, keys: list[str]) -> list[tuple[bytes | None, bytes]]:
        """Of each object its bytes (None where there is none) and its generation, which each write changes. See
        `require_file`."""
        for key in keys:
            self.require_file(key)
        reads = [self.kvstore.read(key) for key in keys]
        values = [self._value(key, read) for key, read in zip(keys, reads, strict=True)]
        return [(value, read.result().stamp.generation) for value, read in zip(values, reads, strict=True)]

    def read_checked(self, keys: Sequence[str], check: Callable[[str, bytes | None], T]) -> Iterator[T]:
        """`check(key, content)` of each object, in order. The content is None where there is no object; `check` decides
        whether that is wrong. An object that it refuses with StoreInvalid is read again, a few times; then it is
        raised.
        """
        for key, content in zip(keys, self.read_many(list(keys)), strict=True):
            yield self._checked(key, content, check)

    def _checked(self, key: str, content: bytes | None, check: Callable[[str, bytes | None], T]) -> T:
        contents = itertools.chain([content], (self.read(key) for _ in itertools.count()))
        return self.retry_read(lambda: check(key, next(contents)))

    def retry_read(self, read: Callable[[], T]) -> T:
        """What `read` returns. While it raises StoreInvalid, it is called again, a few times: a service may answer with
        half an object, or with none, and be right the next time. Within another such call only that one repeats.
        """
        delays_s = None
        while True:
            try:
                return read()
            except StoreInvalid as error:
                if error.was_read_again:
                    raise
                is_settled = not self.is_remote or self._hub is not None  # a commit does not change
                delays_s = delays_s or iter(_SETTLED_REREAD_DELAYS_S if is_settled else _REREAD_DELAYS_S)
                if (delay_s := next(delays_s, None)) is None:
                    error.was_read_again = True
                    raise
                time.sleep(delay_s)

    def list_keys(self, prefix: str = "", start: str = "") -> list[str]:
        """The keys that begin with `prefix` and are not before `start`, sorted."""
        first, after = max(prefix, start), prefix and prefix[:-1] + chr(ord(prefix[-1]) + 1)
        [keys] = self.list_ranges([(first, after)])
        return [key for key in keys if key.startswith(prefix)]

    def list_ranges(self, ranges: Sequence[tuple[str, str]]) -> list[list[str]]:
        """For each range the keys from its first to before its last (empty: to the end), sorted. All listings are under
        way at once."""
        if self._hub is not None:
            return [self._hub.list_range(self._prefix, first, after) for first, after in ranges]
        listings = [self.kvstore.list(ts.KvStore.KeyRange(*limits)) for limits in ranges]
        listed = []
        for (first, after), listing in zip(ranges, listings, strict=True):
            with self.errors(first):
                names = [name.decode(errors="replace") for name in listing.result()]
            # Some servers of the GCS protocol ignore the range.
            listed.append(sorted(key for key in names if key >= first and (key < after or not after)))
        return listed

    def start_write(self, key: str, value: bytes | None, if_equal: bytes | None = None) -> ts.Future:
        """Starts writing an object (None deletes it). The directories of a local one are made first, and durable:
        TensorStore syncs the file, and of its directories only the last. Raises StoreInvalid for a store on the Hub."""
        if self._hub is not None:
            raise StoreInvalid(f"{self._hub.url} is on the Hub, where a store is only read. {HUB_REMEDY}")
        if value is not None and self.directory is not None:
            with self.errors(key):
                make_directories(os.path.dirname(self.directory + key), self.directory)
        return self.kvstore.write(key, value, if_equal=if_equal)

    def write(self, key: str, value: bytes | None) -> None:
        """Writes an object durably (None deletes it)."""
        write = self.start_write(key, value)
        with self.errors(key):
            write.result()

    def write_if_absent(self, key: str, value: bytes) -> bool:
        """Writes an object unless there is one; says whether it did. Of several processes, one succeeds."""
        return self.write_if_unchanged(key, value, NO_OBJECT) is not None

    def write_if_unchanged(self, key: str, value: bytes | None, generation: bytes) -> bytes | None:
        """Writes an object (None deletes it) if it still has this generation; returns the new one, or None.

        S3 has no conditional deletion: TensorStore looks just before.
        """
        write = self.start_write(key, value, generation)
        with self.errors(key):
            return write.result().generation or None

    def file_problem(self, key: str) -> str | None:
        """What is wrong where a local store has something else than a file at a key; None where it has nothing."""
        if self.directory is None:
            return None
        path = self.directory + key
        try:
            mode = os.stat(path).st_mode
        except FileNotFoundError:
            return "is a symbolic link that leads nowhere, expected a file" if os.path.islink(path) else None
        except OSError:  # reading it says why
            return None
        kind = next((name for name, is_kind in _NOT_FILES.items() if is_kind(mode)), None)
        return kind and f"is a {kind}, expected a file"

    def require_file(self, key: str) -> None:
        """Raises StoreInvalid where a local store has something else than a file at a key. TensorStore takes a folder,
        a socket and a link that leads nowhere for an object that is absent, and waits for a pipe for ever."""
        if problem := self.file_problem(key):
            raise StoreInvalid(f"{self.url(key)} {problem}. {DAMAGE_REMEDY}")


@dataclass(frozen=True)
class StorageOptions:
    """How a process treats storage.

    retries: how often a request that fails is sent again. retry_delay_s: seconds before the first retry; the delay
    doubles with each retry, up to 8 times the first. TensorStore has no jitter at that limit, and processes that a
    server refused at the same time would return at the same time, again and again: so each context multiplies its
    delays by a random factor. concurrency: requests (of local paths: files) under way at once;
    None: 32, or as many files as there are cores and at least 4. copy_threads: threads that encode and decode chunks;
    None: the cores. Local store shards without compression are encoded by the threads that write them.
    writes_per_s: writes and deletions of this process to `gs://` that are begun per second at first, twice as many
    after every 20 minutes; repetitions are not held back. What a second leaves unused may follow later, up to 2,000.
    None: no limit.
    """

    retries: int = 60
    retry_delay_s: float = 1.0
    concurrency: int | None = None
    copy_threads: int | None = None
    writes_per_s: float | None = None

    def context(self) -> ts.Context:
        """Raises ConfigError for a value that is out of range."""
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
                raise ValueError(f"a delay of {self.retry_delay_s} s is less than none")
            if self.writes_per_s is not None and not self.writes_per_s > 0:  # TensorStore would end the process
                raise ValueError(f"{self.writes_per_s} writes per second are no rate")
            return ts.Context(spec, parent=_process_context())
        except ValueError as error:
            options = "store.retries, retry_delay_s, concurrency, copy_threads or ramp_up"
            raise ConfigError(f"{options}: {error}.") from error


DEFAULT_OPTIONS = StorageOptions()


class Storage(KeyValueStore):
    """The storage of one activation store, and the resources that its requests share. Use `Storage.open`.

    path: as it was given; of the Hub, with the commit. context: TensorStore's, in which the store's arrays are opened.
    """

    def __init__(self, path: str, kvstore: ts.KvStore, context: ts.Context, options: StorageOptions) -> None:
        super().__init__(kvstore)
        self.path = path if self._hub is None else self._hub.url
        self.context = context
        self._options = options

    @classmethod
    def open(cls, place: "StorageLike", options: StorageOptions = DEFAULT_OPTIONS) -> "Storage":
        """The storage at a local path (`~` is the home directory) or a URL. Nothing is created or read. A Storage is
        returned as it is.

        `hf://datasets/owner/name` is at the commit that its revision names now, which is then part of `path`.

        `s3://` is Amazon's unless the environment names another service, as for Amazon's own tools: AWS_ENDPOINT_URL_S3
        or AWS_ENDPOINT_URL, and AWS_REGION or AWS_DEFAULT_REGION. Raises StoreInvalid for a path where no store can be
        (empty, `~` of nobody, a URL of another scheme, or without a bucket, or with credentials) and for what the Hub
        does not give out, ConfigError for options that are out of range, HubUnavailable and StoreError.
        """
        if isinstance(place, Storage):
            return place
        return cls._open(os.fspath(place), options.context(), options)

    @classmethod
    def _open(cls, path: str, context: ts.Context, options: StorageOptions) -> "Storage":
        spec = _kvstore_spec(path)
        if options.writes_per_s is not None:
            if spec["driver"] != "gcs":
                raise ConfigError(f"store.ramp_up limits writes to gs://, and the store is at {path}. Leave it out.")
            spec |= {_RATE_LIMITER: _RATE_LIMITER}
        set_request_defaults()
        opening = ts.KvStore.open(spec, context=context)
        with storage_errors(path):
            return cls(path, opening.result(), context, options)

    def with_own_requests(self, limit: int) -> "Storage":
        """The same storage, where `limit` requests may be under way besides all others, instead of queueing with
        them."""
        context = ts.Context({name: {"limit": limit} for name in _CONCURRENCY}, parent=self.context)
        return self._open(self.path, context, self._options)

    def folder_spec(self, name: str) -> dict[str, Any]:
        """TensorStore's spec of the folder `name` below the storage, to be opened in `context` or a child of it.

        TensorStore applies the limit on writes only where a spec names it, and leaves it out of the specs it makes.
        """
        limit = {} if self._options.writes_per_s is None else {_RATE_LIMITER: _RATE_LIMITER}
        return (self.kvstore / name / "").spec().to_json() | limit

    @cached_property
    def file_threads(self) -> Executor:
        """The threads that write local store shards; as many as `concurrency`."""
        return ThreadPoolExecutor(self._options.concurrency or max(4, num_cores()), "shard-files")


StorageLike = Storage | str | os.PathLike[str]


def write_many(storage: KeyValueStore, contents: Iterable[tuple[str, bytes | None]]) -> None:
    """Writes objects durably (None deletes one), many at a time. Raises StoreError."""
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


def set_request_defaults() -> None:
    """Makes TensorStore give up a server that does not answer, and send requests by as many threads as there are cores,
    4 to 32. What the environment says already stays.

    These threads encrypt and copy all that passes, so TensorStore's default of 4 is few for hosts of a hundred cores.
    On two cores 4, 16 and 32 were equally fast, and one slower.
    """
    least, most = _HTTP_THREADS
    threads = {"TENSORSTORE_HTTP_THREADS": str(max(least, min(num_cores(), most)))}
    for name, value in (_TIMEOUTS | threads).items():
        os.environ.setdefault(name, value)


@cache
def _process_context() -> ts.Context:
    """All stores of the process share its limits on concurrent requests, and `memory://` is one store."""
    return ts.Context()


def local_directory(path: str) -> str:
    """The absolute path of a local store; `~` is the home directory."""
    return os.path.abspath(os.path.expanduser(path))


def _kvstore_spec(path: str) -> dict[str, Any]:
    """TensorStore's spec of the storage at `path`. Raises StoreInvalid where no store can be there."""
    if path.startswith(HUB_SCHEME):
        return _hub_relay().spec(path)
    if reason := unusable_store_path(path):
        raise StoreInvalid(reason)
    if "://" not in path:
        return {"driver": "file", "path": local_directory(path).rstrip("/") + "/"}
    try:
        spec = ts.KvStore.Spec(path.rstrip("/") + "/").to_json()
    except ValueError as error:
        raise StoreInvalid(f"the store's path is {path!r}, which is no address of a store: {error}.") from error
    return spec | (_s3_service() if path.startswith("s3://") else {})


def _hub_relay() -> "HubRelay":
    from pipeline.store.io.hub_relay import hub_relay  # imports huggingface_hub

    return hub_relay()


def _s3_service() -> dict[str, str]:
    """The part of a key-value store's spec that names another service than Amazon's."""
    variables = {
        "endpoint": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
        "aws_region": ("AWS_REGION", "AWS_DEFAULT_REGION"),
    }
    values = {key: next(filter(None, map(os.environ.get, names)), None) for key, names in variables.items()}
    return {key: value for key, value in values.items() if value} if values["endpoint"] else {}
