"""`python -m pipeline.push`: the store on the Hub after interruptions, faults and extensions."""

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest

from pipeline.push import main
from pipeline.store import ActivationStore
from pipeline.store.check.verifying import verify_store
from pipeline.store.publish import pushing
from tests.hub import Hub, contents, hub_for_this_process, lead_to
from tests.store.example_store import copy_store, stored_tokens, write_store
from tests.store.fault_proxy import Fault, FaultProxy

REPO, URL = "datasets/owner/acts", "hf://datasets/owner/acts"
FAULTS = (Fault.too_many_requests, Fault.unavailable, Fault.refused, Fault.unanswered, Fault.short)
TOKEN = "hf_nobody-may-see-this"


@pytest.fixture
def server(tmp_path: Path, monkeypatch) -> Iterator[Hub]:
    """A local Hub that redirects files of 512 bytes and more to a storage."""
    clock = SimpleNamespace(sleep=lambda _: None, time=time.time)
    monkeypatch.setattr("pipeline.core.retries.time", clock)
    monkeypatch.setattr("huggingface_hub.utils._http.time", clock)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(pushing, "FILES_PER_COMMIT", 10)
    monkeypatch.setattr(pushing, "_GROUP_FILES", 5)
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
        assert list(verify_store(URL)) == []
        assert sum(proxy.faults.values()) > 20
    assert TOKEN not in capsys.readouterr().err
    readme = server.head(REPO)["README.md"].decode()
    assert "viewer: false" in readme
    assert "# Activations of unnamed model\n" in readme
    assert f"| tokens | {stored_tokens():,} |" in readme
    assert "| `embed` | 27 x 8 x 4 | bfloat16 | 0.00 |" in readme


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
    assert 0 < len(part.read(None, "embed", part.rows)) < 27
    first = uploads(server)
    server.requests.clear()
    assert push("memory://interrupted") == 0
    assert first
    assert not first & uploads(server)
    assert ActivationStore.open(URL).complete
    assert list(verify_store(URL)) == []
    number = len(commits)
    assert push("memory://interrupted") == 0
    assert not any(commits[number:])
    assert ", 0 of them new" in capsys.readouterr().out


def test_pushing_an_extended_store_uploads_only_changes(server, tmp_path, capsys):
    store = tmp_path / "store"
    write_store(str(store), max_rows=6)
    assert push(store, "revision=first/part") == 0
    readme = server.head(REPO, "first/part")["README.md"]
    tags = b"tags:\n- activations\n- interpretability\n- zarr\n"
    assert tags in readme
    edited = readme.replace(tags, b"tags: mine\n").replace(b"---\n", b"---\nlicense: mit\n", 1) + b"\nMine.\n"
    server.push(REPO, {**server.head(REPO, "first/part"), "README.md": edited}, "first/part")
    shorter, before = ActivationStore.open(f"{URL}@first%2Fpart"), contents(store)
    write_store(str(store))
    server.requests.clear()
    assert push(store, "revision=first/part") == 0
    after = contents(store)
    changed = {content for key, content in after.items() if before.get(key) != content}
    assert 0 < len(uploads(server)) <= len(changed) < len(after)
    pushed = dict(server.head(REPO, "first/part"))
    readme = pushed.pop("README.md").decode()
    assert readme.startswith("---\nlicense: mit\n")
    assert "tags:\n- mine\n- activations\n" in readme
    assert readme.endswith("Mine.\n")
    assert f'"hf://{REPO}@first%2Fpart"' in readme
    assert readme.count(f"| tokens | {stored_tokens():,} |") == 1
    del pushed[".gitattributes"]
    assert pushed == after
    assert list(verify_store(f"{URL}@first%2Fpart")) == []
    assert shorter.read(None, "embed", shorter.rows).shape[0] == len(shorter.rows)  # at its commit
    copy_store(str(tmp_path / "shorter"), max_rows=6)
    assert push(tmp_path / "shorter", "revision=first/part") == 2
    assert "has 2 more blocks of this store, e.g. _commits/stream-00000/block-000002.json" in capsys.readouterr().err


