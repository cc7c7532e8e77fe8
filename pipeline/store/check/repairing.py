"""Verifies a store, prints its problems and, if asked to, removes what is damaged, so that the job's command computes
it again."""

import time
from collections.abc import Collection
from dataclasses import replace
from itertools import chain

from pipeline.core.errors import EXIT_FAILED, EXIT_OK, StoreError
from pipeline.core.messages import counted
from pipeline.core.progress import progress_bar
from pipeline.store.check.problems import EVERYTHING, Problem, Remedy, Scope
from pipeline.store.check.verifying import verify_store
from pipeline.store.format.commits import COMMITS_PREFIX, commit_key, parse_commit_key
from pipeline.store.format.keys import LEASES_PREFIX, stream_prefix
from pipeline.store.format.metadata import ROOT_KEY, StoreRoot, change_root, require_root
from pipeline.store.io.local_files import require_no_links
from pipeline.store.io.storage import Storage, map_ahead

_LEASE_S, _MAX_LEASE_S = 60.0, 600.0  # how long to wait if the root does not say it, and at most
_DELETIONS_AT_ONCE = 16


def verify_and_print(path: str, scope: Scope = EVERYTHING, repairs: bool = False) -> int:
    """Verifies a store with a progress bar, prints its problems, and returns the exit code. Raises StoreError.

    repairs: remove what is damaged, and objects that belong to no committed block.
    """
    storage = Storage.open(path)
    leases = _read_leases(storage) if repairs else {}
    with progress_bar("verify", "block") as progress:
        problems = verify_store(storage, progress, scope, find_leftovers=repairs)
    for problem in problems:
        print(problem)
    if not problems:
        print(f"{path}: {'sound' if scope.is_everything else 'no problem found'}")
    else:
        print(f"{path}: {counted(len(problems), 'problem')}.")
    for remedy in dict.fromkeys(problem.remedy for problem in problems if not repairs):
        print(f"verify.repair=true {remedy}")
    if repairs and problems:
        _require_no_job(storage, require_root(storage), leases)
        num_records, num_objects = _repair(storage, problems)
        removed = f"{counted(num_records, 'commit record')} and {counted(num_objects, 'other object')}"
        print(f"{path}: removed {removed}. Run the job's command again: it completes the store.")
    return EXIT_OK if repairs or not problems else EXIT_FAILED


def _read_leases(storage: Storage) -> dict[str, bytes | None]:
    keys = storage.list_keys(LEASES_PREFIX)
    return dict(zip(keys, storage.read_many(keys), strict=True))


def _require_no_job(storage: Storage, root: StoreRoot, leases: dict[str, bytes | None]) -> None:
    """Raises StoreError if a lease has changed, so that a job writes to the store. If there are leases, first waits for
    as long as a job may leave one unchanged."""
    if leases:
        time.sleep(max(0, min(root.metadata.config["run"].get("lease_s", _LEASE_S), _MAX_LEASE_S)))
    if _read_leases(storage) != leases:
        raise StoreError(
            f"a job writes to {storage.path}: its leases changed. Nothing was removed. Stop the job, then run the same "
            "command again."
        )


def _repair(storage: Storage, problems: Collection[Problem]) -> tuple[int, int]:
    """Removes the objects that have these problems, as `Remedy` says. Returns how many commit records and how many
    other objects it removed.

    The root is changed first, then records are deleted, the last of each stream first, so that an interrupted repair
    leaves a store without a summary and with fewer blocks. Sound objects of these blocks stay. Raises StoreError.
    """
    first_blocks: dict[int, int] = {}  # that lose their records, by stream
    for problem in problems:
        if problem.remedy is Remedy.recompute:
            stream, block = problem.block
            first_blocks[stream] = min(block, first_blocks.get(stream, block))
    objects = {problem.where for problem in problems} - {ROOT_KEY}
    require_no_links(storage.directory, objects)
    if any(problem.remedy is not Remedy.discard for problem in problems):
        change_root(storage, lambda root: replace(root, complete=False, summary=None))

    def delete_records(stream: int) -> list[str]:
        keys = storage.list_keys(stream_prefix(COMMITS_PREFIX, stream))
        blocks = sorted(parsed[1] for parsed in map(parse_commit_key, keys) if parsed)
        later = [commit_key(stream, block) for block in blocks if block >= first_blocks[stream]]
        for key in reversed(later):
            storage.delete([key])
        return later

    records = set(chain.from_iterable(map_ahead(delete_records, sorted(first_blocks), _DELETIONS_AT_ONCE)))
    objects -= records
    storage.delete(objects)
    return len(records), len(objects)
