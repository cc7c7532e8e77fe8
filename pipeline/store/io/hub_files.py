"""The files of a dataset repository of the Hugging Face Hub, at one commit."""

import re
from bisect import bisect_left
from functools import cache, cached_property
from threading import Lock
from typing import NamedTuple
from urllib.parse import quote, unquote, urljoin, urlsplit

import huggingface_hub
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import build_hf_headers, get_session, httpx

from pipeline.core.addresses import HUB_SCHEME
from pipeline.core.errors import StoreInvalid
from pipeline.core.hub import dataset_commit, hub_errors, repeat_requests

# As in fsspec: a slash in a revision is written %2F, except in refs/pr/1 and the like.
_ADDRESS = re.compile(rf"{HUB_SCHEME}datasets/([\w.-]+/[\w.-]+)(?:@(refs/(?:convert|pr)/[^/\s]+|[^/@\s]+))?(?:/(.*))?")
_KEY = "store.path"  # for messages
_EXPIRED = (400, 401, 403, 404, 410)  # possible answers from an expired signed URL
_MAX_REDIRECTIONS = 10  # from the Hub to itself
_MAX_LOCATIONS = 1 << 14  # with URLs of about 1 KiB each


class HubFile(NamedTuple):
    """A file on the Hub. size: in bytes. blob: git's sha1, for a small file. sha256: for a large file, else None."""

    size: int
    blob: str
    sha256: str | None


class HubAnswer(NamedTuple):
    """status: HTTP 200, 206, 404 (no such file) or 416. content_range: the value of the Content-Range header."""

    status: int
    content: bytes
    content_range: str | None


class _Range(NamedTuple):
    """The requested bytes of a file. Storage behind the Hub may not support suffix ranges, so a suffix is requested by
    its first and last byte, for which the file's size is needed.

    header: the Range header; None for all bytes and for a suffix. suffix: how many of the last bytes are requested.
    """

    header: str | None
    suffix: int | None

    @classmethod
    def parse(cls, header: str | None) -> "_Range":
        if header is None or not header.startswith("bytes=-"):
            return cls(header, None)
        return cls(None, int(header.removeprefix("bytes=-")))

    def headers(self, size: int | None) -> dict[str, str]:
        """Headers of a request for these bytes; for all bytes, if this is a suffix and the file's size is None."""
        header = self.header
        if self.suffix is not None and size is not None:
            header = f"bytes={max(0, size - self.suffix)}-{size - 1}"
        return {"Accept-Encoding": "identity"} | ({} if header is None else {"Range": header})

    def extract(self, answer: httpx.Response) -> HubAnswer:
        """The requested bytes, from the answer to a request with such headers."""
        content = answer.content
        if self.suffix is None or answer.status_code != 200:
            return HubAnswer(answer.status_code, content, answer.headers.get("Content-Range"))
        first = max(0, len(content) - self.suffix)
        return HubAnswer(206, content[first:], f"bytes {first}-{len(content) - 1}/{len(content)}")


class _Location(NamedTuple):
    """A large file in the storage behind the Hub: its signed URL, and its size in bytes."""

    url: str
    size: int

    def get(self, byte_range: _Range) -> httpx.Response:
        return get_session().get(self.url, headers=byte_range.headers(self.size))


