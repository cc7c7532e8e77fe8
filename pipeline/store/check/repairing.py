"""Removes what is damaged from a store, so that the job's command computes it again."""

import os
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count

from pipeline.core.errors import StoreError
from pipeline.store.check.ahead import map_ahead
from pipeline.store.format.commits import COMMITS_PREFIX, commit_key, parse_commit_key
from pipeline.store.format.keys import stream_prefix
from pipeline.store.format.metadata import ROOT_KEY, StoreRoot, change_root
from pipeline.store.io.directories import sync_directory
from pipeline.store.io.problems import Problem, Remedy
from pipeline.store.io.storage import Storage

_LEASES_PREFIX = "_leases/"
_LEASE_S, _MAX_LEASE_S = 60.0, 600.0  # how long to wait if the root does not say it, and at most
_DELETIONS_AT_ONCE = 16
_GROUP = re.compile(r"_generated/stream-\d{5,12}/group-(\d{6,12})\..*")


class Quiet:
    """Notices jobs that write to a store while it is examined and repaired, by their leases."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._leases = self._read()

    def require(self, root: StoreRoot) -> None:
        """Raises StoreError if a lease has changed since this object was made. If there are leases, first waits for as
        long as a job may leave one unchanged."""
        if self._leases:
            config = root.metadata.config.get("run")
            lease_s = config.get("lease_s") if isinstance(config, dict) else None
            time.sleep(min(lease_s, _MAX_LEASE_S) if isinstance(lease_s, int | float) and lease_s > 0 else _LEASE_S)
        if self._read() != self._leases:
            raise StoreError(
                f"a job writes to {self._storage.path}: its leases changed. Nothing was removed. Stop the job, then "
                "run the same command again."
            )

    def _read(self) -> dict[str, bytes | None]:
        keys = self._storage.list_keys(_LEASES_PREFIX)
        return dict(zip(keys, self._storage.read_many(keys), strict=True))


def repair(storage: Storage, problems: Iterable[Problem]) -> tuple[int, int]:
    """Removes the objects that have these problems, as `Remedy` says. Returns how many commit records and how many
    other objects it removed.

    The root is changed first, then records are deleted, the last of each stream first, so that an interrupted repair
    leaves a store without a summary and with fewer blocks. Sound objects of these blocks stay. Raises StoreError.
    """
    problems = [problem for problem in problems if problem.remedy.is_repair]
    first_blocks: dict[int, int] = {}
    for problem in problems:
        if problem.remedy is Remedy.recompute:
            stream, block = problem.block
            first_blocks[stream] = min(block, first_blocks.get(stream, block))
    doomed = [problem for problem in problems if not _is_to_be_adopted(problem, first_blocks)]
    objects = list(dict.fromkeys(key for problem in doomed for key in _damaged_objects(storage, problem)))
    _require_own(storage, objects)
    remedies = {problem.remedy for problem in problems}
    if remedies & {Remedy.recompute, Remedy.summarise}:
        change_root(storage, lambda root: replace(root, complete=False, summary=None))
    elif Remedy.recreate in remedies:
        change_root(storage, lambda root: replace(root, complete=False))

    def delete_records(stream: int) -> int:
        keys = storage.list_keys(stream_prefix(COMMITS_PREFIX, stream))
        blocks = sorted(parsed[1] for parsed in map(parse_commit_key, keys) if parsed)
        later = [commit_key(stream, block) for block in blocks if block >= first_blocks[stream]]
        for key in reversed(later):
            _delete(storage, key)
        return len(later)

    num_records = sum(map_ahead(delete_records, sorted(first_blocks), _DELETIONS_AT_ONCE))
    deque(map_ahead(partial(_delete, storage), objects, _DELETIONS_AT_ONCE), maxlen=0)
    return num_records, len(objects)


def _is_to_be_adopted(problem: Problem, first_blocks: Mapping[int, int]) -> bool:
    """Whether the problem is an object of a block that lost its record."""
    if problem.remedy is not Remedy.discard or problem.block is None:
        return False
    stream, block = problem.block
    return stream in first_blocks and block >= first_blocks[stream]


def _damaged_objects(storage: Storage, problem: Problem) -> Iterator[str]:
    """The objects to delete because of a problem, besides commit records."""
    if problem.remedy is Remedy.regenerate:
        yield from _later_groups(storage, problem.where)
        return
    is_record = problem.remedy is Remedy.recompute and parse_commit_key(problem.where) is not None
    if not is_record and problem.where != ROOT_KEY:  # the latter: the root lacks a summary
        yield problem.where


def _later_groups(storage: Storage, where: str) -> list[str]:
    """The objects of a damaged group and of all later groups of its stream; of all groups after the first gap if
    `where` is the prefix of a stream's groups. The last ones come first."""
    prefix = where[: where.rindex("/") + 1]
    stored = sorted((int(match[1]), key) for key in storage.list_keys(prefix) if (match := _GROUP.fullmatch(key)))
    numbers = {number for number, _ in stored}
    first = int(match[1]) if (match := _GROUP.fullmatch(where)) else next(n for n in count() if n not in numbers)
    return [key for number, key in reversed(stored) if number >= first]


def _require_own(storage: Storage, keys: Iterable[str]) -> None:
    """Raises StoreError if a key is in a linked folder of a local store."""
    for folder in {os.path.dirname(key) for key in keys} if storage.directory is not None else ():
        path = os.path.join(storage.directory, folder)
        if os.path.realpath(path) != os.path.join(os.path.realpath(storage.directory), folder):
            raise StoreError(f"{path} is a symbolic link, or in a linked folder. Nothing was removed. Remove the link.")


def _delete(storage: Storage, key: str) -> None:
    """Deletes an object durably, or what is in its place: a link or a pipe, but not a folder."""
    if storage.directory is None:
        storage.write(key, None)
        return
    _require_own(storage, [key])
    with storage.errors(key), suppress(FileNotFoundError):
        os.unlink(storage.directory + key)
        sync_directory(os.path.dirname(storage.directory + key))
