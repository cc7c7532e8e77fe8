"""All access to storage: objects at a local path, `gs://`, `s3://` or `memory://`, through TensorStore, and (read-only)
in a dataset repository of the Hugging Face Hub, `hf://`.

Every failure to read or write is raised as a StoreError.
"""

import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import tensorstore as ts

from pipeline.core.addresses import HUB_SCHEME
from pipeline.core.arguments import require_not_forked
from pipeline.core.errors import StoreError, StoreInvalid
from pipeline.core.host import num_cores
from pipeline.store.io.failures import DAMAGE_REMEDY, storage_errors
from pipeline.store.io.local_files import (
    delete_files,
    file_problem,
    make_directories,
    put_file,
    require_no_links,
    size_problem,
)
from pipeline.store.io.options import (
    CONCURRENCY,
    DEFAULT_OPTIONS,
    NUM_REQUESTS,
    StorageOptions,
    kvstore_spec,
    set_request_defaults,
)

if TYPE_CHECKING:
    from pipeline.store.io.hub_files import HubFiles

# How many reads or writes of small objects to start ahead. TensorStore queues those beyond its concurrency.
_KEYS_AHEAD = 256
_DELETIONS_AT_ONCE = 128

_UPDATE_ATTEMPTS = 100  # to change an object that other processes are changing

# Delays before an object that seems damaged or missing is read again.
_REREAD_DELAYS_S = (0.05, 0.2, 0.8, 2.0)
_SETTLED_REREAD_DELAYS_S = (0.0,)

A, T = TypeVar("A"), TypeVar("T")
Buffer = bytes | memoryview

NO_OBJECT = b"\2"  # the storage generation of an object that does not exist

_REUSED_BYTES = 1 << 20  # contents from this size on are joined in memory that is kept: new memory costs page faults


