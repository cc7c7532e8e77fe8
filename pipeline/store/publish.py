"""Pushes a finished store to a repository on the Hub, in one or several commits, so that it can be interrupted.

The root is committed last. Until then the root of a shorter version of the store stays, which is valid since no object
of a block ever changes; a repository without a store is given one that is not complete. Nothing is deleted. Files that
the repository has are not uploaded again: the Hub lists their digests. No state is kept locally. (huggingface_hub's own
uploads of folders only commit in several steps with Xet, and from a local folder.)
"""

import hashlib
import os
import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from urllib.parse import quote

import huggingface_hub
from huggingface_hub import CommitOperationAdd
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import httpx

from pipeline.core.errors import ConfigError, StoreError, StoreInvalid, StoreMismatch
from pipeline.core.hub import HubUnavailable, is_hub_id, repeat_requests
from pipeline.core.requests import brief_cause, is_transient, repeated
from pipeline.store.format.arrays import own_keys
from pipeline.store.format.commits import COMMITS_PREFIX
from pipeline.store.format.keys import JOBS_PREFIX
from pipeline.store.format.metadata import ROOT_KEY, StoreMetadata, StoreRoot, require_root
from pipeline.store.format.tables import TABLES_PREFIX
from pipeline.store.io.failures import VERIFY_REMEDY, storage_errors
from pipeline.store.io.hub_files import HubFiles
from pipeline.store.io.local_files import LOCK_SUFFIX
from pipeline.store.io.storage import Storage
from pipeline.store.read.reader import ActivationStore

# The Hub recommends 100 files per commit, but allows only 128 commits per hour. huggingface_hub's uploads of folders
# start with this number, too.
FILES_PER_COMMIT = 250
_GROUP, _REMOTE_GROUP = 50, 8  # objects that are uploaded together; those of a remote store are held in memory

_REPO = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_NOT_A_STORE = re.compile(r"README\.md|LICENSE.*|\.gitattributes")  # allowed in a repository for a new store

CARD_KEY = "README.md"

# The viewer would show the document tables as the dataset.
_FRONT_MATTER = "---\ntags: [activations, interpretability, zarr]\nviewer: false\n---"
_BEGIN = "<!-- begin activation store: python -m pipeline.push replaces the lines from here to the end mark -->"
_END = "<!-- end activation store -->"
# From the last of several begin marks: text after one that lost its end mark is the user's.
_MARKED = re.compile(f"{re.escape(_BEGIN)}((?!{re.escape(_BEGIN)}).)*{re.escape(_END)}", re.DOTALL)


Progress = Callable[[int, int], None]


def push_store(path: str, repo: str, branch: str, private: bool | None, progress: Progress) -> str:
    """Pushes the store at `path`, with a card, to a branch of a dataset repository. Creates these if needed. Returns a
    line about what was pushed.

    progress: called with the number of finished objects and the total. Raises StoreInvalid for an unfinished store;
    StoreMismatch if the repository has something else, or more of the store; ConfigError if the Hub refuses a request,
    and for a `repo` without an owner; HubUnavailable; StoreError.
    """
    if not _REPO.fullmatch(repo):
        raise ConfigError(f"repo={repo!r:.200} is not a repository name, expected repo=owner/name.")
    storage = Storage.open(path)
    root = require_root(storage)
    if not root.complete:
        raise StoreInvalid(
            f"{path} is unfinished, and only finished stores can be pushed. Run its job to the end, or mark it as "
            f"complete: python -m pipeline.finalize store.path={path} force=true."
        )
    store, keys = ActivationStore.open(storage), _keys_to_push(storage, root)
    _require_all(store, keys)
    repository = _open_repository(repo, branch, private)
    before = repository.files
    _require_same_store(storage, root, keys, before, repo)
    readme = _card(store, repo, branch, (before.get(CARD_KEY) or b"").decode(errors="replace"))
    partial_root = replace(root, complete=False, summary=None)  # whose blocks are those of the pushed records
    first_root = [] if ROOT_KEY in before.files else [CommitOperationAdd(ROOT_KEY, partial_root.to_json())]
    pending: list[CommitOperationAdd] = []
    num_done = num_new = 0
    for group in _groups(storage, keys):
        new = [file for file in group if _is_new(file, before.files.get(file.path_in_repo))]
        repository.upload(new)  # drops the content of large files
        pending += new
        if len(pending) >= FILES_PER_COMMIT:
            repository.commit(f"{len(pending)} objects of an activation store", [*pending, *first_root])
            pending, first_root = [], []
        num_done, num_new = num_done + len(group), num_new + len(new)
        progress(num_done, len(keys))
    last = [CommitOperationAdd(CARD_KEY, readme.encode()), CommitOperationAdd(ROOT_KEY, root.to_json())]
    pending += [file for file in last if _is_new(file, before.files.get(file.path_in_repo))]
    if pending:
        repository.commit("Activation store", pending)
    return f"{repository.files.url.rstrip('/')}: {len(keys):,} objects, {num_new:,} of them new"


