"""A local Hugging Face Hub: repositories with commits, served by the part of the Hub's protocol that is used here.

Large files are uploaded by Git LFS basic transfers, so clients must not use Xet (`HF_HUB_DISABLE_XET`).

Set `HF_ENDPOINT` to its address, or to that of a `FaultProxy` in front of it.
"""

import base64
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

import datasets
import huggingface_hub
import pytest

from tests.jobs import served

_LARGE = 1 << 20  # bytes; files of this size and more are identified by their sha256, as in Git LFS
DATE = "2026-01-01T00:00:00.000Z"


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a folder, as `Hub.push` takes them."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


class Hub:
    """Repositories, named `models/owner/name` or `datasets/owner/name`.

    statuses: by repository, the status of every response (401, 403 or 404).
    failures: statuses and headers of the next responses.
    requests: all requests so far. `before` is called with each before it is answered.
    large: bytes; files of this size and more are large files.
    redirects: requests for large files are redirected to a storage on another host (`localhost`), those for other files
        to another path. The storage refuses tokens, and URLs that were signed before a call of `expire`.
    loses_commits: commits are carried out, but the response is 504.
    token: needed to see `private` repositories, and to write. None: no token is needed.
    objects: the uploaded large files, by sha256.
    """

    def __init__(self) -> None:
        self.failures: list[tuple[int, Mapping[str, str]]] = []
        self.requests: list[str] = []
        self.before: Callable[[str], None] = lambda request: None
        self.commits: dict[tuple[str, str], Mapping[str, bytes]] = {}
        self.refs: dict[tuple[str, str], str] = {}
        self.statuses: dict[str, int] = {}
        self.large = _LARGE
        self.redirects = False
        self.loses_commits = False
        self.token: str | None = None
        self.private: set[str] = set()
        self.objects: dict[str, bytes] = {}
        self.titles: dict[str, str] = {}  # by commit
        self.signature = 0
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), lambda *args: _Handler(self, *args))
        self._server.daemon_threads = True
        self.address = f"127.0.0.1:{self._server.server_port}"
        self.url = f"http://{self.address}"

    def expire(self) -> None:
        """Invalidates all signed URLs of the storage."""
        self.signature += 1

    def head(self, repo: str, branch: str = "main") -> Mapping[str, bytes]:
        """The files of a branch."""
        return self.commits[repo, self.refs[repo, branch]]

    def push(self, repo: str, files: Mapping[str, bytes], branch: str = "main") -> str:
        """Replaces all files of a branch. Returns the commit."""
        digest = hashlib.sha1(repr((self.address, repo, len(self.commits), sorted(files))).encode())
        commit = digest.hexdigest()
        self.commits[repo, commit] = dict(files)
        self.refs[repo, branch] = commit
        return commit

    def resolve(self, repo: str, revision: str) -> str | None:
        commit = self.refs.get((repo, revision), revision)
        return commit if (repo, commit) in self.commits else None

    @contextmanager
    def serving(self) -> Iterator["Hub"]:
        with served(self._server):
            yield self


@contextmanager
def hub_for_this_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub for this process's huggingface_hub and `datasets`, with empty caches in `folder`."""
    with Hub().serving() as server:
        lead_to(server.url, monkeypatch)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder / "cache"))
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "datasets")
        yield server


def lead_to(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets the endpoint, as HF_ENDPOINT would: huggingface_hub and `datasets` read that only once per process."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", url)
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", url)
    huggingface_hub.HfFileSystem.clear_instance_cache()