def test_an_interrupted_push_of_an_extension_leaves_an_undamaged_store(server, tmp_path, monkeypatch):
    store = tmp_path / "store"
    write_store(str(store), max_rows=6)
    assert push(store) == 0
    write_store(str(store))
    known = set(server.commits)
    assert push(store) == 0
    left = [commit for name, commit in server.commits if (name, commit) not in known]
    assert server.refs[REPO, "main"] == left.pop()
    monkeypatch.setattr(pushing, "FILES_PER_COMMIT", 20)
    num_rows: list[int] = []
    for commit in left:
        part = ActivationStore.open(f"{URL}@{commit}")
        assert not part.complete
        assert part.documents.num_rows == part.blocks.column("documents").sum()
        num_rows.append(len(part.rows))
        problems = {problem.what for problem in verify_store(part.path)}
        assert all("the last committed row is" in problem for problem in problems), problems
        server.refs[REPO, "main"] = commit
        assert push(store) == 0
        assert pushed_objects(server) == contents(store)
    assert len(num_rows) > 2
    assert num_rows[0] == 8  # without the truncated blocks
    assert num_rows == sorted(num_rows)


def test_objects_that_are_uploaded_together_have_a_bounded_size(monkeypatch):
    monkeypatch.setattr(pushing, "_GROUP_FILES", 1000)
    monkeypatch.setattr(pushing, "_GROUP_BYTES", 20_000)
    write_store("memory://groups")
    store = ActivationStore.open("memory://groups")
    keys = sorted(store.storage.list_keys())
    sizes, groups = pushing._Sizes(store), []
    for group in pushing._groups(keys, sizes):
        contents = list(pushing._additions(store.storage, group))
        sizes.add(contents)
        groups.append((group, sum(content.upload_info.size for content in contents)))
    assert [key for group, _ in groups for key in group] == keys
    assert max(size for _, size in groups) < 1.2 * 20_000  # metadata, and sizes that vary
    assert 4 < len(groups) < 20


def test_pushes_that_cannot_be_made_are_refused(server, tmp_path, monkeypatch, capsys, caplog):
    copy_store(str(tmp_path / "store"))
    copy_store(str(tmp_path / "unfinished"), finish=False)
    copy_store(str(tmp_path / "other"), dtype="float16")

    def refusal(store: str, *more: str) -> str:
        assert push(tmp_path / store, *more) == 2
        return capsys.readouterr().err

    assert "expected repo=owner/name" in refusal("store", "repo=acts")
    assert "is unfinished" in refusal("unfinished")
    assert not server.requests
    monkeypatch.setattr(pushing, "MAX_FILES", 10)
    assert push(tmp_path / "store") == 0
    assert "64 objects, but the Hub recommends fewer than 10 files" in caplog.text
    server.push(REPO, {**server.head(REPO), "README.md": server.head(REPO)["README.md"].replace(b"<!-- end", b"")})
    assert "without '<!-- end activation store -->' after it" in refusal("store")
    assert "differs in capture.dtype" in refusal("other")
    assert "differs in capture.dtype" in refusal("other", "revision=other")
    assert (REPO, "other") not in server.refs
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


def test_a_push_ended_by_an_outage_can_be_resumed(server, tmp_path, capsys):
    copy_store(str(tmp_path / "store"))

    def refuse_uploads(request: str) -> None:
        server.failures = [(503, {})] if request.startswith("PUT") else []

    server.before = refuse_uploads
    assert push(tmp_path / "store") == 1
    assert "run the same command again; it continues" in capsys.readouterr().err
    server.before = lambda request: None
    server.failures = []
    assert push(tmp_path / "store") == 0
    assert pushed_objects(server) == contents(tmp_path / "store")
