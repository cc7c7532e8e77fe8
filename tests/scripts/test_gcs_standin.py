"""The benchmarks' stand-in for Google Cloud Storage: conditions, pages, ranges. TensorStore reaches it through the
proxy, since a process has one address of the service."""

import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from pipeline.store.io.storage import Storage
from scripts.bench.gcs_standin import PAGE_KEYS, control, server


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with server() as url:
        yield url


@pytest.fixture
def storage(gcs, url, monkeypatch) -> Storage:
    """A new store. The proxy leaves conditions to the stand-in."""
    monkeypatch.setattr(gcs, "backend", url.removeprefix("http://"))
    gcs.reset(conditions=False)
    return Storage.open(f"gs://bucket-{uuid.uuid4().hex}/store")


def test_only_one_of_many_simultaneous_writers_creates_an_object(storage):
    with ThreadPoolExecutor(8) as pool:
        wrote = list(pool.map(lambda i: storage.put("key", bytes([i])), range(8)))
    assert sum(wrote) == 1
    assert storage.read("key") == bytes([wrote.index(True)])


def test_writes_and_deletions_are_conditional_on_the_generation(storage):
    storage.write("key", b"1")
    [(_, first)] = storage.read_with_generations(["key"])
    second = storage.write("key", b"2", first)
    assert second not in (None, first)
    assert storage.write("key", b"3", first) is None
    assert storage.write("key", None, first) is None
    assert storage.read("key") == b"2"
    assert storage.write("key", None, second) is not None
    assert storage.read("key") is None


def test_listings_come_in_pages(storage, url):
    keys = [f"a/key-{i:05d}" for i in range(PAGE_KEYS + 1)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda key: storage.write(key, b""), [*keys, "b/key", "a0"]))
    control(url, latency_s=0)
    assert storage.list_keys("a/") == keys
    assert control(url)["list"] == 2
