"""Claims: which process computes which stream, decided by conditional writes in the store.

`_claims/stream-00003.json` names the stream's owner. The owner renews its claim with a conditional write, which
succeeds only if no other process has written the object since. A process that has seen a claim unchanged for the whole
lease may take it over, also with a conditional write. Each process uses its own clock; clocks are never compared. An
owner that could not renew its claim for half of the lease gives it up, before another process may take it over. To
release a stream that has work left, the owner marks the claim as released. It does not delete it, because S3 has no
conditional deletion.

`_claims/stream-00003.done-1000000` says that the stream holds its share of a target of 1,000,000 tokens (`all`: of all
tokens). One listing, at one request per 1,000 keys, therefore distinguishes finished, claimed and free streams. This
mark replaces the stream's claim. On S3 the claim is then deleted without a condition, which is safe because the stream
has no work left. Marks only save requests: the commit records say what the store contains.
"""

import itertools
import json
import logging
import os
import random
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pipeline.core.errors import StoreError, StoreInvalid
from pipeline.store.format.target import ALL, Target, larger
from pipeline.store.io.parsing import parse_store_json
from pipeline.store.io.storage import NO_OBJECT, Storage, StorageLike

log = logging.getLogger("pipeline")

CLAIMS_PREFIX = "_claims/"
COMPLETION = -1  # used as a stream number: the claim of the worker that completes the store
TEST_PREFIX = "_claims_test/"  # not below CLAIMS_PREFIX, where another worker may be deleting objects
_COMPLETION_KEY = f"{CLAIMS_PREFIX}completion.json"
_KEY = re.compile(r"_claims/stream-(\d{5,})\.json")
_MARK = re.compile(rf"_claims/stream-(\d{{5,}})\.done-(\d+|{ALL})")
_RENEWALS_PER_LEASE = 6  # two may fail before the owner gives up
_RENEWAL_REQUESTS = 4  # concurrent; separate, so that renewals do not queue behind blocks or the search for a stream
_SEARCH_REQUESTS = 16
_DELETIONS_AT_ONCE = 256


class _Claim(NamedTuple):
    """The content of a claim's object. `number` counts the owner's writes, so that each write differs."""

    owner: str
    held: bool
    lease_s: float
    number: int

    def to_json(self) -> bytes:
        return (json.dumps(self._asdict()) + "\n").encode()

    @classmethod
    def from_json(cls, text: bytes, subject: str) -> "_Claim":
        content = parse_store_json(text, subject, _CLAIM_REMEDY)
        try:
            claim = cls(**content)
        except TypeError as error:
            raise StoreInvalid(f"{subject} is not a claim ({error}). {_CLAIM_REMEDY}") from error
        kinds = {"owner": str, "held": bool, "lease_s": (int, float), "number": int}
        wrong = {name: value for name, value in claim._asdict().items() if not isinstance(value, kinds[name])}
        if wrong or not 0 < claim.lease_s < float("inf"):
            raise StoreInvalid(f"{subject} is not a claim ({wrong or claim.lease_s}). {_CLAIM_REMEDY}")
        return claim


_CLAIM_REMEDY = "Delete it."


class Vacancy(NamedTuple):
    """A stream that may be claimed while its claim object has this generation."""

    stream: int
    generation: bytes = NO_OBJECT
    expired: str | None = None  # the previous owner, if its lease expired


class ListedStreams(NamedTuple):
    """The streams with a claim, held or released, and the finished streams, as the object names in `_claims/` say."""

    claimed: set[int]
    finished: set[int]


@dataclass
class _Lease:
    """A claim of this process."""

    generation: bytes
    renewed_at: float  # monotonic seconds, taken before the last successful renewal was sent
    is_lost: bool = False  # never reset
    lock: threading.Lock = field(default_factory=threading.Lock)  # held while the claim is renewed or released


