"""The files of a data set repository of the Hugging Face Hub, at one commit."""

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

# As fsspec writes it: a slash in a revision is %2F, but in refs/pr/1 and such.
_ADDRESS = re.compile(rf"{HUB_SCHEME}datasets/([\w.-]+/[\w.-]+)(?:@(refs/(?:convert|pr)/[^/\s]+|[^/@\s]+))?(?:/(.*))?")
_KEY = "store.path"  # for messages
_EXPIRED = (400, 401, 403, 404, 410)  # what a signed address may answer when its hour is over
_MAX_REDIRECTIONS = 10  # of the Hub to itself
_MAX_PLACES = 1 << 14  # addresses, of about 1 KiB each


class HubFile(NamedTuple):
    """size: in bytes. blob: git's sha1 of a small file. sha256: of a large one, else None."""

    size: int
    blob: str
    sha256: str | None


class HubAnswer(NamedTuple):
    """status: HTTP's 200, 206, 404 where there is no such file, or 416. content_range: the value of HTTP's header."""

    status: int
    content: bytes
    content_range: str | None


class _Range(NamedTuple):
    """The bytes of a file that a request is for. Not every storage behind the Hub is known to have suffix ranges, so a
    suffix is asked for by numbers, which takes the file's size.

    header: of HTTP; None for all bytes, and for a suffix. suffix: the last bytes of the file, how many.
    """

    header: str | None
    suffix: int | None

    @classmethod
    def parse(cls, header: str | None) -> "_Range":
        if header is None or not header.startswith("bytes=-"):
            return cls(header, None)
        return cls(None, int(header.removeprefix("bytes=-")))

    def headers(self, size: int | None) -> dict[str, str]:
        """Headers of a request for the bytes, or, for a suffix without the file's size, for all."""
        header = self.header
        if self.suffix is not None and size is not None:
            header = f"bytes={max(0, size - self.suffix)}-{size - 1}"
        return {"Accept-Encoding": "identity"} | ({} if header is None else {"Range": header})

    def of(self, answer: httpx.Response) -> HubAnswer:
        """The bytes out of the answer to a request with such headers."""
        content = answer.content
        if self.suffix is None or answer.status_code != 200:
            return HubAnswer(answer.status_code, content, answer.headers.get("Content-Range"))
        first = max(0, len(content) - self.suffix)
        return HubAnswer(206, content[first:], f"bytes {first}-{len(content) - 1}/{len(content)}")


class _Place(NamedTuple):
    """Where a large file is: a signed address in a storage, and its size."""

    address: str
    size: int

    def get(self, wanted: _Range) -> httpx.Response:
        return get_session().get(self.address, headers=wanted.headers(self.size))


