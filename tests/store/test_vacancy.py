"""A store is created only at an empty path: foreign files are neither mixed with it nor replaced."""

import os
from pathlib import Path

import pytest

from pipeline.core.errors import StoreInvalid
from pipeline.store.check.verifying import verify_store
from pipeline.store.io.storage import Storage
from pipeline.store.write.store_path import require_vacant
from pipeline.store.write.store_writer import StoreWriter
from tests.store.emulators import new_bucket
from tests.store.example_store import layout, metadata, write_store


def make(folder: Path, names: list[str]) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).mkdir() if name.endswith("/") else (folder / name).write_text("mine")


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(file): file.read_bytes() if file.is_file() else None for file in folder.rglob("*")}


FOREIGN = (
    ["notes.txt"],
    ["documents/0.txt", "tokens/a.npy"],
    ["tokens/zarr.json"],
    ["deep/er/and/deeper/file"],
    ["tokens/sub/zarr.json"],
    ["other/zarr.json"],
    ["_jobs/lease-1.json"],
    ["_documents/stream-00000/block-000000.parquet"],
    ["a", "b", "c", "d", "e"],
)


@pytest.mark.parametrize("names", FOREIGN, ids=lambda names: names[0])
def test_a_path_with_foreign_files_is_refused(tmp_path, names):
    path = tmp_path / "store"
    make(path, names)
    before = contents(path)
    with pytest.raises(StoreInvalid, match=r"is not empty and is not a store: .*Set store\.path to an empty") as e:
        write_store(str(path))
    assert any(name in str(e.value) for name in names)
    assert contents(path) == before


@pytest.mark.parametrize(
    "names",
    [
        [],
        ["zarr.json.__lock", "zarr.json.0123abcd.__lock"],
        ["empty/", "tokens/"],
        [
            "_jobs/lease-00000.json",
            "_jobs/lease-00000.json.__lock",
            "_jobs/20261122T150044Z-h-1.jsonl",
        ],
        ["_jobs/manifest.json"],
        [".DS_Store", ".hydra/config.yaml", ".nfs0123", "lost+found/"],
    ],
    ids=lambda names: " ".join(names) or "nothing",
)
def test_remains_of_interruptions_and_file_systems_are_allowed(tmp_path, names):
    make(tmp_path / "store", names)
    write_store(str(tmp_path / "store"))
    assert verify_store(str(tmp_path / "store")) == []


def test_links_in_the_path_are_refused_and_a_link_to_it_is_not(tmp_path):
    for name, target in (("tokens", "elsewhere"), ("a", "nowhere"), ("_commits", "elsewhere")):
        folder = tmp_path / f"store-{name}"
        (tmp_path / "elsewhere").mkdir(exist_ok=True)
        folder.mkdir()
        (folder / name).symlink_to(tmp_path / target)
        with pytest.raises(StoreInvalid, match=r"is not empty"):
            write_store(str(folder))
    (tmp_path / "link").symlink_to("elsewhere")
    write_store(str(tmp_path / "link"))
    assert (tmp_path / "elsewhere" / "zarr.json").exists()


def test_a_root_written_by_another_process_meanwhile_is_reported(tmp_path):
    write_store(str(tmp_path))
    assert not require_vacant(Storage.open(str(tmp_path)))


def test_checking_for_foreign_files_lists_few_directories(tmp_path, monkeypatch):
    make(tmp_path, [f"{i:02}/{j}" for i in range(20) for j in range(10)])
    looked_at = []
    scandir = os.scandir
    monkeypatch.setattr("os.scandir", lambda path: looked_at.append(path) or scandir(path))
    with pytest.raises(StoreInvalid, match="is not empty"):
        require_vacant(Storage.open(str(tmp_path)))
    assert len(looked_at) <= 3


def test_foreign_objects_in_a_bucket_are_refused(s3, monkeypatch):
    monkeypatch.setattr("pipeline.store.io.storage._REREAD_DELAYS_S", (0.0,))  # of the missing root
    bucket = new_bucket("s3", s3.backend)
    storage = Storage.open(bucket)
    storage.write("notes.txt", b"mine")
    storage.write("store/", b"")  # a folder made in a web console
    with pytest.raises(StoreInvalid, match=r"is not a store: notes\.txt"):
        write_store(bucket)
    StoreWriter.open(f"{bucket}/store", metadata(), layout())
    assert storage.read("store/zarr.json")
    assert storage.read("notes.txt") == b"mine"
    assert storage.read("zarr.json") is None