def _keys_to_push(storage: Storage, root: StoreRoot) -> list[str]:
    """The keys of the store's objects except its root: the commit records after what they describe, and then the
    arrays' metadata. Without leases, logs and leftovers of interrupted writes."""
    keys = [key for key in filter(own_keys(root), storage.list_keys()) if key != ROOT_KEY]
    keys = [key for key in keys if not key.endswith(LOCK_SUFFIX) and not key.startswith(JOBS_PREFIX)]
    return sorted(keys, key=lambda key: (key.endswith("/zarr.json"), key.startswith(COMMITS_PREFIX), key))


def _require_all(store: ActivationStore, keys: Sequence[str]) -> None:
    """Raises StoreInvalid unless the listed `keys` have an object of each kind for each block."""
    listed = Counter(key.partition("/")[0] for key in keys if not key.endswith("/zarr.json"))
    for folder in (COMMITS_PREFIX.rstrip("/"), TABLES_PREFIX.rstrip("/"), *store.arrays):
        if listed[folder] < len(store.blocks):
            raise StoreInvalid(
                f"{store.path}/{folder} has {listed[folder]} objects for {len(store.blocks)} blocks, or is a link. "
                f"{VERIFY_REMEDY}"
            )


def _require_same_store(storage: Storage, root: StoreRoot, keys: Sequence[str], stored: HubFiles, repo: str) -> None:
    """Raises StoreMismatch, or StoreInvalid, if the repository has something other than this store or a part of it."""
    other = "Choose a different repository."
    text = stored.get(ROOT_KEY)
    if text is None:
        if others := [key for key in stored.files if not _NOT_A_STORE.fullmatch(key)]:
            raise StoreMismatch(f"repo={repo} has other files, e.g. {others[0]}, but no store. {other}")
        return
    pushed = StoreRoot.from_json(text, stored.url)
    if pushed.metadata.fingerprint() != root.metadata.fingerprint():
        different = ", ".join(pair.key for pair in pushed.metadata.differences(root.metadata)[:3])
        raise StoreMismatch(f"repo={repo} has a store whose configuration differs in {different}. {other}")
    records = [key for key in stored.files if key.startswith(COMMITS_PREFIX)]
    if lacking := sorted(set(records).difference(keys)):
        raise StoreMismatch(f"repo={repo} has {len(lacking)} more blocks of this store, e.g. {lacking[0]}. {other}")
    for record in chain.from_iterable(_groups(storage, records)):
        if _is_new(record, stored.files[record.path_in_repo]):
            raise StoreMismatch(f"repo={repo} has the store of another run: {record.path_in_repo} differs. {other}")


def _groups(storage: Storage, keys: Sequence[str]) -> Iterator[list[CommitOperationAdd]]:
    """The objects, as files for a commit, in groups that are uploaded together. Local files are read when they are
    uploaded."""
    is_local = storage.directory is not None

    def addition(key: str, content: bytes | None) -> CommitOperationAdd:
        storage.require_file(key)
        path = f"{storage.directory}{key}"
        if content is None and not (is_local and os.path.exists(path)):
            raise StoreInvalid(f"{storage.url(key)} is missing, although it is listed. {VERIFY_REMEDY}")
        with storage_errors(storage.url(key)):
            return CommitOperationAdd(key, path if content is None else content)

    size = _GROUP if is_local else _REMOTE_GROUP
    for first in range(0, len(keys), size):
        group = keys[first : first + size]
        yield [addition(key, None) for key in group] if is_local else list(storage.read_checked(group, addition))


def _is_new(added: CommitOperationAdd, stored: RepoFile | None) -> bool:
    """Whether the repository has no such file, or one with different content."""
    if stored is None or stored.size != added.upload_info.size:
        return True
    if stored.lfs is not None:
        return stored.lfs.sha256 != added.upload_info.sha256.hex()
    with added.as_file() as file:
        content = file.read()
    return stored.blob_id != hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class _Repository:
    """A branch of a dataset repository, at its latest commit `head`. Use `_open_repository`.

    Methods raise ConfigError if the Hub refuses a request, HubUnavailable if it cannot be reached, and StoreError if
    somebody else has changed the branch.
    """

    def __init__(self, repo: str, branch: str, head: str) -> None:
        self.head = head
        self._repo = repo
        self._branch = {"repo_id": repo, "repo_type": "dataset", "revision": branch}
        self._api = huggingface_hub.HfApi()

    @property
    def files(self) -> HubFiles:
        """The files at `head`."""
        return HubFiles(self._repo, self.head)

    def upload(self, additions: Sequence[CommitOperationAdd]) -> None:
        """Uploads the large ones of these files, as the Hub decides, and drops their content. The Hub keeps them for a
        later commit. Files that it already has, from any commit or interrupted upload, are not sent again."""

        def send() -> None:
            try:
                self._api.preupload_lfs_files(additions=additions, gitignore_content="", **self._branch)
            except RuntimeError as error:
                raise (error.__cause__ or error) from None

        with _errors(self._repo):
            repeated(f"the upload to {self._repo}", send)

    def commit(self, title: str, additions: Sequence[CommitOperationAdd]) -> None:
        """Commits files, after uploading those that `upload` has not."""
        self.upload(additions)
        title = f"{title} [{secrets.token_hex(4)}]"
        with _errors(self._repo):
            try:
                self.head = self._api.create_commit(
                    operations=additions, commit_message=title, parent_commit=self.head, **self._branch
                ).oid
            except (HubUnavailable, HfHubHTTPError) as error:
                last = self._api.list_repo_commits(**self._branch)[0]
                if last.title != title:
                    if last.commit_id == self.head:
                        raise
                    raise StoreError(
                        f"{self._repo} was changed by another client during the push (commit {last.commit_id}: "
                        f"{last.title}). Run the same command again; it continues."
                    ) from error
                self.head = last.commit_id  # only the answer was lost


