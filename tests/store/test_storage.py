"""Storage: one contract of every kind of it, and what local files and requests need in addition."""

import os
import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipeline.core.errors import StoreError, StoreInvalid
from pipeline.store.format.arrays import grow_rows
from pipeline.store.io import local_files
from pipeline.store.io.options import StorageOptions
from pipeline.store.io.storage import Storage
from tests.store.emulators import new_bucket
from tests.store.example_store import layout
from tests.store.fault_proxy import CONTENT_FAULTS


def test_settings_reach_tensorstore():
    storage = Storage.open("memory://settings", StorageOptions(3, 0.5, concurrency=7))
    spec = storage.context.spec.to_json()
    assert spec["gcs_request_retries"]["max_retries"] == 3
    assert spec["s3_request_retries"] == spec["gcs_request_retries"]
    assert {spec[f"{kind}_concurrency"]["limit"] for kind in ("gcs_request", "s3_request", "file_io")} == {7}
    assert storage.put_threads._max_workers == 7
    storage.write("key", b"value")
    assert Storage.open("memory://settings").read("key") == b"value"


def test_processes_have_different_retry_delays():
    """Requests refused at the same time must not be repeated at the same time."""
    specs = [StorageOptions(16, 2.0).context().spec.to_json()["gcs_request_retries"] for _ in range(64)]
    assert len({spec["initial_delay"] for spec in specs}) == len({spec["max_delay"] for spec in specs}) == 64


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


def test_directories_are_synced_before_their_content_counts(tmp_path, monkeypatch):
    """The parent of every new directory is synced, including those above the store."""
    synced, made = [], []
    fsync, mkdir = os.fsync, os.mkdir
    monkeypatch.setattr("os.fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")) or fsync(fd))
    monkeypatch.setattr("os.mkdir", lambda path, *mode: made.append(str(path)) or mkdir(path, *mode))
    root = tmp_path / "above" / "store"
    storage = Storage.open(root)
    storage.write("_commits/stream-00000/block-000000.json", b"x")
    assert storage.put("_jobs/lease-00000.json", b"x")
    grow_rows(storage, layout(), 5)
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


@pytest.fixture(params=["local", "memory", "gs", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    fixture = {"gs": "gcs", "s3": "s3"}.get(request.param)
    if fixture is not None:
        return Storage.open(f"{new_bucket(request.param, request.getfixturevalue(fixture).backend)}/store")
    return Storage.open(tmp_path if request.param == "local" else f"memory://{tmp_path}")


def test_objects_are_listed_and_read_in_order(storage: Storage) -> None:
    contents = {f"a/{number:04}": bytes([number % 256]) * 10 for number in range(30)} | {"b": b"0123456789"}
    assert all(storage.put_threads.map(storage.put, contents, contents.values()))
    assert storage.list_keys() == sorted(contents)
    assert storage.list_keys("a/", "a/0027") == ["a/0027", "a/0028", "a/0029"]
    assert storage.list_keys("b") == ["b"]
    keys = [*contents, "absent"]
    assert list(storage.read_many(keys)) == [*contents.values(), None]
    assert list(storage.read_many(["b", "absent", "b"], [(2, 5), (0, 1), (-3, None)])) == [b"234", None, b"789"]
    storage.delete(contents)
    assert storage.list_keys() == []


def test_no_update_of_several_threads_is_lost(storage: Storage) -> None:
    def increment(content: bytes | None) -> tuple[int, bytes]:
        number = int(content or b"0") + 1
        return number, str(number).encode()

    with ThreadPoolExecutor(4) as pool:
        numbers = list(pool.map(lambda _: storage.update("counter", increment), range(12)))
    assert sorted(numbers) == list(range(1, 13))
    assert storage.update("counter", lambda content: (content, None)) == b"12"


def test_a_put_never_replaces(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [b"first", memoryview(b"second" * 100_000)]
    assert storage.put("a/object", *parts)
    for other in ([b"x"], parts, [b"longer" * 200_000]):
        assert not storage.put("a/object", *other)
    assert storage.put("a/other", b"short")
    assert storage.read("a/object") == b"".join(parts)
    assert storage.read("a/other") == b"short"
    puts = storage.put_threads.map(lambda number: storage.put("a/third", bytes([number]) * 1000), range(16))
    winners = [number for number, is_new in enumerate(puts) if is_new]
    assert len(winners) == 1
    assert storage.read("a/third") == bytes(winners) * 1000
    assert storage.list_keys() == ["a/object", "a/other", "a/third"]
    monkeypatch.setattr("os.path.lexists", lambda path: False)  # as before another process writes the object
    assert not storage.put("a/object", *parts)


def test_what_readers_would_refuse_is_not_put(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(local_files._MAX_BYTES, ".json", 3)
    assert storage.put("a.json", b"1", b"23")
    with pytest.raises(StoreInvalid, match=r"b\.json has 4 bytes, expected at most 3, and is not written"):
        storage.put("b.json", b"12", b"34")
    assert storage.list_keys() == ["a.json"]


def test_a_put_syncs_the_file_and_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the object exists: the process that wrote it may not have synced its directory yet."""
    storage = Storage.open(tmp_path)
    storage.put("a/first", b"x")
    synced: list[str] = []
    fsync = os.fsync
    monkeypatch.setattr("os.fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")) or fsync(fd))
    assert storage.put("a/second", b"x")
    file, directory = synced
    assert (Path(file).name.split(".")[0], directory) == ("second", str(tmp_path / "a"))
    assert not storage.put("a/second", b"x")
    assert synced[2:] == [str(tmp_path / "a")]


def test_a_put_that_fails_leaves_nothing(tmp_path: Path) -> None:
    storage = Storage.open(tmp_path)
    with largest_file(1000), pytest.raises(StoreError, match="File too large"):
        storage.put("a/object", b"x" * 10_000)
    assert list((tmp_path / "a").iterdir()) == []
    assert storage.put("a/object", b"x")


def test_a_file_system_without_hard_links_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_paths: str) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", link)
    with pytest.raises(StoreInvalid, match="no hard links.*give a mounted bucket by its URL"):
        Storage.open(tmp_path).put("a/object", b"x")
    assert list((tmp_path / "a").iterdir()) == []


def test_a_put_sends_what_many_threads_join(tmp_path: Path) -> None:
    storage = Storage.open(f"memory://{tmp_path}")
    contents = [bytes([number]) * (1 + number * 791_919 % 3_000_000) for number in range(200)]
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda number: storage.put(str(number), contents[number]), range(200)))
    assert list(storage.read_many(list(map(str, range(200))))) == contents


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Limits the size of this process's files, as a full disk would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