def etag(content: bytes, large: int) -> str:
    if len(content) >= large:
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1

    def __init__(self, hub: Hub, *args: object) -> None:
        self._hub = hub
        super().__init__(*args)

    def _serve(self) -> None:
        hub = self._hub
        hub.requests.append(f"{self.command} {self.path}")
        hub.before(hub.requests[-1])
        url = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = [unquote(part) for part in url.path.strip("/").split("/")]
        if hub.failures:
            status, headers = hub.failures.pop(0)
            self._answer(status, headers=headers)
        elif parts[0] == "storage":
            self._storage(parts[1], body, parse_qs(url.query))
        elif self._is_refused(parts):
            self._error(401, "RepoNotFound")
        elif (answer := answer_to_upload(hub, self.command, parts, body, self.headers["Host"])) is not None:
            is_lost = hub.loses_commits and "/commit/" in self.path
            self._json(answer[1], 504 if is_lost else answer[0])
        elif parts[:2] == ["api", "resolve-cache"]:
            kind, owner, name, revision, *path = parts[2:]
            self._content(hub.commits[f"{kind}/{owner}/{name}", revision]["/".join(path)])
        elif parts[0] == "api" and len(parts) < 4:  # usage statistics
            self._error(404, "EntryNotFound")
        elif parts[0] == "api":
            kind, owner, name, *rest = parts[1:]
            verb, revision, *path = rest or ["revision", "main"]
            if commit := self._commit(f"{kind}/{owner}/{name}", revision):
                self._api(f"{kind}/{owner}/{name}", commit, verb, "/".join(path), body, parse_qs(url.query))
        else:
            kind, owner, name, verb, revision, *path = parts if parts[0] == "datasets" else ["models", *parts]
            assert verb == "resolve", self.path
            if commit := self._commit(f"{kind}/{owner}/{name}", revision):
                self._file(f"{kind}/{owner}/{name}", commit, "/".join(path))

    do_GET = do_HEAD = do_POST = do_PUT = _serve

    def _is_refused(self, parts: list[str]) -> bool:
        """Whether the request lacks a token that it needs."""
        if self._hub.token is None or self.headers.get("Authorization") == f"Bearer {self._hub.token}":
            return False
        return self.command != "GET" or any(repo in "/".join(parts) for repo in self._hub.private)

    def _storage(self, oid: str, body: bytes, query: Mapping[str, list[str]]) -> None:
        """Serves large files to requests with a valid signature."""
        if "Authorization" in self.headers or query["signature"] != [str(self._hub.signature)]:
            self._answer(400 if "Authorization" in self.headers else 403)
        elif self.command == "PUT":
            assert hashlib.sha256(body).hexdigest() == oid
            self._hub.objects[oid] = body
            self._answer(200)
        else:
            self._content(self._hub.objects[oid])

    def _commit(self, repo: str, revision: str) -> str | None:
        """The commit of a revision. If it does not exist, responds with the error and returns None."""
        if status := self._hub.statuses.get(repo):
            self._error(status, "GatedRepo" if status == 403 else "RepoNotFound")
            return None
        commit = self._hub.resolve(repo, revision)
        if commit is None:
            known = any(name == repo for name, _ in self._hub.commits)
            self._error(404, "RevisionNotFound" if known else "RepoNotFound")
        return commit

    def _file(self, repo: str, commit: str, name: str) -> None:
        hub = self._hub
        headers = {"X-Repo-Commit": commit}
        content = hub.commits[repo, commit].get(name)
        if content is None:
            self._error(404, "EntryNotFound", headers)
            return
        headers |= {"ETag": f'"{etag(content, hub.large)}"', "Accept-Ranges": "bytes"}
        if not hub.redirects:
            self._content(content, headers)
        elif len(content) >= hub.large:
            oid, port = hashlib.sha256(content).hexdigest(), self.headers["Host"].partition(":")[2]
            hub.objects[oid] = content
            address = f"http://localhost:{port}/storage/{oid}?signature={hub.signature}"
            self._answer(302, headers=headers | {"Location": address, "X-Linked-Size": str(len(content))})
        else:
            self._answer(307, headers=headers | {"Location": quote(f"/api/resolve-cache/{repo}/{commit}/{name}")})

    def _content(self, content: bytes, headers: Mapping[str, str] = {}) -> None:
        """Responds with a file, or with the requested range of it."""
        if not (asked := self.headers.get("Range")):
            self._answer(200, content, headers)
            return
        first, _, last = asked.removeprefix("bytes=").partition("-")
        if not first:  # a suffix range, which this storage does not support
            self._answer(416)
            return
        start, stop = int(first), min(int(last) + 1 if last else len(content), len(content))
        content_range = {"Content-Range": f"bytes {start}-{stop - 1}/{len(content)}"}
        self._answer(206, content[start:stop], {**headers, **content_range})

    def _api(self, repo: str, commit: str, verb: str, folder: str, body: bytes, query: Mapping[str, list[str]]) -> None:
        hub, files = self._hub, self._hub.commits[repo, commit]
        if verb == "revision":
            siblings = [{"rfilename": name} for name in files]
            info = {"id": repo.partition("/")[2], "sha": commit, "siblings": siblings, "tags": []}
            info |= {"private": repo in hub.private, "lastModified": DATE, "createdAt": DATE}
            self._json(info | {"downloads": 0, "likes": 0, "disabled": False})
        elif verb == "tree":
            is_recursive = "true" in [value.lower() for value in query.get("recursive", [])]
            entries = _entries(hub, files, folder, is_recursive)
            self._json(entries) if entries or not folder else self._error(404, "EntryNotFound")
        elif verb == "paths-info":
            asked = parse_qs(body.decode()).get("paths") or json.loads(body)["paths"]
            everything = {entry["path"]: entry for entry in _entries(hub, files, "", True)}
            self._json([everything[name] for name in asked if name in everything])
        elif verb == "commits":
            title = hub.titles.get(commit, "files")
            self._json([{"id": commit, "title": title, "message": "", "authors": [], "date": DATE}])
        else:
            raise AssertionError(self.path)

    def _json(self, value: object, status: int = 200) -> None:
        self._answer(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _error(self, status: int, code: str, headers: Mapping[str, str] = {}) -> None:
        self._answer(status, headers={"X-Error-Code": code, "X-Error-Message": f"{code}: {self.path}", **headers})

    def _answer(self, status: int, content: bytes = b"", headers: Mapping[str, str] = {}) -> None:
        self.send_response_only(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
        self.wfile.flush()

    def log_message(self, *args: object) -> None:
        pass


def _entries(hub: Hub, files: Mapping[str, bytes], folder: str, is_recursive: bool) -> list[dict[str, object]]:
    """The entries of a folder: files and folders; with `is_recursive`, also those below."""
    start = f"{folder}/" if folder else ""
    below = {name: content for name, content in files.items() if name.startswith(start)}
    folders = {name.rpartition("/")[0] for name in below if "/" in name.removeprefix(start)}
    entries: list[dict[str, object]] = [
        {"type": "directory", "path": name, "oid": hashlib.sha1(name.encode()).hexdigest(), "size": 0}
        for name in sorted(folders)
    ]
    for name, content in below.items():
        entry = {"type": "file", "path": name, "oid": etag(content, len(content) + 1), "size": len(content)}
        if len(content) >= hub.large:
            entry["lfs"] = {"oid": etag(content, hub.large), "size": len(content), "pointerSize": 130}
        entries.append(entry)
    return [entry for entry in entries if is_recursive or "/" not in entry["path"].removeprefix(start)]


Answer = tuple[int, Any]  # HTTP status, JSON


def answer_to_upload(hub: Hub, method: str, parts: list[str], body: bytes, host: str) -> Answer | None:
    """The response to a request that changes a repository; None for others. `host`: the request's Host header."""
    match (method, *parts):
        case ("POST", "api", "repos", "create"):
            return _create(hub, json.loads(body))
        case ("POST", "api", "validate-yaml"):
            return 200, {"errors": [], "warnings": []}
        case ("POST", *_, "info", "lfs", "objects", "batch"):
            files = json.loads(body)["objects"]
            return 200, {"transfer": "basic", "objects": [_upload(hub, host, file) for file in files]}
        case ("POST", "api", kind, owner, name, "preupload", _):
            files = json.loads(body)["files"]
            return 200, {"files": [_upload_mode(hub, file) for file in files]}
        case ("POST", "api", kind, owner, name, "branch", branch):
            return _branch(hub, f"{kind}/{owner}/{name}", branch, json.loads(body or b"{}").get("startingPoint"))
        case ("POST", "api", kind, owner, name, "commit", branch):
            return _commit(hub, f"{kind}/{owner}/{name}", branch, [json.loads(line) for line in body.splitlines()])
    return None


def _create(hub: Hub, asked: dict[str, Any]) -> Answer:
    repo = f"{asked['type']}s/{asked['organization']}/{asked['name']}"
    url = {"url": f"{hub.url}/{repo}"}
    if (repo, "main") in hub.refs:
        return 409, url
    hub.push(repo, {".gitattributes": b"*.npy filter=lfs\n"})
    if asked.get("visibility") == "private":
        hub.private.add(repo)
    return 200, url


def _branch(hub: Hub, repo: str, branch: str, commit: str | None) -> Answer:
    if (repo, branch) in hub.refs:
        return 409, {}
    hub.refs[repo, branch] = commit or hub.refs[repo, "main"]
    return 200, {}


def _upload_mode(hub: Hub, file: dict[str, Any]) -> dict[str, Any]:
    mode = "lfs" if file["size"] >= hub.large else "regular"
    return {"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": None}


def _upload(hub: Hub, host: str, file: dict[str, Any]) -> dict[str, Any]:
    if file["oid"] in hub.objects:
        return file
    port = host.partition(":")[2]
    address = f"http://localhost:{port}/storage/{file['oid']}?signature={hub.signature}"
    return file | {"actions": {"upload": {"href": address, "header": {}}}}


def _commit(hub: Hub, repo: str, branch: str, lines: list[dict[str, Any]]) -> Answer:
    header = lines[0]["value"]
    if header.get("parentCommit", hub.refs[repo, branch]) != hub.refs[repo, branch]:
        return 412, {"error": "A commit has happened since. Please refresh and try again."}
    files = dict(hub.head(repo, branch))
    for line in lines[1:]:
        path = line["value"]["path"]
        if line["key"] == "lfsFile":
            files[path] = hub.objects[line["value"]["oid"]]
        else:
            assert line["key"] == "file", line
            files[path] = base64.b64decode(line["value"]["content"])
    commit = hub.push(repo, files, branch)
    hub.titles[commit] = header["summary"]
    return 200, {"commitUrl": f"{hub.url}/{repo}/commit/{commit}", "commitOid": commit}