def _open_repository(repo: str, branch: str, private: bool | None) -> _Repository:
    """Opens a branch of a repository; creates the repository, and the branch from `main`, if they do not exist.

    private: whether a new repository is private; None for the owner's default on the Hub.
    Raises ConfigError if the Hub refuses a request, or if `private` is true and the repository is public, and
    HubUnavailable.
    """
    repeat_requests()
    api = huggingface_hub.HfApi()
    with _errors(repo):
        api.create_repo(repo, repo_type="dataset", private=private, exist_ok=True)
        if private and not api.dataset_info(repo).private:
            raise ConfigError(
                f"private=true, but {repo} is public. Remove the setting, or make the repository private."
            )
        if branch != "main":
            api.create_branch(repo, branch=branch, repo_type="dataset", exist_ok=True)
        return _Repository(repo, branch, api.dataset_info(repo, revision=branch).sha)


@contextmanager
def _errors(repo: str) -> Iterator[None]:
    """Turns errors of calls that change a repository into ConfigError or HubUnavailable."""
    try:
        yield
    except (HubUnavailable, httpx.HTTPError, OSError, ValueError, RuntimeError) as error:
        cause = f"{brief_cause(error):.500}"
        # They were retried; RuntimeError is from hf_xet, which retries for minutes.
        if isinstance(error, HubUnavailable | RuntimeError) or is_transient(error):
            raise HubUnavailable(
                f"the push to {repo} failed: {cause} Check the network, and run the same command again; it continues."
            ) from error
        raise ConfigError(
            f"repo={repo:.200}: the Hub refuses the push ({cause}). Check the spelling, and log in with a token that "
            "has write access: `hf auth login`."
        ) from error


def _card(store: ActivationStore, repo: str, revision: str, present: str) -> str:
    """The text of the card. `present`: the repository's card, or nothing. Its text outside of the marks is kept."""
    description = f"{_BEGIN}\n{_description(store, repo, revision)}\n{_END}"
    text = present or f"{_FRONT_MATTER}\n# Activations of {_name(store.metadata, 'model')}\n"
    changed, count = _MARKED.subn(lambda _: description, text)
    return changed if count else f"{text.rstrip()}\n\n{description}\n"


def _description(store: ActivationStore, repo: str, revision: str) -> str:
    suffix = "" if revision == "main" else f"@{quote(revision, safe='')}"
    arrays = [
        f"| `{name}` | {' x '.join(f'{n:,}' for n in array.shape)} | {array.dtype.name} |"
        for name, array in store.arrays.items()
    ]
    return f"""
Activations of `{_name(store.metadata, "model")}` on `{_name(store.metadata, "data")}`.

| | |
|---|---|
| tokens | {store.num_tokens:,} |
| tokens with activations | {store.num_activations:,} |
| rows | {len(store.rows):,} of {store.length:,} positions |
| blocks | {len(store.blocks):,} |
| fingerprint | `{store.metadata.fingerprint()}` |

| array | shape | dtype |
|---|---|---|
{chr(10).join(arrays)}

    from pipeline.store import ActivationStore

    store = ActivationStore.open("hf://datasets/{repo}{suffix}")
    for batch in store.batches({"store.keys" if store.keys else "[], features=True"}, batch_size=4096, shuffle=True):
        batch.{"activations" if store.keys else "features"}, batch.tokens, batch.documents

The store is a Zarr v3 group, which zarr-python and xarray can also read. Its attributes contain the configuration."""


def _name(metadata: StoreMetadata, group: str) -> str:
    """The name of the model or the data in the store's configuration: a Hub id, or the last part of a path, since the
    rest of a path may be private."""
    values = metadata.config.get(group, {})
    path = values.get("path") or values.get("repo") or f"unnamed {group}"
    return path if is_hub_id(path) else path.rstrip("/").rpartition("/")[2]
