"""The stand-in for Google Cloud Storage: conditions, pages, ranges, refusals. TensorStore reaches it through the proxy,
since a process has one address of the service."""

import json
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection

import pytest
import tensorstore as ts
from gcsfs.core import GCSFileSystem

from pipeline.core.errors import StoreError
from pipeline.store.io.storage import Storage, StorageOptions
from scripts.bench.gcs_standin import PAGE_KEYS, Behaviour, Objects, StandIn, control, serving


@pytest.fixture(scope="module")
def stand_in() -> Iterator[tuple[StandIn, str]]:
    """The server without latency, and its URL."""
    server = StandIn(Behaviour(latency_s=0))
    with serving(server) as url:
        yield server, url


@pytest.fixture
def server(stand_in: tuple[StandIn, str]) -> str:
    """The URL of the server without objects."""
    state, url = stand_in
    state.objects = Objects()
    state.set_behaviour(Behaviour(latency_s=0))
    return url


@pytest.fixture
def path(gcs, server, monkeypatch) -> str:
    """The URL for a new store. The proxy leaves conditions to the stand-in."""
    monkeypatch.setattr(gcs, "backend", server.removeprefix("http://"))
    gcs.reset(conditions=False)
    return f"gs://bucket-{uuid.uuid4().hex}/store"


def request(url: str, method: str, target: str, body: bytes = b"", **headers: str) -> tuple[int, bytes]:
    connection = HTTPConnection(url.removeprefix("http://"), timeout=10)
    connection.request(method, target, body, headers)
    response = connection.getresponse()
    return response.status, response.read()


def upload(url: str, name: str, content: bytes = b"content", condition: str = "") -> tuple[int, bytes]:
    return request(url, "POST", f"/upload/storage/v1/b/bucket/o?uploadType=media&name={name}{condition}", content)


