import os
from collections.abc import Iterator

import numpy as np
import pytest
import tensorstore as ts

from pipeline.core.errors import ConfigError, StoreError, StoreInvalid
from pipeline.store.format.arrays import create_arrays
from pipeline.store.io.failures import storage_errors
from pipeline.store.io.storage import Storage, StorageOptions, set_request_defaults
from tests.store.emulators import new_bucket
from tests.store.example_store import layout
from tests.store.fault_proxy import CONTENT_FAULTS


def test_settings_reach_tensorstore():
    storage = Storage.open("memory://settings", StorageOptions(3, 0.5, concurrency=7, copy_threads=2))
    spec = storage.context.spec.to_json()
    assert spec["gcs_request_retries"]["max_retries"] == 3
    assert spec["s3_request_retries"] == spec["gcs_request_retries"]
    assert {spec[f"{kind}_concurrency"]["limit"] for kind in ("gcs_request", "s3_request", "file_io")} == {7}
    assert spec["data_copy_concurrency"] == {"limit": 2}
    assert storage.put_threads._max_workers == 7
    storage.write("key", b"value")
    assert Storage.open("memory://settings").read("key") == b"value"


def test_processes_have_different_retry_delays():
    """Requests refused at the same time must not be repeated at the same time."""
    specs = [StorageOptions(16, 2.0).context().spec.to_json()["gcs_request_retries"] for _ in range(64)]
    assert len({spec["initial_delay"] for spec in specs}) == len({spec["max_delay"] for spec in specs}) == 64


@pytest.mark.parametrize(
    "wrong",
    [{"retries": -1}, {"retry_delay_s": -1}, {"concurrency": 0}, {"copy_threads": 0}, {"writes_per_s": 0}],
)
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(ConfigError, match=r"store\.retries, retry_delay_s, concurrency, copy_threads or ramp_up"):
        Storage.open("memory://settings", StorageOptions(**wrong))


@pytest.mark.parametrize(
    ("cores", "given", "threads"), [(2, None, "4"), (24, None, "24"), (112, None, "32"), (112, "7", "7")]
)
def test_requests_are_sent_by_as_many_threads_as_cores(cores, given, threads, monkeypatch):
    """Unless the environment sets a number."""
    monkeypatch.setattr("pipeline.store.io.storage.num_cores", lambda: cores)
    name = "TENSORSTORE_HTTP_THREADS"
    environment = {name: given} if given else {}
    monkeypatch.setattr("os.environ", environment)
    set_request_defaults()
    assert environment.pop(name) == threads
    assert environment["TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS"] == "60"


def test_many_objects_are_read_in_order(tmp_path):
    storage = Storage.open(str(tmp_path))
    keys = [f"{i:04}" for i in range(1000)]
    for key in keys[::2]:
        storage.write(key, key.encode())
    assert list(storage.read_many(keys)) == [key.encode() if i % 2 == 0 else None for i, key in enumerate(keys)]


@pytest.fixture
def no_delay(monkeypatch):
    monkeypatch.setattr("pipeline.store.io.storage.time.sleep", lambda _: None)


def contains_value(key: str, content: bytes | None) -> bytes:
    if content != b"value":
        raise StoreInvalid(f"{key} is damaged")
    return content


def test_an_object_that_seems_damaged_is_read_again(s3, no_delay):
    storage = Storage.open(f"{new_bucket('s3', s3.backend)}/store")
    keys = [f"key-{i}" for i in range(20)]
    for key in keys:
        storage.write(key, b"value")
    for kinds in (CONTENT_FAULTS, *([kind] for kind in CONTENT_FAULTS)):
        s3.reset(rate=0.3, seed=1, kinds=kinds)
        assert list(storage.read_checked(keys, contains_value)) == [b"value"] * 20
        assert s3.faults.total()
    s3.reset()
    storage.write("key-7", b"other")
    read = storage.read_checked(keys, contains_value)
    assert [next(read) for _ in range(7)] == [b"value"] * 7
    with pytest.raises(StoreInvalid, match="key-7 is damaged"):
        next(read)
    assert s3.requests["GET", "store/key-7"] == 5


