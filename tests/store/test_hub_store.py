"""Stores on the Hugging Face Hub are read in place, at one commit, through faults, and never written."""

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from pipeline import delete
from pipeline.config.composing import compose
from pipeline.core.errors import ConfigError, StoreError, StoreInvalid
from pipeline.store import ActivationStore
from pipeline.store.check.verifying import verify_store
from pipeline.store.io.storage import Storage
from tests.hub import Hub, contents, hub_for_this_process, lead_to
from tests.store.example_store import copy_store
from tests.store.fault_proxy import Fault, FaultProxy

pytestmark = pytest.mark.heavy
REPO, URL = "datasets/owner/acts", "hf://datasets/owner/acts"
FAULTS = (Fault.too_many_requests, Fault.unavailable, Fault.refused, Fault.unanswered, Fault.short)


@pytest.fixture
def server(tmp_path: Path, monkeypatch) -> Iterator[Hub]:
    """A local Hub that redirects files of 512 bytes and more to a storage."""
    monkeypatch.setattr("pipeline.core.requests.time", SimpleNamespace(sleep=lambda _: None, time=time.time))
    with hub_for_this_process(tmp_path, monkeypatch) as server:
        server.redirects, server.large = True, 512
        yield server


def assert_reads_the_same(store: ActivationStore, local: ActivationStore) -> None:
    options = {"shuffle": True, "seed": 1}
    pairs = zip(
        store.batches("blocks.1.resid_post", 16, **options),
        local.batches("blocks.1.resid_post", 16, **options),
        strict=True,
    )
    for batch, expected in pairs:
        for name in ("activations", "tokens", "documents", "positions"):
            np.testing.assert_array_equal(getattr(batch, name), getattr(expected, name))
    np.testing.assert_array_equal(store.read("embed", store.rows), local.read("embed", local.rows))
    document = local.documents()["id"][0].as_py()
    np.testing.assert_array_equal(store.document(document).tokens, local.document(document).tokens)


def test_a_store_is_read_through_faults_and_expired_addresses(server, tmp_path, monkeypatch):
    copy_store(str(tmp_path / "store"))
    files = contents(tmp_path / "store")
    server.push(REPO, {f"folder/{key}": content for key, content in files.items()})
    with FaultProxy(server.address).serving() as proxy:
        proxy.reset(0.2, seed=0, kinds=FAULTS)
        lead_to(proxy.url, monkeypatch)
        store = ActivationStore.open(f"{URL}/folder")
        assert_reads_the_same(store, ActivationStore.open(tmp_path / "store"))
        server.expire()
        assert list(verify_store(store.path)) == []
        assert sum(proxy.faults.values()) > 20


def test_files_and_ranges_are_read_through_faults_and_expired_addresses(server, monkeypatch):
    """The storage has no suffix ranges, and small files have no storage."""
    files = {"small": b"a small file", "large": bytes(range(256)) * 4, "large#?": bytes(1000), "folder/file": b""}
    commit = server.push(REPO, {f"root/{key}": content for key, content in files.items()} | {"other": b""})
    keys, ranges = ["small", "large", "absent"], [(-3, None), (2, 5), (4, None), (0, 1)]
    with FaultProxy(server.address).serving() as proxy:
        proxy.reset(0.2, seed=0, kinds=FAULTS)
        lead_to(proxy.url, monkeypatch)
        storage = Storage.open(f"{URL}/root")
        assert (storage.path, storage.url("small")) == (f"{URL}@{commit}/root", f"{URL}@{commit}/root/small")
        server.push(REPO, {"root/small": b"of a later commit"})
        assert list(storage.read_many([*files, "absent"])) == [*files.values(), None]
        for _ in range(8):
            for start, stop in ranges:
                parts = [content[start:stop] if (content := files.get(key)) else None for key in keys]
                assert list(storage.read_many(keys, [(start, stop)] * len(keys))) == parts
            server.expire()
        assert storage.list_keys() == sorted(files)
        assert storage.list_keys("large", "large#") == ["large#?"]
        assert sum(proxy.faults.values()) > 10
    with pytest.raises(StoreInvalid, match="small: OUT_OF_RANGE: bytes 0 to 13 of 12. The object is damaged"):
        next(storage.read_many(["small"], [(0, 13)]))


def test_the_hub_is_asked_once_for_a_large_file(server):
    server.push(REPO, {"large": bytes(1000)})
    storage = Storage.open(URL)
    server.requests.clear()
    for start in range(5):
        next(storage.read_many(["large"], [(start, start + 100)]))
    assert sum("/resolve/" in request for request in server.requests) == 1
    assert len(server.requests) == 6


def test_nothing_is_written(server, tmp_path, capsys):
    copy_store(str(tmp_path / "store"))
    commit = server.push(REPO, contents(tmp_path / "store"))
    storage = Storage.open(URL)
    for write in (lambda: storage.write("key", b""), lambda: storage.write("zarr.json", b"", b"")):
        with pytest.raises(StoreInvalid, match=f"acts@{commit}/ is on the Hub, where stores are read-only"):
            write()
    with pytest.raises(StoreError, match=f"hf download owner/acts --repo-type dataset --revision {commit}"):
        assert ActivationStore.open(storage).arrays
    assert delete.main([f"store.path={URL}@{commit}", "confirm=true"]) == 2
    assert "where stores are read-only. Fill a store at a local path" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="python -m pipeline.push"):
        compose(["data.path=text", f"store.path={URL}"])
    assert server.refs[REPO, "main"] == commit


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("hf://datasets/owner/absent", "the Hub refuses access"),
        (f"{URL}@{'0' * 40}", "the Hub refuses access.*hf auth login"),
        (f"{URL}@absent", "the Hub refuses access"),
        (f"{URL}@refs/pr/1", "acts, revision refs/pr/1: the Hub refuses access"),
        ("hf://owner/model", "which is not a dataset of the Hub"),
        ("hf://datasets/owner", "Expected hf://datasets/owner/name"),
        (f"{URL}/nowhere", "there is no activation store at"),
    ],
)
def test_missing_stores_and_revisions_are_refused(server, path, message):
    server.push(REPO, {"README.md": b"nothing else"})
    with pytest.raises(StoreInvalid, match=message):
        ActivationStore.open(path)


@pytest.mark.parametrize("headers", [{}, {"Location": "/datasets/owner/acts/resolve/main/present"}])
def test_wrong_redirects_are_refused(server, headers):
    server.push(REPO, {"present": b"content"})
    storage = Storage.open(URL)
    server.before = lambda request: server.failures.append((302, headers))
    with pytest.raises(StoreInvalid, match="refuses access"):
        storage.read("present")


def test_a_private_store_needs_the_token(server, monkeypatch):
    files = {"small": b"a small file", "large": bytes(1000)}
    commit = server.push(REPO, files)
    server.private, server.token = {REPO}, "hf_nobody-may-see-this"
    for path in (URL, f"{URL}@{commit}"):
        with pytest.raises(StoreInvalid, match="refuses access.*hf auth login"):
            Storage.open(path).read("small")
    monkeypatch.setenv("HF_TOKEN", server.token)
    storage = Storage.open(URL)
    assert list(storage.read_many(list(files))) == list(files.values())
    assert list(storage.read_many(list(files), [(1, 4)] * 2)) == [content[1:4] for content in files.values()]
    server.token = "hf_revoked"
    server.expire()
    for ranges in (None, [(1, 4)]):
        with pytest.raises(StoreInvalid, match="refuses access.*hf auth login"):
            next(storage.read_many(["large"], ranges))
