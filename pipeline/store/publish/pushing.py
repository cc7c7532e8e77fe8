"""Pushes a finished store to a repository on the Hub, in one or several commits, so that it can be interrupted.

Objects are committed in the order in which a run writes them: the commit records after everything else, then the
tables of these, and the root last. If there are several commits, the first one marks the store in its root as not
complete, and deletes the records of blocks that a longer run has replaced. So an interrupted push leaves an unfinished
store with the blocks whose records were pushed. Files that the repository has are not uploaded again: the Hub
identifies them by digest, and keeps large files for the next commit. No state is kept locally.
"""

import hashlib
import logging
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from huggingface_hub import CommitOperationAdd, CommitOperationDelete

from pipeline.core.errors import ConfigError, StoreError, StoreInvalid, StoreMismatch
from pipeline.store.format.block_table import PREFIX as TABLES_PREFIX
from pipeline.store.format.commits import COMMITS_PREFIX
from pipeline.store.format.keys import LOCK_SUFFIX, StoreKeys, is_worker_key
from pipeline.store.format.layout import MIB
from pipeline.store.format.metadata import ROOT_KEY, StoreRoot, require_root
from pipeline.store.format.target import larger
from pipeline.store.io.directories import require_no_links
from pipeline.store.io.failures import VERIFY_REMEDY
from pipeline.store.io.hub_files import HubFile, HubFiles
from pipeline.store.io.storage import Storage
from pipeline.store.publish.card import CARD_KEY, card
from pipeline.store.publish.repository import HubRepository, open_repository
from pipeline.store.read.reader import ActivationStore

log = logging.getLogger("pipeline")

# The Hub recommends 100 files per commit, but allows only 128 commits per hour. huggingface_hub's uploads of folders
# start with this number, too. Small files are part of the commit's request.
FILES_PER_COMMIT = 250
_SMALL_BYTES_PER_COMMIT = 16 * MIB
_GROUP_FILES = 50  # files that are uploaded together
_GROUP_BYTES = 256 * MIB  # limits the memory for objects that are not local
MAX_FILES = 100_000  # the number of files per repository that the Hub recommends

_REPO = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)

_LONGER = "Push the longer store, or choose a different repository."
_NOT_A_STORE = re.compile(r"README\.md|LICENSE.*|\.gitattributes")  # allowed in a repository for a new store

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Pushed:
    """What was pushed.

    num_objects: the number of the store's objects. num_uploaded, num_bytes: the number and size of those that the
    repository did not have. commit: the branch's latest commit.
    """

    num_objects: int
    num_uploaded: int
    num_bytes: int
    commit: str


def push_store(
    path: str, repo: str, branch: str = "main", private: bool | None = None, progress: Progress | None = None
) -> Pushed:
    """Pushes the store at `path`, with a card, to a branch of a dataset repository. Creates these if needed.

    progress: called with the number of finished objects and the total. Raises StoreInvalid for an unfinished store;
    StoreMismatch if the repository has something else, or more of the store; ConfigError if the Hub refuses a request,
    and for a `repo` without an owner; HubUnavailable; StoreError.
    """
    if not _REPO.fullmatch(repo):
        raise ConfigError(f"repo={repo!r:.200} is not a repository name, expected repo=owner/name.")
    storage = Storage.open(path)
    text = storage.read(ROOT_KEY)
    root = require_root(storage)
    if not root.complete:
        raise StoreInvalid(
            f"{path} is unfinished, and only finished stores can be pushed. Run its job to the end, or mark it as "
            f"complete: python -m pipeline.finalize store.path={path} force=true."
        )
    store = ActivationStore.open(storage)
    store_keys = StoreKeys(root.arrays, [spec.name for spec in root.metadata.outputs])
    keys = _keys_to_push(storage, store_keys)
    if len(keys) > MAX_FILES:
        log.warning(
            "%s has %s objects, but the Hub recommends fewer than %s files per repository. A run with a larger "
            "store.shard_mib writes fewer objects.",
            *(path, f"{len(keys):,}", f"{MAX_FILES:,}"),
        )
    repository = open_repository(repo, branch, private)
    before = repository.files
    pushed_keys = [key for key in before.files if store_keys.is_own(key)]
    stored = _stored_root(before, root, repo)
    _require_all_records(pushed_keys, keys, repo)
    repository.make_branch()
    is_unfinished = stored == root.unfinished()
    commits = _Commits(repository, root, is_unfinished, _stale(storage, before, pushed_keys, set(keys)))
    num_uploaded = num_bytes = done = 0
    sizes = _Sizes(store)
    for group in _groups(keys, sizes):
        files = list(_additions(storage, group))
        sizes.add(files)
        additions = [file for file in files if _is_new(file, before.files.get(file.path_in_repo))]
        del files
        commits.add(additions)
        num_uploaded += len(additions)
        num_bytes += sum(added.upload_info.size for added in additions)
        done += len(group)
        if progress is not None:
            progress(done, len(keys))
    if storage.read(ROOT_KEY) != text:
        raise StoreError(f"{path} changed during the push. Run the same command again once the store is finished.")
    present = before.read(CARD_KEY)
    readme = card(store, repo, branch, None if present is None else present.decode(errors="replace"))
    wanted = {*keys, ROOT_KEY}
    surplus = [key for key in pushed_keys if key not in wanted]
    commits.finish(surplus, {CARD_KEY: readme.encode(), ROOT_KEY: text})
    return Pushed(len(keys), num_uploaded, num_bytes, repository.head)


