"""`python -m pipeline.push`: the store on the Hub after interruptions, faults and extensions."""

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import numpy as np
import pytest

from pipeline.push import main
from pipeline.store import ActivationStore
from pipeline.store import publish as pushing
from tests.hub import Hub, contents, hub_for_this_process, lead_to
from tests.store.example_store import copy_store, read_image, stored_tokens, write_store
from tests.store.fault_proxy import Fault, FaultProxy

REPO, URL = "datasets/owner/acts", "hf://datasets/owner/acts"
FAULTS = (Fault.too_many_requests, Fault.unavailable, Fault.refused, Fault.unanswered, Fault.short)
TOKEN = "hf_nobody-may-see-this"


@pytest.fixture
def server(tmp_path: Path, monkeypatch) -> Iterator[Hub]:
    """A local Hub that redirects files of 512 bytes and more to a storage."""
    clock = SimpleNamespace(sleep=lambda _: None, time=time.time)
    monkeypatch.setattr("pipeline.core.requests.time", clock)
    monkeypatch.setattr("huggingface_hub.utils._http.time", clock)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(pushing, "FILES_PER_COMMIT", 10)
    monkeypatch.setattr(pushing, "_GROUP", 5)
    monkeypatch.setattr(pushing, "_REMOTE_GROUP", 5)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with hub_for_this_process(tmp_path, monkeypatch) as server:
        server.redirects, server.large, server.token = True, 512, TOKEN
        yield server


def push(store: Path | str, *more: str) -> int:
    repo = [] if any(argument.startswith("repo=") for argument in more) else ["repo=owner/acts"]
    return main([f"store.path={store}", *repo, *more])


def pushed_objects(server: Hub) -> dict[str, bytes]:
    return {key: content for key, content in server.head(REPO).items() if key not in ("README.md", ".gitattributes")}


def uploads(server: Hub) -> set[str]:
    return {request for request in server.requests if request.startswith("PUT")}


def test_a_push_survives_faults(server, tmp_path, monkeypatch, capsys):
    write_store(str(tmp_path / "store"))
    with FaultProxy(server.address).serving() as proxy:
        proxy.reset(0.25, seed=0, kinds=FAULTS)
        lead_to(proxy.url, monkeypatch)
        assert push(tmp_path / "store", "private=true") == 0, capsys.readouterr().err
        assert pushed_objects(server) == contents(tmp_path / "store")
        assert server.private == {REPO}
        assert sum(proxy.faults.values()) > 5
    assert TOKEN not in capsys.readouterr().err
    readme = server.head(REPO)["README.md"].decode()
    assert "viewer: false" in readme
    assert "# Activations of unnamed model\n" in readme
    assert f"| tokens | {stored_tokens():,} |" in readme
    assert "| `embed` | 28 x 8 x 4 | bfloat16 |" in readme


def test_an_interrupted_push_leaves_an_unfinished_store_and_resumes(server, capsys):
    write_store("memory://interrupted")
    commits = []

    def refuse_the_sixth_commit(request: str) -> None:
        commits.append("/commit/" in request)
        server.failures = [(403, {})] if sum(commits) == 6 and commits[-1] else []

    server.before = refuse_the_sixth_commit
    assert push("memory://interrupted") == 2
    assert "the Hub refuses the push" in capsys.readouterr().err
    part = ActivationStore.open(URL)
    assert not part.complete
    assert 0 < len(part.read("embed", part.rows)) < 22
    assert part.documents().num_rows == part.blocks.total("documents")
    first = uploads(server)
    server.requests.clear()
    assert push("memory://interrupted") == 0
    assert first
    assert not first & uploads(server)
    assert pushed_objects(server) == read_image("memory://interrupted")
    number = len(commits)
    assert push("memory://interrupted") == 0
    assert not any(commits[number:])
    assert ", 0 of them new" in capsys.readouterr().out