class HubFiles:
    """The files in a folder of a data set repository, at one commit, by key: the path below the folder.

    url: hf:// with the commit, by which the same files are found again. Methods raise StoreInvalid for what the Hub
    does not give out, HubUnavailable when it cannot be reached.
    """

    def __init__(self, repo: str, commit: str, folder: str = "") -> None:
        self.url = f"{HUB_SCHEME}datasets/{repo}@{commit}/{folder}".rstrip("/")
        self._unpinned = f"{HUB_SCHEME}datasets/{repo}/{folder}".rstrip("/")  # for messages, which name the commit
        self._repo = repo
        self._commit = commit
        self._start = f"{folder}/" if folder else ""
        self._asking = Lock()
        self._places: dict[str, _Place] = {}

    def get(self, key: str, byte_range: str | None = None) -> HubAnswer:
        """The answer to a request for a file, or for a range of its bytes (the value of HTTP's header).

        The Hub redirects requests for a large file to an address in a storage, which is signed for an hour. Later
        requests go there at once: the Hub limits how many it answers.
        """
        repeat_requests()
        wanted = _Range.parse(byte_range)
        with hub_errors(f"{self._unpinned}/{key}", self._commit, _KEY, StoreInvalid):
            if (place := self._places.get(key)) is not None:
                answer = place.get(wanted)
                if answer.status_code not in _EXPIRED:
                    return wanted.of(answer)
            answer = self._ask(key, wanted)
            if answer.is_redirect:
                place = _Place(answer.headers["Location"], self._size(key, answer))
                answer = place.get(wanted)
                if len(self._places) == _MAX_PLACES:
                    self._places.clear()
                self._places[key] = place
            if answer.status_code != 416 and not self._is_absent(key, answer):
                huggingface_hub.utils.hf_raise_for_status(answer)
            return wanted.of(answer)

    def read(self, key: str) -> bytes | None:
        """A file's bytes, None where there is none."""
        answer = self.get(key)
        return None if answer.status == 404 else answer.content

    def _is_absent(self, key: str, answer: httpx.Response) -> bool:
        """Whether an answer says that there is no such file. Mirrors of the Hub do not say what is not found."""
        if answer.status_code != 404:
            return False
        code = answer.headers.get("X-Error-Code")
        return code == "EntryNotFound" or (code is None and key not in self.files)

    def _ask(self, key: str, wanted: "_Range") -> httpx.Response:
        """The Hub's own answer, which may be a redirection to a storage."""
        headers, address = build_hf_headers() | wanted.headers(None), self._address(key)
        endpoint = urlsplit(address).netloc
        for _ in range(_MAX_REDIRECTIONS):
            answer = get_session().get(address, headers=headers, follow_redirects=False)
            if not answer.is_redirect:
                return answer
            if not answer.has_redirect_location:
                break
            address = urljoin(address, answer.headers["Location"])
            if urlsplit(address).netloc != endpoint:
                return answer
        raise StoreInvalid(
            f"{self.url}/{key} cannot be read: the Hub redirects to itself, or to nowhere (HTTP status "
            f"{answer.status_code}). Check HF_ENDPOINT."
        )

    def _size(self, key: str, answer: httpx.Response) -> int:
        """The size of a large file, which the redirection to it says."""
        size = answer.headers.get(huggingface_hub.constants.HUGGINGFACE_HEADER_X_LINKED_SIZE, "")
        return int(size) if size.isdecimal() else self.files[key].size

    def _address(self, key: str) -> str:
        endpoint = huggingface_hub.constants.ENDPOINT
        return f"{endpoint}/datasets/{self._repo}/resolve/{self._commit}/{quote(self._start + key)}"

    def list_range(self, prefix: str, first: str, after: str) -> list[str]:
        """The rest of the keys that begin with `prefix`, from `first` to before `after` (empty: to the end), sorted."""
        keys = self._keys
        start, stop = bisect_left(keys, prefix + first), bisect_left(keys, prefix + after) if after else len(keys)
        return [key.removeprefix(prefix) for key in keys[start:stop] if key.startswith(prefix)]

    @property
    def files(self) -> dict[str, HubFile]:
        """All files by key, in the order of their keys. Asked for once: a commit does not change."""
        with self._asking:
            return self._files

    @cached_property
    def _keys(self) -> list[str]:
        return list(self.files)

    @cached_property
    def _files(self) -> dict[str, HubFile]:
        folder = self._start.rstrip("/") or None
        with hub_errors(self._unpinned, self._commit, _KEY, StoreInvalid):
            repeat_requests()
            entries = huggingface_hub.HfApi().list_repo_tree(
                self._repo, folder, recursive=True, revision=self._commit, repo_type="dataset"
            )
            files = {
                entry.path.removeprefix(self._start): HubFile(entry.size, entry.blob_id, entry.lfs and entry.lfs.sha256)
                for entry in entries
                if isinstance(entry, RepoFile)
            }
        return dict(sorted(files.items()))


def open_hub_files(path: str) -> HubFiles:
    """The files at hf://datasets/owner/name[@revision][/folder], at the commit that the revision (main) names now.

    Raises StoreInvalid for another path, and for what the Hub does not give out; HubUnavailable.
    """
    address = _ADDRESS.fullmatch(path)
    if address is None:
        raise StoreInvalid(
            f"the store's path is {path!r}, which is no data set of the Hub. Give hf://datasets/owner/name, or "
            "hf://datasets/owner/name@revision."
        )
    repo, revision, folder = address.groups()
    commit = dataset_commit(repo, revision and unquote(revision), _KEY, StoreInvalid)
    return _files_of(repo, commit, (folder or "").strip("/"))


@cache
def _files_of(repo: str, commit: str, folder: str) -> HubFiles:
    return HubFiles(repo, commit, folder)
