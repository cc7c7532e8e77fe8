"""The Hugging Face Hub: repositories at one commit, and requests that are retried after transient failures.

huggingface_hub retries some of its requests, but not the first one for each file, nor the one for a data set's card;
and `datasets` treats a card that it could not fetch as absent. So the HTTP client that both use retries all of them.
"""

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import huggingface_hub
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import get_session, httpx, parse_ratelimit_headers, set_client_factory

from pipeline.core.errors import InputError, PipelineError
from pipeline.core.requests import ATTEMPTS, brief_cause, is_transient_status, repeated

log = logging.getLogger("pipeline")

_TIMEOUT_S = 30.0  # of requests for which huggingface_hub sets none
_COMMIT_TIMEOUT_S = 300.0  # a commit of many files takes long, and must not be sent again meanwhile
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=128)  # callers limit their own concurrency
T = TypeVar("T")


class HubUnavailable(PipelineError):
    """The Hub, or the storage behind it, failed to answer several attempts in a row."""


class _Passing(Exception):
    """A failure that a retry may mend. asked_s: the seconds to wait that the server asks for."""

    def __init__(self, cause: str, asked_s: float = 0.0) -> None:
        super().__init__(cause)
        self.asked_s = asked_s


_TRANSIENT = (
    *(httpx.TimeoutException, httpx.NetworkError, httpx.ProxyError, _Passing),
    *(httpx.RemoteProtocolError, httpx.DecodingError),  # a body that was cut
)


def _repeated(subject: str, call: Callable[[], T]) -> T:
    """`repeated` for transient failures of the Hub. Raises HubUnavailable after the last one."""
    try:
        return repeated(subject, call, lambda error: isinstance(error, _TRANSIENT))
    except _TRANSIENT as error:
        raise HubUnavailable(
            f"{subject} failed {ATTEMPTS} times, most recently with: {brief_cause(error)}. Check the network and "
            f"https://status.huggingface.co, and try again."
        ) from error


class _Client(httpx.Client):
    """An HTTP client that retries requests after transient failures: status 408, 429 or 5xx, or a lost connection."""

    def send(self, request: httpx.Request, *, stream: bool = False, **options: object) -> httpx.Response:
        if not _is_needed(request):
            return super().send(request, stream=stream, **options)
        limits = request.extensions.get("timeout", {})
        timeouts = {name: _TIMEOUT_S if limits.get(name) is None else limits[name] for name in _TIMEOUTS}
        if "/commit/" in request.url.path:
            timeouts |= {"read": _COMMIT_TIMEOUT_S, "write": _COMMIT_TIMEOUT_S}
        request.extensions = {**request.extensions, "timeout": timeouts}
        url = urlsplit(str(request.url))  # the query may hold a signature

        def send() -> httpx.Response:
            response = super(_Client, self).send(request, stream=stream, **options)
            if is_transient_status(response.status_code):
                response.close()
                raise _Passing(f"HTTP status {response.status_code}", _asked_s(response.headers))
            return response

        return _repeated(f"{request.method} {url.scheme}://{url.netloc.rpartition('@')[2]}{url.path}", send)


_TIMEOUTS = ("connect", "read", "write", "pool")
_NEEDED_PATHS = r"/resolve(-cache)?/|/api/(models|datasets|repos)/|/api/validate-yaml$|\.git/info/lfs/"


def _is_needed(request: httpx.Request) -> bool:
    """Whether a request is for a repository's content. Telemetry and the dataset viewer are not needed, and the viewer
    may be down, or have no answer, permanently."""
    if request.url.host == httpx.URL(huggingface_hub.constants.ENDPOINT).host:
        return re.search(_NEEDED_PATHS, request.url.path) is not None
    return request.method == "GET" and not request.url.host.startswith("datasets-server.")  # storage


def _asked_s(headers: Mapping[str, str]) -> float:
    """The seconds to wait that a server asks for, in Retry-After or the Hub's own RateLimit header; or 0."""
    limit = parse_ratelimit_headers(headers)
    if limit is not None and limit.remaining == 0:
        return limit.reset_in_seconds + 1.0
    asked = headers.get("retry-after", "").strip()
    return float(asked) if asked.isdigit() else 0.0


@cache
def repeat_requests() -> None:
    """Makes huggingface_hub, and `datasets` through it, retry every request. Call it before the first request."""
    hooks = get_session().event_hooks  # they refuse requests in offline mode
    options = {"event_hooks": hooks, "follow_redirects": True, "timeout": _TIMEOUT_S, "limits": _LIMITS}
    set_client_factory(lambda: _Client(**options))


def dataset_commit(
    repo: str, revision: str | None, key: str = "data.path", invalid: type[PipelineError] = InputError
) -> str:
    """The commit that a data set's revision (None: main) names now. Raises `invalid`, naming the configuration's `key`,
    where the Hub refuses access, and HubUnavailable when it cannot be reached."""
    if revision is not None and re.fullmatch("[0-9a-f]{40}", revision):
        return revision
    with hub_errors(repo, revision, key, invalid):
        repeat_requests()
        return huggingface_hub.HfApi().dataset_info(repo, revision=revision).sha


def is_hub_id(path: str) -> bool:
    """Whether a path is a Hub id, owner/name, rather than a local path: neither it nor `owner` is a local folder."""
    owner, _, name = path.partition("/")
    is_local = os.path.isdir(path) or (name and os.path.isdir(owner))
    return re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", path) is not None and not is_local