def test_programming_errors_are_not_taken_for_storage_failures(tmp_path):
    (tmp_path / "file").write_text("")
    array = ts.open(
        {"driver": "zarr3", "kvstore": {"driver": "memory"}}, create=True, shape=[4], dtype=ts.int32
    ).result()
    mistakes = {
        ValueError: (
            lambda: int("x"),
            lambda: np.zeros(3).reshape(2),
            lambda: array[:2].write(np.zeros(3, np.int32)).result(),
        ),
        TypeError: (lambda: len(3), lambda: Storage.open(tmp_path).kvstore.read(5)),
        RuntimeError: (lambda: dict_changed(), lambda: next(iter_of_stop())),
        ArithmeticError: (lambda: 1 / 0,),
    }
    for kind, calls in mistakes.items():
        for call in calls:
            with pytest.raises(kind), storage_errors("the store"):
                call()
    failures = (
        lambda: Storage.open(tmp_path / "file").kvstore.write("x", b"").result(),
        lambda: Storage.open(tmp_path).kvstore.write("x" * 300, b"").result(),
        lambda: Storage.open(tmp_path).kvstore.write("a/" * 3000 + "x", b"").result(),
        lambda: ts.open({"driver": "zarr3", "kvstore": f"file://{tmp_path}/none"}).result(),
        lambda: os.mkdir(tmp_path / "file"),
    )
    for call in failures:
        with pytest.raises(StoreError, match=r"^the store: .*\. [A-Z]"), storage_errors("the store"):
            call()


def dict_changed() -> None:
    values = {1: 2}
    for key in values:
        values[key + 1] = 0


def iter_of_stop() -> Iterator[int]:
    raise StopIteration
    yield 0


def test_directories_are_synced_before_their_content_counts(tmp_path, monkeypatch):
    """The parent of every new directory is synced, including those above the store."""
    synced, made = [], []
    fsync, mkdir = os.fsync, os.mkdir
    monkeypatch.setattr("os.fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")) or fsync(fd))
    monkeypatch.setattr("os.mkdir", lambda path, *mode: made.append(str(path)) or mkdir(path, *mode))
    root = tmp_path / "above" / "store"
    storage = Storage.open(root)
    storage.write("_commits/stream-00000/block-000000.json", b"x")
    assert storage.put("_leases/stream-00000.json", b"x")
    create_arrays(storage, layout())
    assert storage.put("tokens/c.12.0", b"x")
    directories = {path for path in (root, *root.rglob("*")) if path.is_dir()} | {root.parent}
    assert set(made) == set(map(str, directories))  # TensorStore makes no others
    for directory in directories:
        assert str(directory.parent) in synced, directory


@pytest.mark.parametrize(
    ("link", "target"), [("a/b", "/etc"), ("a/b/c", "/etc/passwd"), ("a", "elsewhere"), ("a/b/c", "none")]
)
def test_links_in_a_store_are_refused(tmp_path, link, target):
    (tmp_path / "link").symlink_to(tmp_path / "store")  # the store itself may be a link
    file = tmp_path / "store" / link
    file.parent.mkdir(parents=True)
    file.symlink_to(target)
    for root in (tmp_path / "store", tmp_path / "link"):
        storage = Storage.open(root)
        assert storage.read("zarr.json") is None
        for use, *content in ((storage.read,), (storage.put, b"x"), (storage.write, b"x")):
            with pytest.raises(StoreInvalid, match="a/b/c is a symbolic link or in a linked directory"):
                use("a/b/c", *content)


def test_objects_of_other_s3_services_have_s3_urls(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://localhost:9000")
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    storage = Storage.open("s3://bucket/some/store")
    spec = {"driver": "s3", "bucket": "bucket", "path": "some/store/"}
    assert storage.kvstore.spec().to_json() == spec | {"endpoint": "http://localhost:9000", "aws_region": "eu-west-1"}
    assert storage.url("zarr.json") == "s3://bucket/some/store/zarr.json"
