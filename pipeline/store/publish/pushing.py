"""Pushing a finished store to a repository of the Hub, by several commits, of which an interruption may leave out the
last ones.

Objects are committed as a run writes them: the commit records after all else, then the tables of them, the root last.
Where one commit is not enough, the first one has a root that says that the store is not complete, and deletes the
records of blocks that a longer run has written again. So what an interruption leaves is an unfinished store with the
blocks whose records are there. What the repository has is not uploaded again: the Hub names files by their digests, and
keeps large files for the commit that follows. No state is kept on this side.
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
from pipeline.store.format.commits import COMMITS_PREFIX, CONSOLIDATED_KEY
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

# The Hub recommends commits of 100 files, but refuses more than 128 commits an hour. huggingface_hub's own uploads of
# folders begin with as many as this. Small files are a part of the commit's request.
FILES_PER_COMMIT = 250
_SMALL_BYTES_PER_COMMIT = 16 * MIB
_GROUP_FILES = 50  # that are uploaded together
_GROUP_BYTES = 256 * MIB  # of objects that are not local, and are held in memory meanwhile
MAX_FILES = 100_000  # that the Hub recommends for a repository

_REPO = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)

_LONGER = "Push the longer one, or choose another repository."
_NOT_A_STORE = re.compile(r"README\.md|LICENSE.*|\.gitattributes")  # what a repository for a new store may hold

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Pushed:
    """num_objects: of the store. num_uploaded, num_bytes: of the objects that the repository did not hold. commit: the
    branch's, afterwards."""

    num_objects: int
    num_uploaded: int
    num_bytes: int
    commit: str


def push_store(
    path: str, repo: str, branch: str = "main", private: bool | None = None, progress: Progress | None = None
) -> Pushed:
    """Makes the branch of a data set repository, which is created where there is none, hold the store and a card.

    `progress` is called with the number of objects that are done, and of all. Raises StoreInvalid for an unfinished
    store, StoreMismatch where the repository holds something else or a later state of the store, ConfigError for what
    the Hub refuses and for a `repo` without an owner, HubUnavailable and StoreError.
    """
    if not _REPO.fullmatch(repo):
        raise ConfigError(f"repo={repo!r:.200} is no name of a repository. Give its owner, too: repo=owner/name.")
    storage = Storage.open(path)
    text = storage.read(ROOT_KEY)
    root = require_root(storage)
    if not root.complete:
        raise StoreInvalid(
            f"{path} is not finished, and only a finished store is pushed. Run its job to the end, or declare it "
            f"complete: python -m pipeline.finalize store.path={path} force=true."
        )
    store = ActivationStore.open(storage)
    own = StoreKeys(root.arrays, [spec.name for spec in root.metadata.outputs])
    keys = _keys_to_push(storage, own)
    if len(keys) > MAX_FILES:
        log.warning(
            "%s has %s objects, and the Hub recommends fewer than %s files in a repository. A run with a larger "
            "store.shard_mib makes fewer.",
            *(path, f"{len(keys):,}", f"{MAX_FILES:,}"),
        )
    repository = open_repository(repo, branch, private)
    before = repository.files
    own_before = [key for key in before.files if own.is_own(key)]
    stored = _stored_root(before, root, repo)
    _require_all_records(own_before, keys, repo)
    repository.make_branch()
    is_unfinished = stored == root.unfinished()
    commits = _Commits(repository, root, is_unfinished, _stale(storage, before, own_before, set(keys)))
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
        raise StoreError(f"{path} was changed during the push. Run the same command again once it is finished.")
    present = before.read(CARD_KEY)
    readme = card(store, repo, branch, None if present is None else present.decode(errors="replace"))
    pushed = {*keys, ROOT_KEY}
    left = [key for key in own_before if key not in pushed]
    commits.finish(left, {CARD_KEY: readme.encode(), ROOT_KEY: text})
    return Pushed(len(keys), num_uploaded, num_bytes, repository.head)


def _keys_to_push(storage: Storage, own: StoreKeys) -> list[str]:
    """The keys of the store's objects but its root: the arrays' metadata first, commit records and then tables of them
    last. Claims, logs and what interrupted writes left behind are not among them."""
    keys = [key for key in storage.list_keys() if own.is_own(key) and key != ROOT_KEY]
    keys = [key for key in keys if not key.endswith(LOCK_SUFFIX) and not is_worker_key(key)]
    require_no_links(storage.directory, [*keys, ROOT_KEY])
    return sorted(keys, key=lambda key: (_is_table(key), key.startswith(COMMITS_PREFIX), not _is_metadata(key), key))


def _is_metadata(key: str) -> bool:
    return key.endswith("/zarr.json")


def _is_table(key: str) -> bool:
    """Whether an object repeats the commit records of several blocks."""
    return key.startswith(TABLES_PREFIX) or key == CONSOLIDATED_KEY