class HubFiles:
    """The files in a folder of a dataset repository, at one commit. A file's key is its path below the folder.

    url: hf:// with the commit. Methods raise StoreInvalid if the Hub refuses access, and HubUnavailable if it cannot be
    reached.
    """

    def __init__(self, repo: str, commit: str, folder: str = "") -> None:
        self.url = f"{HUB_SCHEME}datasets/{repo}@{commit}/{folder}".rstrip("/")
        self._unpinned = f"{HUB_SCHEME}datasets/{repo}/{folder}".rstrip("/")  # for messages, which add the commit
        self._repo = repo
        self._commit = commit
        self._folder_prefix = f"{folder}/" if folder else ""
        self._listing = Lock()
        self._locations: dict[str, _Location] = {}

    def get(self, key: str, byte_range: str | None = None) -> HubAnswer:
        """The answer to a request for a file. `byte_range`: the value of a Range header.

        The Hub redirects requests for a large file to a URL in its storage that is signed for an hour. Later requests
        use that URL directly, since the Hub limits the number of requests.
        """
        repeat_requests()
        wanted = _Range.parse(byte_range)
        with hub_errors(f"{self._unpinned}/{key}", self._commit, _KEY, StoreInvalid):
            if (location := self._locations.get(key)) is not None:
                answer = location.get(wanted)
                if answer.status_code not in _EXPIRED:
                    return wanted.extract(answer)
            answer = self._request(key, wanted)
            if answer.is_redirect:
                location = _Location(answer.headers["Location"], self._size(key, answer))
                answer = location.get(wanted)
                if len(self._locations) == _MAX_LOCATIONS:
                    self._locations.clear()
                self._locations[key] = location
            if answer.status_code != 416 and not self._is_absent(key, answer):
                huggingface_hub.utils.hf_raise_for_status(answer)
            return wanted.extract(answer)

    def read(self, key: str) -> bytes | None:
        """A file's bytes; None if there is no such file."""
        answer = self.get(key)
        return None if answer.status == 404 else answer.content

    def _is_absent(self, key: str, answer: httpx.Response) -> bool:
        """Whether the answer means that there is no such file. Mirrors of the Hub do not say what was not found."""
        if answer.status_code != 404:
            return False
        code = answer.headers.get("X-Error-Code")
        return code == "EntryNotFound" or (code is None and key not in self.files)

    def _request(self, key: str, byte_range: _Range) -> httpx.Response:
        """The Hub's own answer, which may be a redirection to its storage."""
        headers, url = build_hf_headers() | byte_range.headers(None), self._file_url(key)
        endpoint = urlsplit(url).netloc
        for _ in range(_MAX_REDIRECTIONS):
            answer = get_session().get(url, headers=headers, follow_redirects=False)
            if not answer.is_redirect:
                return answer
            if not answer.has_redirect_location:
                break
            url = urljoin(url, answer.headers["Location"])
            if urlsplit(url).netloc != endpoint:
                return answer
        raise StoreInvalid(
            f"{self.url}/{key} cannot be read: the Hub redirects to itself, or without a location (HTTP status "
            f"{answer.status_code}). Check HF_ENDPOINT."
        )

    def _size(self, key: str, answer: httpx.Response) -> int:
        """The size of a large file in bytes, from the redirection to it."""
        size = answer.headers.get(huggingface_hub.constants.HUGGINGFACE_HEADER_X_LINKED_SIZE, "")
        return int(size) if size.isdecimal() else self.files[key].size

    def _file_url(self, key: str) -> str:
        endpoint = huggingface_hub.constants.ENDPOINT
        return f"{endpoint}/datasets/{self._repo}/resolve/{self._commit}/{quote(self._folder_prefix + key)}"

    def list_range(self, prefix: str, first: str, after: str) -> list[str]:
        """The keys that begin with `prefix`, without it, from `first` to before `after` (empty: to the end), sorted."""
        keys = self._keys
        start, stop = bisect_left(keys, prefix + first), bisect_left(keys, prefix + after) if after else len(keys)
        return [key.removeprefix(prefix) for key in keys[start:stop] if key.startswith(prefix)]

    @property
    def files(self) -> dict[str, HubFile]:
        """All files by key, sorted by key. They are listed once, since a commit does not change."""
        with self._listing:
            return self._files

    @cached_property
    def _keys(self) -> list[str]:
        return list(self.files)

    @cached_property
    def _files(self) -> dict[str, HubFile]:
        folder = self._folder_prefix.rstrip("/") or None
        with hub_errors(self._unpinned, self._commit, _KEY, StoreInvalid):
            repeat_requests()
            entries = huggingface_hub.HfApi().list_repo_tree(
                self._repo, folder, recursive=True, revision=self._commit, repo_type="dataset"
            )
            files = {
                entry.path.removeprefix(self._folder_prefix): HubFile(
                    entry.size, entry.blob_id, entry.lfs and entry.lfs.sha256
                )
                for entry in entries
                if isinstance(entry, RepoFile)
            }
        return dict(sorted(files.items()))


def open_hub_files(path: str) -> HubFiles:
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
    return _hub_files(repo, commit, (folder or "").strip("/"))


@cache
def _hub_files(repo: str, commit: str, folder: str) -> HubFiles:
    return HubFiles(repo, commit, folder)