def _keys_to_push(storage: Storage, store_keys: StoreKeys) -> list[str]:
    """The keys of the store's objects except its root: first the arrays' metadata, last the commit records and then
    the tables of these. Without claims, logs and leftovers of interrupted writes."""
    keys = [key for key in storage.list_keys() if store_keys.is_own(key) and key != ROOT_KEY]
    keys = [key for key in keys if not key.endswith(LOCK_SUFFIX) and not is_worker_key(key)]
    require_no_links(storage.directory, [*keys, ROOT_KEY])
    last = (TABLES_PREFIX, COMMITS_PREFIX)  # in reverse order
    return sorted(keys, key=lambda key: (*(key.startswith(prefix) for prefix in last), not _is_metadata(key), key))


def _is_metadata(key: str) -> bool:
    return key.endswith("/zarr.json")


def _stored_root(files: HubFiles, root: StoreRoot, repo: str) -> StoreRoot | None:
    """The root of the store in the repository; None if the repository has no store yet. Raises StoreMismatch if it has
    something else, or more of the store."""
    text = files.read(ROOT_KEY)
    if text is None:
        others = [key for key in files.files if not _NOT_A_STORE.fullmatch(key)]
        if others:
            raise StoreMismatch(
                f"repo={repo} has other files, e.g. {others[0]}, but no store. Choose a different repository."
            )
        return None
    try:
        stored = StoreRoot.from_json(text, files.url)
    except StoreInvalid as error:
        raise StoreMismatch(f"repo={repo} has a store that cannot be read or updated: {error}") from error
    if stored.metadata.fingerprint() != root.metadata.fingerprint():
        different = ", ".join(pair.key for pair in stored.metadata.differences(root.metadata)[:3])
        raise StoreMismatch(
            f"repo={repo} has a store whose configuration differs in {different}. Choose a different repository."
        )
    if larger(stored.target, root.target) != root.target:
        raise StoreMismatch(
            f"repo={repo} has a longer version of this store: its target is {stored.target}, the local store's is "
            f"{root.target}. {_LONGER}"
        )
    return stored


def _require_all_records(pushed_keys: Iterable[str], keys: Collection[str], repo: str) -> None:
    """Raises StoreMismatch if the repository has the record of a block that the store lacks."""
    records = {key for key in pushed_keys if key.startswith(COMMITS_PREFIX) and key.endswith(".json")}
    if lacking := sorted(records.difference(keys)):
        raise StoreMismatch(f"repo={repo} has {len(lacking)} more blocks of this store, e.g. {lacking[0]}. {_LONGER}")


def _stale(storage: Storage, before: HubFiles, pushed_keys: Iterable[str], keys: Collection[str]) -> list[str]:
    """The repository's commit records and block tables that differ from the store's, or that the store lacks. The
    objects of these blocks are about to be replaced."""
    stored = {key for key in pushed_keys if key.startswith((COMMITS_PREFIX, TABLES_PREFIX))}
    present = sorted(stored.intersection(keys))
    changed = [
        file.path_in_repo for file in _additions(storage, present) if _is_new(file, before.files[file.path_in_repo])
    ]
    return [*changed, *sorted(stored.difference(keys))]