class Claims:
    """This process's claims on the streams of one store. A thread renews them until they are released or lost.

    owner: the name of this process in its claims. lease_s: seconds after the last renewal until other processes may
    take a claim over. Processes may use different leases.
    """

    def __init__(self, place: StorageLike, lease_s: float) -> None:
        """Raises StoreInvalid if the storage ignores write conditions, and StoreError."""
        self.owner = process_name()
        self.lease_s = lease_s
        storage = Storage.open(place)
        self._storage = storage.with_own_requests(_RENEWAL_REQUESTS)
        self._search_storage = storage.with_own_requests(_SEARCH_REQUESTS)
        self._numbers = itertools.count()
        # The generation of each claim of another process, and when this process first saw it (monotonic seconds).
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._leases: dict[int, _Lease] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        _require_conditional_writes(self._storage, self.owner)
        self._thread = threading.Thread(target=self._renew, name="claims", daemon=True)
        self._thread.start()

    def list_streams(self, target: Target) -> ListedStreams:
        """Lists the claimed and the finished streams; see the function `list_streams`."""
        return list_streams(self._search_storage, target)

    def vacancies(self, streams: Sequence[int]) -> list[Vacancy]:
        """The streams among `streams` that no process holds, this one included.

        Detecting a dead owner takes two calls that are at least its lease apart. Raises StoreInvalid for an object that
        is not a claim, and StoreError.
        """
        streams = [stream for stream in streams if stream not in self._leases]
        claims = self._search_storage.retry_read(lambda: self._read(streams))
        now = time.monotonic()
        vacant = []
        for stream, (claim, generation) in zip(streams, claims, strict=True):
            if claim is None or not claim.held or claim.owner == self.owner:
                vacant.append(Vacancy(stream, generation))
                continue
            seen, since = self._seen.get(stream, (None, now))
            if seen != generation:
                self._seen[stream] = (generation, now)
            elif now - since >= claim.lease_s:
                vacant.append(Vacancy(stream, generation, expired=claim.owner))
        return vacant

    def _read(self, streams: Sequence[int]) -> list[tuple[_Claim | None, bytes]]:
        """Each stream's claim, or None, and its generation. Raises StoreInvalid for an object that is not a claim."""
        keys = [claim_key(stream) for stream in streams]
        return [
            (None if text is None else _Claim.from_json(text, f"{self._storage.path}/{key}"), generation)
            for key, (text, generation) in zip(keys, self._search_storage.read_with_generations(keys), strict=True)
        ]

    def claim(self, vacancy: Vacancy) -> bool:
        """Tries to claim the stream. Returns whether this process holds it now. Raises StoreError."""
        began = time.monotonic()
        generation = self._write(vacancy.stream, vacancy.generation)
        if generation is None:
            return False
        if vacancy.expired:
            name = _claim_name(vacancy.stream)
            log.warning("taking over %s from %s, which stopped renewing its claim", name, vacancy.expired)
        with self._lock:
            self._leases[vacancy.stream] = _Lease(generation, began)
        if self._closed.is_set():
            self.release(vacancy.stream)
            return False
        return True

    def holds(self, stream: int) -> bool:
        """Whether this process still holds the stream. A lost claim stays lost until `release` removes it."""
        lease = self._leases.get(stream)
        if lease is None:
            return False
        if not lease.is_lost and time.monotonic() - lease.renewed_at >= self.lease_s / 2:
            self._lose(stream, lease, f"could not be renewed for {self.lease_s / 2:g} s")
        return not lease.is_lost

    def release(self, stream: int) -> None:
        """Gives the stream up. If this process still held it, another one may claim it at once."""
        self._give_up(stream, lambda generation: self._write(stream, generation, held=False))

    def finish(self, stream: int, target: Target) -> None:
        """Marks a stream that holds its share of this target as finished, and deletes the claim."""

        def write(generation: bytes) -> None:
            self._storage.write(_mark_key(stream, target), f"{self.owner}\n".encode())
            self._storage.write_if_unchanged(claim_key(stream), None, generation)

        self._give_up(stream, write)

    def withdraw(self, stream: int) -> None:
        """Gives the stream up and deletes the claim."""
        self._give_up(stream, lambda generation: self._storage.write_if_unchanged(claim_key(stream), None, generation))

    def _give_up(self, stream: int, write: Callable[[bytes], object]) -> None:
        """Ends the lease. `write(generation)` tells other processes; if it fails, the claim expires later."""
        with self._lock:
            lease = self._leases.pop(stream, None)
        if lease is None:
            return
        try:
            with lease.lock:
                write(lease.generation)
        except StoreError as error:
            log.warning("cannot release the claim on %s, which will expire: %s", _claim_name(stream), error)

    def close(self) -> None:
        """Releases all claims."""
        self._closed.set()
        self._thread.join()
        for stream in list(self._leases):
            self.release(stream)

    def _renew(self) -> None:
        while not self._closed.wait(self.lease_s / _RENEWALS_PER_LEASE):
            with self._lock:
                leases = list(self._leases.items())
            for stream, lease in leases:
                with lease.lock:
                    if self._leases.get(stream) is lease and self.holds(stream):
                        self._renew_one(stream, lease)

    def _renew_one(self, stream: int, lease: _Lease) -> None:
        began = time.monotonic()
        try:
            generation = self._write(stream, lease.generation)
        except StoreError as error:
            log.warning("cannot renew the claim on %s: %s", _claim_name(stream), error)
            return
        if generation is None:
            self._lose(stream, lease, "was taken over by another worker")
        else:
            lease.generation, lease.renewed_at = generation, began

    def _lose(self, stream: int, lease: _Lease, why: str) -> None:
        lease.is_lost = True
        log.warning("the claim on %s %s: its uncommitted blocks are discarded", _claim_name(stream), why)

    def _write(self, stream: int, generation: bytes, held: bool = True) -> bytes | None:
        """Writes the claim if it still has this generation. Returns the new generation, or None if it has changed."""
        key, text = claim_key(stream), _Claim(self.owner, held, self.lease_s, next(self._numbers)).to_json()
        written = self._storage.write_if_unchanged(key, text, generation)
        if written is None:  # a retried request may find what its first attempt wrote
            [(stored, stored_generation)] = self._storage.read_with_generations([key])
            written = stored_generation if stored == text else None
        return written


