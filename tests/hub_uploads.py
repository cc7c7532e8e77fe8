"""Requests that change repositories, for the Hub of tests/hub.py."""

import base64
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.hub import Hub

Answer = tuple[int, Any]  # HTTP status, JSON


def answer_to_upload(hub: "Hub", method: str, parts: list[str], body: bytes, host: str) -> Answer | None:
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


def _create(hub: "Hub", asked: dict[str, Any]) -> Answer:
    repo = f"{asked['type']}s/{asked['organization']}/{asked['name']}"
    url = {"url": f"{hub.url}/{repo}"}
    if (repo, "main") in hub.refs:
        return 409, url
    hub.push(repo, {".gitattributes": b"*.npy filter=lfs\n"})
    if asked.get("visibility") == "private":
        hub.private.add(repo)
    return 200, url


def _branch(hub: "Hub", repo: str, branch: str, commit: str | None) -> Answer:
    if (repo, branch) in hub.refs:
        return 409, {}
    hub.refs[repo, branch] = commit or hub.refs[repo, "main"]
    return 200, {}


def _upload_mode(hub: "Hub", file: dict[str, Any]) -> dict[str, Any]:
    mode = "lfs" if file["size"] >= hub.large else "regular"
    return {"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": None}


def _upload(hub: "Hub", host: str, file: dict[str, Any]) -> dict[str, Any]:
    if file["oid"] in hub.objects:
        return file
    port = host.partition(":")[2]
    address = f"http://localhost:{port}/storage/{file['oid']}?signature={hub.signature}"
    return file | {"actions": {"upload": {"href": address, "header": {}}}}


def _commit(hub: "Hub", repo: str, branch: str, lines: list[dict[str, Any]]) -> Answer:
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
