"""The store on Google Cloud Storage's protocol, served by an emulator."""

import socket

import pytest

from pipeline.errors import StoreMismatch
from pipeline.store import ActivationStore
from pipeline.store.metadata import read_metadata
from pipeline.store.verify import verify_store
from pipeline.store.writing import StoreWriter
from tests.store.example_store import ROWS, layout, metadata, stored_tokens, write_store

emulator = pytest.importorskip("gcp_storage_emulator.server")


@pytest.fixture
def bucket(monkeypatch):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    server = emulator.create_server("localhost", port, in_memory=True, default_bucket="bucket")
    server.start()
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", f"http://localhost:{port}")
    yield "gs://bucket"
    server.stop()


def test_a_store_is_written_extended_verified_and_read(bucket):
    path = f"{bucket}/some/store"
    assert read_metadata(path) is None
    write_store(path, finish=False, max_rows=ROWS)
    assert ActivationStore.open(path).num_tokens == stored_tokens(ROWS)
    write_store(path, max_rows=ROWS + 2)
    assert verify_store(path) == []
    write_store(path)
    assert verify_store(path) == []
    store = ActivationStore.open(path)
    assert store.complete
    batches = store.batches((1, "resid_post"), 50, shuffle=True)
    assert sum(len(batch.tokens) for batch in batches) == stored_tokens()
    with pytest.raises(StoreMismatch):
        StoreWriter.open(path, metadata(tokenizer={"sha256": "other"}), layout())
