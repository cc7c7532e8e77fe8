"""The files of a dataset repository of the Hugging Face Hub, at one commit.

They are not read by huggingface_hub's file system, which asks the Hub for each range of a file and is redirected each
time: the Hub limits the number of requests.
"""

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import NoReturn
from urllib.parse import quote, unquote, urlsplit

import huggingface_hub
import tensorstore as ts
from huggingface_hub.errors import EntryNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status, httpx

from pipeline.core.addresses import HUB_REMEDY, HUB_SCHEME
from pipeline.core.errors import StoreError, StoreInvalid
from pipeline.core.hub import dataset_commit, hub_errors, repeat_requests

# As in fsspec: a slash in a revision is written %2F, except in refs/pr/1 and the like.
_ADDRESS = re.compile(rf"{HUB_SCHEME}datasets/([\w.-]+/[\w.-]+)(?:@(refs/(?:convert|pr)/[^/\s]+|[^/@\s]+))?(?:/(.*))?")
_KEY = "store.path"  # for messages
_EXPIRED = (400, 401, 403, 404, 410)  # possible answers from an expired signed URL
_THREADS = 32  # as many as TensorStore's requests to other storage


class HubFiles:
    """The files in a folder of a dataset repository, at one commit. A file's key is its path below the folder.

    Has those methods of `tensorstore.KvStore` that read, and refuses the others. The Hub's errors are StoreInvalid if
    it refuses access, and HubUnavailable if it cannot be reached. url: hf:// with the commit, and a slash at the end.
    """

    def __init__(self, repo: str, commit: str, folder: str = "", threads: int | None = None) -> None:
        self._repo = repo
        self._commit = commit
        self._prefix = f"{folder}/" if folder else ""
        self.url = f"{HUB_SCHEME}datasets/{repo}@{commit}/{self._prefix}"
        self._locations: dict[str, tuple[str, int]] = {}
        self._threads = ThreadPoolExecutor(threads or _THREADS, "hub")
        repeat_requests()

    def get(self, key: str, byte_range: slice | None = None) -> bytes | None:
        """A file's bytes; None if there is no such file. `byte_range`: as for `read`."""
        with hub_errors(f"{self._repo}/{self._prefix}{key}", self._commit, _KEY, StoreInvalid):
            try:
                answer = self._answer(key, byte_range)
                hf_raise_for_status(answer)
                answer.raise_for_status()  # which refuses a redirection to nowhere, too
            except EntryNotFoundError:
                return None
        is_exact = byte_range is None or answer.status_code == 206
        return answer.content if is_exact else answer.content[byte_range]

    def _answer(self, key: str, byte_range: slice | None) -> httpx.Response:
        if byte_range is None:
            return get_session().get(self._file_url(key), headers=build_hf_headers())
        if (location := self._locations.get(key)) is not None:
            answer = _request_range(*location, byte_range)
            if answer.status_code not in _EXPIRED:
                return answer
        return _request_range(*self._locate(key), byte_range)

    def _locate(self, key: str) -> tuple[str, int]:
        """A file's URL and size. The Hub redirects to a URL in its storage that is signed for an hour: later requests
        use that URL, since the Hub limits the number of requests."""
        found = huggingface_hub.get_hf_file_metadata(self._file_url(key))
        self._locations[key] = found.location, self.files[key].size if found.size is None else found.size
        return self._locations[key]

    def _file_url(self, key: str) -> str:
        endpoint = huggingface_hub.constants.ENDPOINT
        return f"{endpoint}/datasets/{self._repo}/resolve/{self._commit}/{quote(self._prefix + key)}"

    def read(self, key: str, byte_range: slice | None = None) -> Future[ts.KvStore.ReadResult]:
        """Starts reading a file, or a range of its bytes: slice(start, stop) or slice(-number, None)."""
        return self._threads.submit(self._read, key, byte_range)

    def _read(self, key: str, byte_range: slice | None) -> ts.KvStore.ReadResult:
        content = self.get(key, byte_range)
        return ts.KvStore.ReadResult("missing") if content is None else ts.KvStore.ReadResult("value", content)

    def list(self, keys: ts.KvStore.KeyRange) -> Future[Sequence[bytes]]:
        """Lists the keys in a range, sorted."""
        first, after = keys.inclusive_min, keys.exclusive_max
        listed: Future[Sequence[bytes]] = Future()
        listed.set_result([key for key in map(str.encode, self.files) if first <= key and (key < after or not after)])
        return listed

    @cached_property
    def files(self) -> Mapping[str, RepoFile]:
        """All files by key, sorted by key. They are listed once, since a commit does not change."""
        with hub_errors(self._repo, self._commit, _KEY, StoreInvalid):
            entries = huggingface_hub.HfApi().list_repo_tree(
                self._repo, self._prefix.rstrip("/") or None, recursive=True, revision=self._commit, repo_type="dataset"
            )
            files = {entry.path.removeprefix(self._prefix): entry for entry in entries if isinstance(entry, RepoFile)}
        return dict(sorted(files.items()))

    def write(self, *_: object, **__: object) -> NoReturn:
        raise StoreInvalid(f"{self.url} is on the Hub, where stores are read-only. {HUB_REMEDY}")

    def __truediv__(self, folder: str) -> NoReturn:
        raise StoreError(
            f"{self.url}{folder} is on the Hub, where TensorStore cannot open arrays. Download the store and open the "
            f"copy: hf download {self._repo} --repo-type dataset --revision {self._commit} --local-dir store."
        )


def _request_range(url: str, size: int, byte_range: slice) -> httpx.Response:
    """Requests bytes of a file. A suffix is requested by its first and last byte: the storage behind the Hub need not
    support other ranges."""
    start, stop, _ = byte_range.indices(size)
    if start >= stop or (byte_range.stop or size) > size:
        raise ValueError(f"OUT_OF_RANGE: bytes {byte_range.start} to {byte_range.stop} of {size}")  # as TensorStore
    is_hub = urlsplit(url).netloc == urlsplit(huggingface_hub.constants.ENDPOINT).netloc
    headers = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
    return get_session().get(url, headers=headers | (build_hf_headers() if is_hub else {}))


def open_hub_files(path: str, threads: int | None = None) -> HubFiles:
    """The files at hf://datasets/owner/name[@revision][/folder], at the revision's current commit. The default revision
    is main.

    Raises StoreInvalid for any other path and if the Hub refuses access, and HubUnavailable.
    """
    address = _ADDRESS.fullmatch(path)
    if address is None:
        raise StoreInvalid(
            f"the store's path is {path!r}, which is not a dataset of the Hub. Expected hf://datasets/owner/name or "
            "hf://datasets/owner/name@revision."
        )
    repo, revision, folder = address.groups()
    commit = dataset_commit(repo, revision and unquote(revision), _KEY, StoreInvalid)
    return HubFiles(repo, commit, (folder or "").strip("/"), threads)