def _stored_root(files: HubFiles, root: StoreRoot, repo: str) -> StoreRoot | None:
    """The root of the same store, as the repository has it; None where the repository is for a new store. Raises
    StoreMismatch."""
    text = files.read(ROOT_KEY)
    if text is None:
        others = [key for key in files.files if not _NOT_A_STORE.fullmatch(key)]
        if others:
            raise StoreMismatch(
                f"repo={repo} holds other files, e.g. {others[0]}, and no store. Choose another repository."
            )
        return None
    try:
        stored = StoreRoot.from_json(text, files.url)
    except StoreInvalid as error:
        raise StoreMismatch(f"repo={repo} cannot take the store: {error}") from error
    if stored.metadata.fingerprint() != root.metadata.fingerprint():
        different = ", ".join(pair.key for pair in stored.metadata.differences(root.metadata)[:3])
        raise StoreMismatch(
            f"repo={repo} holds the store of another configuration, which differs in {different}. Choose another "
            f"repository."
        )
    if larger(stored.target, root.target) != root.target:
        raise StoreMismatch(
            f"repo={repo} holds more of this store: its target is {stored.target}, and that of the pushed one "
            f"{root.target}. {_LONGER}"
        )
    return stored


def _require_all_records(own_before: Iterable[str], keys: Collection[str], repo: str) -> None:
    """Raises StoreMismatch where the repository has the record of a block that the store lacks."""
    records = {key for key in own_before if key.startswith(COMMITS_PREFIX) and key.endswith(".json")}
    if lacking := sorted(records.difference(keys)):
        raise StoreMismatch(
            f"repo={repo} holds more of this store: {len(lacking)} blocks, e.g. {lacking[0]}. {_LONGER}"
        )


def _stale(storage: Storage, before: HubFiles, own_before: Iterable[str], keys: Collection[str]) -> list[str]:
    """The commit records and block tables of the repository that the store has with another content, or not at all.
    The objects of such blocks are about to be replaced."""
    stored = {key for key in own_before if key.startswith((COMMITS_PREFIX, TABLES_PREFIX))}
    present = sorted(stored.intersection(keys))
    changed = [
        file.path_in_repo for file in _additions(storage, present) if _is_new(file, before.files[file.path_in_repo])
    ]
    return [*changed, *sorted(stored.difference(keys))]


class _Sizes:
    """Bytes that objects may have: shards without compression, others at most as many as the largest one of their kind
    up to now. One of a kind that was not yet seen counts as a whole group."""

    def __init__(self, store: ActivationStore) -> None:
        arrays = store.arrays.values()
        self._shard = max(math.prod(a.chunk_layout.write_chunk.shape) * a.dtype.numpy_dtype.itemsize for a in arrays)
        self._largest: dict[tuple[str, str], int] = {}

    def of(self, key: str) -> int:
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
    """What objects of about the same size have in common: the folder of all streams, and the name after its number."""
    return key.partition("/stream-")[0], key.rpartition("/")[2].partition(".")[2]


def _groups(keys: Iterable[str], sizes: _Sizes) -> Iterator[list[str]]:
    """The keys in groups of objects that are uploaded together."""
    group: list[str] = []
    size = 0
    for key in keys:
        if group and (len(group) == _GROUP_FILES or size + sizes.of(key) > _GROUP_BYTES):
            yield group
            group, size = [], 0
        group.append(key)
        size += sizes.of(key)
    if group:
        yield group


def _additions(storage: Storage, keys: Sequence[str]) -> Iterator[CommitOperationAdd]:
    """The objects, as files of a commit. Local ones are read when they are uploaded."""
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
    """Whether the repository has no such file, or one of another content."""
    if stored is None or stored.size != added.upload_info.size:
        return True
    if stored.sha256 is not None:
        return stored.sha256 != added.upload_info.sha256.hex()
    with added.as_file() as file:
        content = file.read()
    return stored.blob != hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class _Commits:
    """Uploads files, and commits them when they are many.

    is_unfinished: whether the repository has the root that says that the store is not complete. stale: keys that the
    first one of several commits deletes.
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
        # The metadata of all arrays, which come first, are in one commit: the root names their digests.
        num_files = sum(not _is_metadata(added.path_in_repo) for added in self._pending)
        if num_files >= FILES_PER_COMMIT or self._small_bytes >= _SMALL_BYTES_PER_COMMIT:
            self._commit_part()

    def _commit_part(self) -> None:
        """Commits what was uploaded. The root says from now on that the store is not complete."""
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

    def finish(self, left: Sequence[str], contents: Mapping[str, bytes]) -> None:
        """The last commit, unless nothing has changed: the rest, the deletion of keys that are `left`, and files by
        key."""
        files = self._repository.files
        changed = [CommitOperationAdd(key, content) for key, content in contents.items() if files.read(key) != content]
        deletions = [CommitOperationDelete(key) for key in left if key not in self._deleted]
        if self._pending or deletions or changed:
            self._repository.commit("Activation store", [*self._pending, *deletions, *changed])