class _Sizes:
    """Estimates objects' sizes in bytes: a store shard's before compression; for others, the largest object of the same
    kind so far. The first object of a kind counts as a whole group."""

    def __init__(self, store: ActivationStore) -> None:
        arrays = store.arrays.values()
        self._shard = max(math.prod(a.chunk_layout.write_chunk.shape) * a.dtype.numpy_dtype.itemsize for a in arrays)
        self._largest: dict[tuple[str, str], int] = {}

    def estimate(self, key: str) -> int:
        if "/c/" in key:
            return self._shard
        return 0 if _is_metadata(key) else self._largest.get(_kind(key), _GROUP_BYTES)

    def add(self, files: Iterable[CommitOperationAdd]) -> None:
        for file in files:
            if "/c/" in file.path_in_repo or _is_metadata(file.path_in_repo):
                continue
            kind = _kind(file.path_in_repo)
            self._largest[kind] = max(self._largest.get(kind, 0), file.upload_info.size)


def _kind(key: str) -> tuple[str, str]:
    """The folder above the streams', and the file name after its number. Objects of one kind have similar sizes."""
    return key.partition("/stream-")[0], key.rpartition("/")[2].partition(".")[2]


def _groups(keys: Iterable[str], sizes: _Sizes) -> Iterator[list[str]]:
    """The keys in groups of objects that are uploaded together."""
    group: list[str] = []
    size = 0
    for key in keys:
        if group and (len(group) == _GROUP_FILES or size + sizes.estimate(key) > _GROUP_BYTES):
            yield group
            group, size = [], 0
        group.append(key)
        size += sizes.estimate(key)
    if group:
        yield group


def _additions(storage: Storage, keys: Sequence[str]) -> Iterator[CommitOperationAdd]:
    """The objects, as files for a commit. Local ones are only read when they are uploaded."""
    if storage.directory is not None:
        yield from (CommitOperationAdd(key, storage.directory + key) for key in keys)
        return

    def check(key: str, content: bytes | None) -> bytes:
        if content is None:
            raise StoreInvalid(f"{storage.url(key)} is missing, although it is listed. {VERIFY_REMEDY}")
        return content

    for key, content in zip(keys, storage.read_checked(keys, check), strict=True):
        yield CommitOperationAdd(key, content)


def _is_new(added: CommitOperationAdd, stored: HubFile | None) -> bool:
    """Whether the repository has no such file, or one with different content."""
    if stored is None or stored.size != added.upload_info.size:
        return True
    if stored.sha256 is not None:
        return stored.sha256 != added.upload_info.sha256.hex()
    with added.as_file() as file:
        content = file.read()
    return stored.blob != hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class _Commits:
    """Uploads files, and commits them when there are enough.

    is_unfinished: whether the repository's root already marks the store as not complete. stale: keys that the first of
    several commits deletes.
    """

    def __init__(self, repository: HubRepository, root: StoreRoot, is_unfinished: bool, stale: Sequence[str]) -> None:
        self._repository = repository
        self._root = root
        self._is_unfinished = is_unfinished
        self._stale = stale
        self._deleted: set[str] = set()
        self._pending: list[CommitOperationAdd] = []
        self._small_bytes = 0

    def add(self, additions: Sequence[CommitOperationAdd]) -> None:
        if not additions:
            return
        self._repository.upload(additions)
        self._pending += additions
        self._small_bytes += sum(added.upload_info.size for added in additions if added.path_or_fileobj != b"")
        # The metadata of all arrays, which come first, must be in one commit: the root contains their digests.
        num_files = sum(not _is_metadata(added.path_in_repo) for added in self._pending)
        if num_files >= FILES_PER_COMMIT or self._small_bytes >= _SMALL_BYTES_PER_COMMIT:
            self._commit_part()

    def _commit_part(self) -> None:
        """Commits what was uploaded, with a root that marks the store as not complete."""
        operations: list[CommitOperationAdd | CommitOperationDelete] = list(self._pending)
        if not self._is_unfinished:
            operations.append(CommitOperationAdd(ROOT_KEY, self._root.unfinished().to_json()))
        replaced = {added.path_in_repo for added in self._pending}
        deletions = [key for key in self._stale if key not in replaced]
        operations += map(CommitOperationDelete, deletions)
        self._repository.commit(f"{len(self._pending)} objects of an activation store", operations)
        self._deleted.update(deletions)
        self._is_unfinished, self._stale = True, ()
        self._pending, self._small_bytes = [], 0

    def finish(self, surplus: Sequence[str], contents: Mapping[str, bytes]) -> None:
        """Makes the last commit, unless nothing has changed: the remaining files, `contents` by key, and deletions of
        `surplus` keys."""
        files = self._repository.files
        changed = [CommitOperationAdd(key, content) for key, content in contents.items() if files.read(key) != content]
        deletions = [CommitOperationDelete(key) for key in surplus if key not in self._deleted]
        if self._pending or deletions or changed:
            self._repository.commit("Activation store", [*self._pending, *deletions, *changed])
