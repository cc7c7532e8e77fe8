"""Stores on the Hugging Face Hub are read in place, at one commit, through faults, and never written."""

import pickle
import threading
import time
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from pipeline import delete
from pipeline.config.composing import compose
from pipeline.core.errors import ConfigError, StoreInvalid
from pipeline.store import ActivationStore
from pipeline.store.check.verifying import verify_store
from pipeline.store.io.hub_files import open_hub_files
from pipeline.store.io.hub_relay import HubRelay
from pipeline.store.io.storage import Storage, StorageOptions
from tests.hub import Hub, contents, hub_for_this_process, lead_to
from tests.store.example_store import copy_store
from tests.store.fault_proxy import Fault, FaultProxy

REPO, URL = "datasets/owner/acts", "hf://datasets/owner/acts"
FAULTS = (Fault.too_many_requests, Fault.unavailable, Fault.refused, Fault.unanswered, Fault.short)


@pytest.fixture
def server(tmp_path: Path, monkeypatch) -> Iterator[Hub]:
    """A local Hub that redirects files of 512 bytes and more to a storage."""
    monkeypatch.setattr("pipeline.core.retries.time", SimpleNamespace(sleep=lambda _: None, time=time.time))
    with hub_for_this_process(tmp_path, monkeypatch) as server:
        server.redirects, server.large = True, 512
        yield server


def assert_reads_the_same(store: ActivationStore, local: ActivationStore) -> None:
    options = {"shuffle": True, "seed": 1}
    pairs = zip(
        store.batches((1, "resid_post"), 16, **options), local.batches((1, "resid_post"), 16, **options), strict=True
    )
    for batch, expected in pairs:
        for name in ("activations", "tokens", "documents", "positions"):
            np.testing.assert_array_equal(getattr(batch, name), getattr(expected, name))
    np.testing.assert_array_equal(store.read(None, "embed", store.rows), local.read(None, "embed", local.rows))
    document = local.documents["id"][0].as_py()
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


def test_a_reader_stays_at_its_commit_and_writes_nothing(server, tmp_path, capsys):
    copy_store(str(tmp_path / "store"))
    files = contents(tmp_path / "store")
    commit = server.push(REPO, files)
    store, later = ActivationStore.open(URL), {**files, "zarr.json": b"{}"}
    server.push(REPO, later)
    assert store.path == f"{URL}@{commit}"
    assert_reads_the_same(store, ActivationStore.open(tmp_path / "store"))
    assert_reads_the_same(pickle.loads(pickle.dumps(store)), ActivationStore.open(tmp_path / "store"))
    with pytest.raises(StoreInvalid, match="not an activation store"):
        ActivationStore.open(URL)
    assert delete.main([f"store.path={URL}@{commit}", "confirm=true"]) == 2
    assert "where stores are read-only. Fill a store at a local path" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="python -m pipeline.push"):
        compose(["data.path=text", f"store.path={URL}"])


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


def test_mirrors_without_error_codes_and_wrong_redirects_are_handled(server):
    server.push(REPO, {"present": b"content", "large": bytes(1000)})
    server.names_errors = False
    files = open_hub_files(URL)
    assert files.read("absent") is None
    server.before = lambda request: server.failures.append((404, {}))
    with pytest.raises(StoreInvalid, match="refuses access"):
        files.read("present")
    server.before = lambda request: server.failures.append((302, {}))
    with pytest.raises(StoreInvalid, match="without a location .HTTP status 302.*HF_ENDPOINT"):
        files.read("large")
    server.before = lambda request: server.failures.append((302, {"Location": "/datasets/elsewhere"}))
    server.requests.clear()
    with pytest.raises(StoreInvalid, match="the Hub redirects to itself.*HF_ENDPOINT"):
        files.read("present")
    assert len(server.requests) == 10


def test_a_private_store_needs_the_token(server, tmp_path, monkeypatch):
    copy_store(str(tmp_path / "store"))
    commit = server.push(REPO, contents(tmp_path / "store"))
    server.private, server.token = {REPO}, "hf_nobody-may-see-this"
    for path in (URL, f"{URL}@{commit}"):
        with pytest.raises(StoreInvalid, match="refuses access.*hf auth login"):
            ActivationStore.open(path)
    monkeypatch.setenv("HF_TOKEN", server.token)
    store = ActivationStore.open(URL)
    assert_reads_the_same(store, ActivationStore.open(tmp_path / "store"))
    server.token = "hf_revoked"
    server.expire()
    with pytest.raises(StoreInvalid, match="PERMISSION_DENIED.*refuses access.*hf auth login") as caught:
        store.read(None, "embed", store.rows)
    assert "127.0.0.1" not in str(caught.value).replace(server.url, "")


def test_slow_answers_of_the_hub_are_waited_for(server, tmp_path, monkeypatch):
    """Longer than TensorStore would wait. And requests to the relay ignore the environment's proxy."""
    copy_store(str(tmp_path / "store"))
    server.push(REPO, contents(tmp_path / "store"))
    monkeypatch.setattr("pipeline.store.io.hub_relay._PATIENCE_S", 0.05)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "localhost")
    server.before = lambda request: time.sleep(0.2 if "/resolve/" in request else 0)
    server.large = 64
    store = ActivationStore.open(Storage.open(URL, StorageOptions(retry_delay_s=0.01)))
    server.requests.clear()
    row = store.read(None, "embed", 0)
    np.testing.assert_array_equal(row, ActivationStore.open(tmp_path / "store").read(None, "embed", 0))
    assert sum("/resolve/" in request and "embed" in request for request in server.requests) <= 2
    server.requests.clear()
    store.read(None, "embed", 1)
    assert not any("/resolve/" in request for request in server.requests)  # the storage's address is known


def test_the_relay_drops_answers_that_are_not_requested_again(server, monkeypatch):
    server.push(REPO, {"first": b"1", "second": b"2"})
    monkeypatch.setattr("pipeline.store.io.hub_relay._PATIENCE_S", 0.0)
    monkeypatch.setattr("pipeline.store.io.hub_relay._KEPT_S", 0.0)
    relay, files, may_answer = HubRelay(), open_hub_files(URL), threading.Event()
    server.before = lambda request: may_answer.wait()
    for key in ("first", "second"):
        assert relay.answer((files, key, None)) is None
        assert [pending for _, pending, _ in relay._pending] == [key]
        may_answer.set()
        wait([pending.future for pending in relay._pending.values()])
        may_answer.clear()


@pytest.mark.parametrize(
    ("byte_range", "part"), [("bytes=-3", slice(-3, None)), ("bytes=2-4", slice(2, 5)), (None, slice(None))]
)
def test_ranges_of_small_and_large_files_are_read(server, byte_range, part):
    """The storage has no suffix ranges, and small files have no storage."""
    files = {"small": b"a small file", "large": bytes(range(256)) * 4}
    server.push(REPO, files)
    opened = open_hub_files(URL)
    for _ in range(2):
        assert {key: opened.get(key, byte_range).content for key in files} == {key: files[key][part] for key in files}
        server.expire()
    assert opened.get("absent", byte_range).status == 404