def test_only_one_of_many_simultaneous_writers_creates_an_object(path):
    stores = [Storage.open(path) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        wrote = list(pool.map(lambda i: stores[i].put("key", bytes([i])), range(8)))
    assert sum(wrote) == 1
    assert stores[0].read("key") == bytes([wrote.index(True)])


def test_writes_and_deletions_are_conditional_on_the_generation(path):
    storage = Storage.open(path)
    storage.write("key", b"1")
    [(_, first)] = storage.read_with_generations(["key"])
    second = storage.write_if_unchanged("key", b"2", first)
    assert second not in (None, first)
    assert storage.write_if_unchanged("key", b"3", first) is None
    assert storage.write_if_unchanged("key", None, first) is None
    assert storage.read("key") == b"2"
    assert storage.write_if_unchanged("key", None, second) is not None
    assert storage.read("key") is None
    storage.write("key", None)  # deleting a missing object is no error


@pytest.mark.parametrize("num_keys", [0, 1, PAGE_KEYS, PAGE_KEYS + 1, 2 * PAGE_KEYS + 345])
def test_listings_come_in_pages(path, server, stand_in, num_keys):
    bucket = path.split("/")[2]
    keys = [f"a/key-{i:05d}" for i in range(num_keys)]
    for key in [*keys, "a", "b/key", "a0"]:
        stand_in[0].objects.put(f"{bucket}/store/{key}", b"")
    stand_in[0].objects.put("another-bucket/store/a/key", b"")
    control(server, latency_s=0)
    assert Storage.open(path).list_keys("a/") == keys
    assert control(server)["counters"]["list"] == max(1, -(-num_keys // PAGE_KEYS))


def test_ranges_of_an_object_are_read(path, server):
    upload(server, "name", bytes(range(100)))
    expected = {"0-9": range(10), "90-": range(90, 100), "-5": range(95, 100), "95-200": range(95, 100)}
    for wanted, values in expected.items():
        status, content = request(server, "GET", "/storage/v1/b/bucket/o/name?alt=media", Range=f"bytes={wanted}")
        assert (status, content) == (206, bytes(values))
    assert request(server, "GET", "/storage/v1/b/bucket/o/name?alt=media", Range="bytes=100-")[0] == 416
    array = ts.open(
        {"driver": "zarr3", "kvstore": f"{path}/array/"},
        dtype="int32",
        shape=[64, 64],
        create=True,
        context=ts.Context(),
    ).result()
    array[:] = 7
    assert array[3:5, 60:].read().result().tolist() == [[7] * 4] * 2


def test_refused_requests_are_repeated(path, server):
    """An outage shorter than the retries goes unnoticed; a longer one raises an error that names the object."""
    storage = Storage.open(path, StorageOptions(retries=8, retry_delay_s=0.1))
    control(server, refuse_s=0.3)
    storage.write("key", b"content")
    counters = control(server, refuse_s=600.0)["counters"]
    assert counters["put"] == counters["refused"] + 1 > 1
    with pytest.raises(StoreError, match="store/key: .*429"):
        Storage.open(path, StorageOptions(retries=2, retry_delay_s=0.01)).read("key")
    control(server, refuse_s=0.0)
    assert storage.read("key") == b"content"


def test_requests_above_the_rate_are_refused(server):
    control(server, requests_per_s=1e-9, log_arrivals=True)
    statuses = Counter(upload(server, f"name-{i}")[0] for i in range(5))
    assert statuses == {200: 1, 429: 4}
    report = control(server, requests_per_s=1e9, log_arrivals=False)
    assert report["arrivals"] == sorted(report["arrivals"])
    assert len(report["arrivals"]) == 5
    assert report["counters"]["refused"] == 4
    assert [upload(server, f"name-{i}")[0] for i in range(5)] == [200] * 5


def test_requests_wait_concurrently(server):
    """100 requests of 0.2 s, 50 at a time, would take 20 s one after the other."""
    control(server, latency_s=0.2)
    began = time.monotonic()
    with ThreadPoolExecutor(50) as pool:
        assert set(pool.map(lambda i: upload(server, f"name-{i}")[0], range(100))) == {200}
    assert 0.4 <= time.monotonic() - began < 19
    assert control(server)["counters"]["put"] == 100


def test_gcsfs_reads_writes_and_lists(server):
    files = GCSFileSystem(endpoint_url=server, token="anon", skip_instance_cache=True, use_listings_cache=False)
    files.pipe({f"bucket/folder/{name}": name.encode() for name in ("a", "b/c", "b/d", "e f")})
    assert sorted(files.ls("bucket/folder", detail=False)) == [f"bucket/folder/{name}" for name in ("a", "b", "e f")]
    assert sorted(files.find("bucket/folder")) == [f"bucket/folder/{name}" for name in ("a", "b/c", "b/d", "e f")]
    assert files.cat("bucket/folder/e f") == b"e f"
    assert files.cat_file("bucket/folder/b/c", 1, 3) == b"/c"
    files.rm("bucket/folder/a")
    assert not files.exists("bucket/folder/a")


@pytest.mark.parametrize(
    ("condition", "status"), [("", 200), ("&ifGenerationMatch=0", 412), ("&ifGenerationMatch=999999", 412)]
)
def test_a_failed_condition_is_answered_by_412(server, condition, status):
    assert upload(server, "name", b"1")[0] == 200
    assert upload(server, "name", b"2", condition)[0] == status
    content = request(server, "GET", "/storage/v1/b/bucket/o/name?alt=media")[1]
    assert content == (b"2" if status == 200 else b"1")


def test_metadata_has_size_and_generation(server):
    generation = json.loads(upload(server, "name", b"12345")[1])["generation"]
    status, content = request(server, "GET", "/storage/v1/b/bucket/o/name")
    resource = json.loads(content)
    assert (status, resource["size"], resource["generation"]) == (200, "5", generation)
    assert request(server, "GET", "/storage/v1/b/bucket/o/other")[0] == 404