@dataclass(frozen=True)
class Repository:
    """A model repository at one commit. Files are fetched into the Hub's own cache when they are first used.

    Methods raise `invalid`, naming the configuration's `key`, where the Hub refuses access, HubUnavailable when it
    cannot be reached, and PipelineError for local failures such as a full disk.
    """

    id: str
    commit: str
    key: str
    invalid: type[PipelineError]

    def file(self, name: str) -> Path | None:
        """The path of a file in the cache; None if the repository has no file of that name."""
        with hub_errors(self.id, self.commit, self.key, self.invalid):
            known = huggingface_hub.try_to_load_from_cache(self.id, name, revision=self.commit)
            if known is not None:  # a path, or another object if the cache has recorded that there is no such file
                return Path(known) if isinstance(known, str) else None
            try:
                return _download(self.id, name, self.commit)
            except EntryNotFoundError as error:
                if _is_absent(error):
                    return None
                raise

    def names(self) -> list[str]:
        """The repository's files; in offline mode, those in the cache."""
        with hub_errors(self.id, self.commit, self.key, self.invalid):
            try:
                repeat_requests()
                return sorted(huggingface_hub.list_repo_files(self.id, revision=self.commit))
            except OfflineModeIsEnabled:
                folder = huggingface_hub.snapshot_download(self.id, revision=self.commit, local_files_only=True)
                return sorted(str(file.relative_to(folder)) for file in Path(folder).rglob("*") if file.is_file())


def open_repository(
    repo: str, revision: str | None, *, file: str, key: str, invalid: type[PipelineError]
) -> Repository | None:
    """The repository at the commit that `revision` (None: main) names now, found by fetching `file`; None if it has no
    such file. If the Hub cannot be reached, the cached commit is used. Raises as Repository does.
    """
    with hub_errors(repo, revision, key, invalid):
        try:
            downloaded = _download(repo, file, revision)
        except EntryNotFoundError as error:
            if isinstance(error.__cause__, OfflineModeIsEnabled):
                raise PipelineError(
                    f"{repo}: {file} is not in the Hub's cache, and HF_HUB_OFFLINE is set. Fetch it with `hf download "
                    f"{repo}`, or unset HF_HUB_OFFLINE; if {key} should be a directory, it does not exist."
                ) from error
            if _is_absent(error):
                return None
            raise
        except HubUnavailable as error:
            cached = huggingface_hub.try_to_load_from_cache(repo, file, revision=revision)
            if not isinstance(cached, str):
                raise HubUnavailable(f"{error} If {key} should be a directory, {repo} does not exist.") from error
            downloaded = Path(cached)
            log.warning("%s Using commit %s of %s from the Hub's cache.", error, _commit(downloaded, file), repo)
    return Repository(repo, _commit(downloaded, file), key, invalid)


def _commit(downloaded: Path, file: str) -> str:
    """The commit of a cached file, whose path is snapshots/<commit>/<file>."""
    return downloaded.parents[file.count("/")].name


def _download(repo: str, name: str, revision: str | None) -> Path:
    """`hf_hub_download`, retried if the body was cut or has another size than announced."""
    repeat_requests()

    def download() -> Path:
        try:
            return Path(huggingface_hub.hf_hub_download(repo, name, revision=revision))
        except OSError as error:
            if type(error) is OSError and error.errno is None:  # of huggingface_hub: another size
                raise _Passing(str(error)) from error
            raise
        except RuntimeError as error:  # from hf_xet, which has retried for minutes by itself
            raise HubUnavailable(
                f"{repo}/{name} cannot be fetched: {brief_cause(error)}. Check the network, and try again."
            ) from error

    return _repeated(f"the download of {repo}/{name}", download)


def _is_absent(error: EntryNotFoundError) -> bool:
    """Whether a file does not exist, rather than being unreachable. In offline mode only cached files exist."""
    cause = error.__cause__
    if not isinstance(error, LocalEntryNotFoundError) or isinstance(cause, OfflineModeIsEnabled):
        return True
    return (
        isinstance(cause, HfHubHTTPError)
        and cause.response.status_code == 404
        and not isinstance(cause, RepositoryNotFoundError | RevisionNotFoundError)
    )


@contextmanager
def refused_by_hub(where: str, key: str, invalid: type[PipelineError]) -> Iterator[None]:
    """A context for calls that reach the Hub. Raises `invalid` for requests that it refuses, which a retry would not
    change. A missing file or repository stays a FileNotFoundError where huggingface_hub raises one."""
    try:
        yield
    except (httpx.HTTPError, HFValidationError) as error:  # transient failures have been retried
        raise invalid(
            f"{key}={where:.300}: the Hub refuses access ({brief_cause(error):.500}). Check the spelling, or log in "
            f"with `hf auth login`."
        ) from error


@contextmanager
def hub_errors(repo: str, revision: str | None, key: str, invalid: type[PipelineError]) -> Iterator[None]:
    """A context for calls that read a repository. Raises `invalid` where the Hub refuses access, HubUnavailable when it
    cannot be reached, and PipelineError for local failures."""
    try:
        with refused_by_hub(f"{repo}, revision {revision or 'main'}", key, invalid):
            try:
                yield
            except LocalEntryNotFoundError as error:
                if isinstance(error.__cause__, HfHubHTTPError):
                    raise error.__cause__ from None
                raise
    except (LocalEntryNotFoundError, OSError) as error:  # the server is not a Hub, or the cache's disk is full
        raise PipelineError(
            f"{repo} cannot be fetched from the Hub: {brief_cause(error)}. Check HF_ENDPOINT, the network and the "
            f"cache, and try again."
        ) from error