class Storage:
    """The objects of one activation store by key, and the resources that requests for them share. Use `Storage.open`.
    Methods raise StoreError if the storage fails.

    path: as given, or with the commit for the Hub. context: the TensorStore context for opening the store's arrays.
    directory: the local directory of the objects, with a trailing slash; None for other kinds of storage.
    is_remote: whether requests go through a network, so that one may fail or get a wrong answer.
    """

    def __init__(
        self, path: str, kvstore: "ts.KvStore | HubFiles", context: ts.Context, options: StorageOptions
    ) -> None:
        self.path = path
        self.kvstore = kvstore
        self.context = context
        self._options = options
        self._spec = kvstore.spec().to_json() if isinstance(kvstore, ts.KvStore) else {"driver": "hf"}
        self.directory: str | None = self._spec["path"] if self._spec["driver"] == "file" else None
        self.is_remote: bool = self._spec["driver"] not in ("file", "memory")
        self._joined, self._joining = bytearray(), threading.Lock()  # the content that is about to be sent

    @classmethod
    def open(cls, address: "StorageLike", options: StorageOptions = DEFAULT_OPTIONS) -> "Storage":
        """Opens a local path (`~` is the home directory) or a URL; returns a Storage unchanged. Does not create or read
        any object.

        `hf://datasets/owner/name[@revision]` is resolved to a commit, which becomes part of `path`. `s3://` is Amazon's
        service unless the environment names a different one, as for Amazon's own tools: AWS_ENDPOINT_URL_S3 or
        AWS_ENDPOINT_URL, and AWS_REGION or AWS_DEFAULT_REGION.

        Raises StoreInvalid for an unusable path (empty, `~` of an unknown user, a URL with an unknown scheme, without
        a bucket or with credentials) and if the Hub refuses access; HubUnavailable; StoreError.
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
        spec = kvstore_spec(path)
        set_request_defaults()
        opening = ts.KvStore.open(spec, context=context)
        with storage_errors(path):
            return cls(path, opening.result(), context, options)

    def with_own_requests(self, limit: int) -> "Storage":
        """The same storage with its own limit of concurrent requests, so that they do not queue behind others."""
        context = ts.Context({name: {"limit": limit} for name in CONCURRENCY}, parent=self.context)
        return self._open(self.path, context, replace(self._options, concurrency=limit))

    def url(self, key: str) -> str:
        """The URL or path of an object, for messages."""
        if self._spec["driver"] == "s3":  # TensorStore has no URL for an S3 endpoint
            return f"s3://{self._spec['bucket']}/{self._spec.get('path', '')}{key}"
        return self.kvstore.url + key

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
        with storage_errors(self.url(key)):
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
            contents = itertools.chain([content], map(self.read, itertools.repeat(key)))
            yield self.retry_read(lambda key=key, contents=contents: check(key, next(contents)))

    def retry_read(self, read: Callable[[], T]) -> T:
        """Returns `read()`, calling it again, a few times, if it raises StoreInvalid.

        A storage service may return half an object, or report it as missing, and answer correctly the next time. If
        calls of `retry_read` are nested, only the innermost retries.
        """
        delays_s = iter(_REREAD_DELAYS_S if self.is_remote else _SETTLED_REREAD_DELAYS_S)
        while True:
            try:
                return read()
            except StoreInvalid as error:
                if error.was_read_again or (delay_s := next(delays_s, None)) is None:
                    error.was_read_again = True
                    raise
                time.sleep(delay_s)

    def list_keys(self, prefix: str = "", start: str = "") -> list[str]:
        """The keys >= `start` that begin with `prefix`, sorted."""
        first, after = max(prefix, start), prefix and prefix[:-1] + chr(ord(prefix[-1]) + 1)
        listing = self.kvstore.list(ts.KvStore.KeyRange(first, after))
        with storage_errors(self.url(first)):
            names = [name.decode(errors="replace") for name in listing.result()]
        # Some servers with the GCS protocol ignore the range.
        return sorted(name for name in names if name >= first and (name < after or not after))

    def put(self, key: str, *parts: Buffer) -> bool:
        """Writes an object durably unless it exists. Returns whether this call wrote it: if several processes try, one
        succeeds. The content is the `parts`, in order.

        False does not mean that another process wrote it: an earlier attempt's answer may have been lost on the way.
        Raises StoreInvalid for an object that readers would refuse.
        """
        self.require_file(key)
        if problem := size_problem(key, sum(map(len, parts))):
            raise StoreInvalid(
                f"{self.url(key)} {problem}, and is not written. Set a smaller store.rows_per_block; or, if "
                "data.on_error=skip leaves out millions of rows, data without these."
            )
        with storage_errors(self.url(key)):
            return self._put_remote(key, parts) if self.directory is None else put_file(self.directory, key, parts)

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

    def write(self, key: str, value: bytes | None, generation: bytes | None = None) -> bytes | None:
        """Writes an object durably (None deletes it), with a `generation` only if the object still has it. Returns the
        new generation; None if it has another one. Raises StoreInvalid on the Hub; see `require_file`.

        S3 has no conditional deletion: TensorStore compares the generation just before it deletes.
        """
        self.require_file(key)
        with storage_errors(self.url(key)):
            if value is not None and self.directory is not None:  # TensorStore only syncs the last directory
                make_directories(os.path.dirname(self.directory + key), self.directory)
            return self.kvstore.write(key, value, if_equal=generation).result().generation or None

    def update(self, key: str, change: Callable[[bytes | None], tuple[T, bytes | None]]) -> T:
        """Replaces an object, whose content is given to `change`, by the content that this returns; None leaves it as
        it is. Returns the other value that `change` returned.

        Safe while other processes change the object too: `change` is called again with what they wrote, and also if it
        raises StoreInvalid, since the content may have been read wrongly.
        """

        def read() -> tuple[T, bytes | None, bytes]:
            [(content, generation)] = self.read_with_generations([key])
            return *change(content), generation

        for _ in range(_UPDATE_ATTEMPTS):
            result, new, generation = self.retry_read(read)
            if new is None or self.write(key, new, generation) is not None:
                return result
        raise StoreError(
            f"{self.url(key)} could not be changed: other processes changed it first, {_UPDATE_ATTEMPTS} times in a "
            "row. Run the same command again."
        )

    def require_file(self, key: str) -> None:
        """Raises StoreInvalid if there is something other than the store's own file at a key of a local store.
        TensorStore treats a folder, a socket or a broken link as an absent object, follows other links, and waits
        forever for a pipe."""
        if problem := file_problem(self.directory, key):
            raise StoreInvalid(f"{self.url(key)} {problem}. {DAMAGE_REMEDY}")

    def delete(self, keys: Iterable[str]) -> None:
        """Deletes objects durably; on a local path in this order, also links or pipes in their places. Raises
        StoreError for what is in a linked folder."""
        if self.directory is None:
            deque(map_ahead(lambda key: self.write(key, None), keys, _DELETIONS_AT_ONCE), maxlen=0)
            return
        require_no_links(self.directory, keys := list(keys))
        with storage_errors(self.path):
            delete_files(self.directory, keys)

    @cached_property
    def put_threads(self) -> Executor:
        """The threads that encode and put objects, as many as `concurrency`."""
        default = NUM_REQUESTS if self.directory is None else max(4, num_cores())
        return ThreadPoolExecutor(self._options.concurrency or default, "puts")


StorageLike = Storage | str | os.PathLike[str]


def map_ahead(call: Callable[[A], T], items: Iterable[A], threads: int) -> Iterator[T]:
    """The results of `call(item)`, in order, computed by several threads. Unlike `Executor.map`, it starts at most
    `2 * threads` calls ahead."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix="ahead")
    started: deque[Future[T]] = deque()
    try:
        for item in items:
            started.append(pool.submit(call, item))
            if len(started) > 2 * threads:
                yield started.popleft().result()
        while started:
            yield started.popleft().result()
    finally:  # without waiting, since a dropped iterator may be garbage-collected in one of the threads
        pool.shutdown(wait=False, cancel_futures=True)