def claim_key(stream: int) -> str:
    return _COMPLETION_KEY if stream == COMPLETION else f"{CLAIMS_PREFIX}stream-{stream:05d}.json"


def _claim_name(stream: int) -> str:
    """The name of a claimed stream in messages."""
    return "the completion of the store" if stream == COMPLETION else f"stream {stream}"


def _mark_key(stream: int, target: Target) -> str:
    return f"{CLAIMS_PREFIX}stream-{stream:05d}.done-{target}"


def list_streams(storage: Storage, target: Target) -> ListedStreams:
    """The streams that have a claim, and those marked as finished for this target or a larger one.

    Takes one request per 1,000 claims and marks. Raises StoreError.
    """
    keys = storage.list_keys(CLAIMS_PREFIX)
    marks = [(int(match[1]), match[2]) for key in keys if (match := _MARK.fullmatch(key))]
    finished = {stream for stream, marked in marks if marked == ALL or larger(int(marked), target) == int(marked)}
    return ListedStreams({int(match[1]) for key in keys if (match := _KEY.fullmatch(key))}, finished)


def delete_marks(storage: Storage, stream: int) -> None:
    """Deletes the marks of a finished stream. Raises StoreError."""
    for key in storage.list_keys(f"{CLAIMS_PREFIX}stream-{stream:05d}.done-"):
        storage.write(key, None)


def held_claims(place: StorageLike) -> dict[int, str]:
    """The owner of each claimed stream and of the claim on COMPLETION, by stream; owners may be dead.

    Raises StoreInvalid for an object that is not a claim, and StoreError.
    """
    storage = Storage.open(place)
    listed = storage.list_keys(CLAIMS_PREFIX)
    keys = {key: int(match[1]) for key in listed if (match := _KEY.fullmatch(key))}
    keys |= {key: COMPLETION for key in listed if key == _COMPLETION_KEY}

    def check(key: str, text: bytes | None) -> _Claim | None:
        return None if text is None else _Claim.from_json(text, f"{storage.path}/{key}")

    claims = zip(keys.values(), storage.read_checked(list(keys), check), strict=True)
    return {stream: claim.owner for stream, claim in claims if claim is not None and claim.held}


def named_holders(holders: Mapping[int, str]) -> str:
    """The claims from `held_claims` as text for messages: "stream 0 by host-1-..., stream 3 by host-2-..."."""
    return ", ".join(f"{_claim_name(stream)} by {owner}" for stream, owner in holders.items())


def read_claims(storage: Storage) -> dict[str, bytes | None]:
    """The generation of every claim on a stream (None for a mark), by key, for `delete_claims`. Raises StoreError.

    Leaves out the claim on COMPLETION, which the worker that completes the store withdraws itself.
    """
    keys = storage.list_keys(CLAIMS_PREFIX)
    marks = [key for key in keys if _MARK.fullmatch(key)]
    others = sorted({*keys} - {*marks, _COMPLETION_KEY})
    claims = zip(others, storage.read_with_generations(others), strict=True)
    return dict.fromkeys(marks) | {key: generation for key, (text, generation) in claims if text is not None}


def delete_claims(storage: Storage, claims: Mapping[str, bytes | None]) -> None:
    """Deletes the marks, and the claims that no process has renewed since they were read. Raises StoreError.

    Several processes may call this at the same time: each starts at different objects and skips those already deleted.
    """
    left = random.sample(sorted(claims), len(claims))
    while left and (listed := set(storage.list_keys(CLAIMS_PREFIX))):
        left = [key for key in left if key in listed]
        batch, left = left[:_DELETIONS_AT_ONCE], left[_DELETIONS_AT_ONCE:]
        deletions = {key: storage.start_write(key, None, claims[key]) for key in batch}
        for key, deletion in deletions.items():
            with storage.errors(key):
                deletion.result()


def process_name() -> str:
    """A name that no other process has: the host, the process's number and random digits."""
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def _require_conditional_writes(storage: Storage, owner: str) -> None:
    key = f"{TEST_PREFIX}{owner}"
    storage.write_if_absent(key, b"test")
    ignored = storage.write_if_absent(key, b"test")
    storage.write(key, None)
    if ignored:
        raise StoreInvalid(
            f"the storage of {storage.path} does not support conditional writes, so streams cannot be claimed. "
            "Use run.worker_index and run.worker_count, or another store.path."
        )