def test_pushing_an_extended_store_uploads_only_changes(server, tmp_path, capsys):
    """Until its last commit the shorter store is unchanged."""
    store, branch = tmp_path / "store", "first/part"
    write_store(str(store), max_blocks=1)
    assert push(store, f"revision={branch}") == 0
    readme, before, known = server.head(REPO, branch)["README.md"], contents(store), set(server.commits)
    opened = ActivationStore.open(store)
    shorter = opened.read("embed", opened.rows)
    edited = readme.replace(b"tags: [activations,", b"license: mit  # mine\ntags: [mine,") + b"\nMine.\n"
    server.push(REPO, {**server.head(REPO, branch), "README.md": edited}, branch)
    write_store(str(store))
    after = contents(store)
    changed = {key for key, content in after.items() if before.get(key) != content}
    server.requests.clear()
    assert push(store, f"revision={branch}") == 0
    assert f"{len(after) - 1} objects, {len(changed) - 1} of them new" in capsys.readouterr().out  # but the root
    assert 0 < len(uploads(server)) <= len(changed) < len(after)
    partial = {commit: files for (_, commit), files in server.commits.items() if (REPO, commit) not in known}
    for commit, files in [*partial.items()][1:-1]:
        assert {key: files[key] for key in before if not key.endswith("/zarr.json")}.items() <= before.items()
        part = ActivationStore.open(f"{URL}@{commit}")
        np.testing.assert_array_equal(part.read("embed", part.rows), shorter)
    assert len(partial) > 4
    pushed = dict(server.head(REPO, branch))
    readme = pushed.pop("README.md").decode()
    assert readme.startswith("---\nlicense: mit  # mine\ntags: [mine, interpretability, zarr]\nviewer: false\n---\n")
    assert readme.endswith("Mine.\n")
    assert f'"hf://{REPO}@first%2Fpart"' in readme
    assert readme.count(f"| tokens | {stored_tokens():,} |") == 1
    del pushed[".gitattributes"]
    assert pushed == after
    copy_store(str(tmp_path / "shorter"), max_blocks=1)
    assert push(tmp_path / "shorter", f"revision={branch}") == 2
    assert "has 4 more blocks of this store, e.g. _commits/stream-00000/block-000001.json" in capsys.readouterr().err


def test_pushes_that_cannot_be_made_are_refused(server, tmp_path, monkeypatch, capsys):
    copy_store(str(tmp_path / "store"))
    copy_store(str(tmp_path / "unfinished"), finish=False)
    copy_store(str(tmp_path / "other"), dtype="float16")

    def refusal(store: str, *more: str) -> str:
        assert push(tmp_path / store, *more) == 2
        return capsys.readouterr().err

    assert "expected repo=owner/name" in refusal("store", "repo=acts")
    assert "is unfinished" in refusal("unfinished")
    assert not server.requests
    copy_store(str(tmp_path / "linked"))
    (tmp_path / "linked" / "tokens" / "c.0.0").rename(tmp_path / "elsewhere")
    (tmp_path / "linked" / "tokens" / "c.0.0").symlink_to(tmp_path / "elsewhere")
    assert "is a symbolic link" in refusal("linked")
    copy_store(str(tmp_path / "deleted"))
    server.before = lambda request: (tmp_path / "deleted" / "tokens" / "zarr.json").unlink(missing_ok=True)
    assert "tokens/zarr.json is missing, although" in refusal("deleted", "repo=owner/deleted")
    server.before = lambda request: None
    assert push(tmp_path / "store") == 0
    (record, content), *_ = [item for item in server.head(REPO).items() if item[0].startswith("_commits/")]
    server.push(REPO, {**server.head(REPO), record: content + b" "}, "recomputed")
    assert f"of another run: {record} differs" in refusal("store", "revision=recomputed")
    assert "differs in capture.dtype" in refusal("other")
    assert "differs in capture.dtype" in refusal("other", "revision=other")
    assert "private=true, but owner/acts is public" in refusal("store", "private=true")
    server.push(REPO, {"data.parquet": b"rows"})
    assert "has other files, e.g. data.parquet" in refusal("store")
    monkeypatch.setenv("HF_TOKEN", "another")
    assert "the Hub refuses the push" in refusal("store", "repo=owner/another")


def test_a_concurrent_commit_ends_a_push(server, tmp_path, capsys):
    copy_store(str(tmp_path / "store"))

    def commit_before(request: str) -> None:
        if "/commit/" in request:
            server.push(REPO, {**server.head(REPO), "LICENSE": b"mine"})

    server.before = commit_before
    assert push(tmp_path / "store") == 1
    assert "was changed by another client" in capsys.readouterr().err
    server.before = lambda request: None
    assert push(tmp_path / "store") == 0
    assert server.head(REPO)["LICENSE"] == b"mine"


def test_a_commit_with_lost_responses_is_recognised(server, tmp_path, monkeypatch):
    copy_store(str(tmp_path / "store"))
    monkeypatch.setattr(pushing, "FILES_PER_COMMIT", 100)
    server.loses_commits = True
    assert push(tmp_path / "store") == 0
    assert pushed_objects(server) == contents(tmp_path / "store")
