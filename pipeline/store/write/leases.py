"""Leases: which process computes which stream. They only save work: a block is safe whoever writes it.

`_jobs/lease-00003.json` names the process that computes the stream. It renews its lease with a conditional write,
which succeeds only if no other process has written the object since. A process that has seen a lease unchanged for
`lease_s`, by its own clock, may take it over, also with a conditional write; clocks are never compared. Each write has
new content, since equal contents have equal generations on S3. A process deletes the lease of a stream that it gives
up. The lease of a process that died stays until another process takes it over.

A process's first lease is also where it tries whether the storage honours the conditions of writes. Some servers ignore
them, so that processes would replace each other's objects.
"""

import itertools
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Sequence
from functools import cache

from pipeline.core.errors import StoreError, StoreInvalid
from pipeline.store.format.keys import LEASES_PREFIX
from pipeline.store.io.storage import NO_OBJECT, Storage, StorageLike

log = logging.getLogger("pipeline")

_RENEWALS_PER_LEASE = 6
_NUM_REQUESTS = 8  # concurrent; separate, so that renewals do not queue behind blocks
_numbers = itertools.count()  # of this process's writes


class Leases:
    """This process's leases on the streams of one store. A thread renews them until they are released or lost.

    lease_s: how long a lease of another process must be unchanged before this process takes it over.
    is_exclusive: no other process writes the store, so that its storage may ignore the conditions of writes.
    """

    def __init__(self, place: StorageLike, lease_s: float, is_exclusive: bool = False) -> None:
        self.lease_s = lease_s
        self._needs_conditions = not is_exclusive  # and they have not been tried yet
        self._storage = Storage.open(place).with_own_requests(_NUM_REQUESTS)
        self._seen: dict[int, tuple[bytes, float]] = {}  # the generation, and since when (monotonic seconds)
        self._held: dict[int, bytes | None] = {}  # the generation by stream; None if the lease is lost
        self._lock = threading.Lock()  # held while a lease is written
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="leases", daemon=True)
        self._thread.start()

    def vacant(self, streams: Sequence[int]) -> list[int]:
        """The streams among `streams` that no process holds, this one included. It takes two calls that are `lease_s`
        apart to notice that the process that holds a stream died on another host. Raises StoreError."""
        streams = [stream for stream in streams if stream not in self._held]
        leases = self._storage.read_with_generations([lease_key(stream) for stream in streams])
        now = time.monotonic()
        vacant = []
        for stream, (content, generation) in zip(streams, leases, strict=True):
            before, since = self._seen.get(stream, (None, now))
            since = since if generation == before else now
            self._seen[stream] = generation, since
            if content is None or now - since >= self.lease_s or _owner_has_ended(content):
                vacant.append(stream)
        return vacant

    def take(self, stream: int) -> bool:
        """Leases a stream that was `vacant`. Returns False if another process was faster. Raises StoreInvalid if the
        storage ignores the conditions of writes, and StoreError."""
        before = self._seen[stream][0]
        with self._lock:
            generation = None if self._closed.is_set() else self._write(stream, before)
            if generation is not None:
                self._held[stream] = generation
                self._try_conditions(stream)
        if generation is not None and before != NO_OBJECT:
            log.warning("taking over stream %d from a process that stopped renewing its lease", stream)
        return generation is not None

    def holds(self, stream: int) -> bool:
        """Whether this process holds the stream, as far as it knows. A lost lease stays lost until `release`."""
        return self._held.get(stream) is not None

    def release(self, stream: int) -> None:
        """Gives the stream up. If this process still held it, another one may lease it at once."""
        with self._lock:
            generation = self._held.pop(stream, None)
            if generation is None:
                return
            try:
                self._storage.write(lease_key(stream), None, generation)
            except StoreError as error:
                log.warning("cannot release the lease on stream %d, which will expire: %s", stream, error)

    def close(self) -> None:
        """Releases all leases, also one that another thread is taking now."""
        with self._lock:
            self._closed.set()
        self._thread.join()
        for stream in list(self._held):
            self.release(stream)

    def _try_conditions(self, stream: int) -> None:
        """Renews a lease that was just taken; then neither may it be put if absent, nor replaced if it is as before."""
        if self._needs_conditions:
            before, self._held[stream] = self._held[stream], self._write(stream, self._held[stream])
            if not self.holds(stream):
                return  # another process has leased it meanwhile: the next lease is tried
            key, storage = lease_key(stream), self._storage
            if storage.put(key, b"") or storage.write(key, b"", before) is not None:
                storage.write(key, None)  # as it was before
                raise StoreInvalid(
                    f"the storage of {storage.path} ignores the conditions of writes, so that processes could replace "
                    "each other's objects. Use another store.path; or, if no other process writes this store, "
                    "run.exclusive=true."
                )
            self._needs_conditions = False

    def _renew(self) -> None:
        while not self._closed.wait(self.lease_s / _RENEWALS_PER_LEASE):
            for stream in list(self._held):
                with self._lock:
                    if not self.holds(stream):
                        continue
                    try:
                        self._held[stream] = self._write(stream, self._held[stream])
                    except StoreError as error:
                        log.warning("cannot renew the lease on stream %d: %s", stream, error)
                    if not self.holds(stream):
                        log.warning(
                            "stream %d was taken over by another process: its uncommitted blocks are discarded here",
                            stream,
                        )

    def _write(self, stream: int, generation: bytes) -> bytes | None:
        """Writes the lease if it still has this generation. Returns the new generation, or None if it has changed."""
        key = lease_key(stream)
        owner = {"host": socket.gethostname(), "pid": os.getpid(), "pid_space": _pid_space()}
        lease = owner | {"number": next(_numbers)}
        content = (json.dumps(lease) + "\n").encode()
        written = self._storage.write(key, content, generation)
        if written is None:  # a retried request may find what its first attempt wrote
            [(stored, stored_generation)] = self._storage.read_with_generations([key])
            written = stored_generation if stored == content else None
        return written


def lease_key(stream: int) -> str:
    """The key of a stream's lease, relative to the store."""
    return f"{LEASES_PREFIX}{stream:05d}.json"


def _owner_has_ended(lease: bytes) -> bool:
    """Whether a process of this host wrote the lease and has ended, so that a run that is started again need not
    wait."""
    try:
        owner = json.loads(lease)
        if owner["pid_space"] == _pid_space() is not None:
            os.kill(owner["pid"], 0)  # sends no signal
    except ProcessLookupError:
        return True
    except (ValueError, TypeError, KeyError, OSError, OverflowError, RecursionError):
        pass
    return False


@cache
def _pid_space() -> str | None:
    """Where this process's number means this process: on this host since it was booted, in this container."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return None


def process_name() -> str:
    """A name that no other call returns: the host, the process's number and random digits."""
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
