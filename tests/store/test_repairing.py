"""`verify.repair=true` removes what is damaged and nothing else; the job's command then completes the store."""

import json
import os
import threading
from dataclasses import replace

import pytest

from pipeline.core.errors import StoreError
from pipeline.store import ActivationStore
from pipeline.store.check.repairing import verify_and_print
from pipeline.store.format.commits import commit_key
from pipeline.store.format.metadata import change_root, require_root
from pipeline.store.format.tables import table_key
from pipeline.store.generated.documents import group_key
from pipeline.store.io.storage import Storage
from pipeline.store.write.store_writer import StoreWriter
from tests.store.example_store import (
    complete_full_store,
    edit_root,
    flip,
    full_image,
    in_memory,
    read_image,
    write_image,
)
from tests.store.test_damage import DAMAGE, copy, delete, edit, image_for

RESID = "blocks.1.resid_post"


def run_job(path: str) -> None:
    """What the job's command does with the store of `full_image`."""
    writer = StoreWriter.open_existing(path)
    complete_full_store(StoreWriter.open(path, writer.metadata, writer.layout))


def values(path: str) -> list:
    store = ActivationStore.open(path)
    return [store.read(key, store.rows).tolist() for key in store.keys] + [store.documents().to_pylist()]


REPAIRED = (
    *("record", "deleted first record", "deleted last record", "record elsewhere", "record of no stream", "blocks"),
    *("deleted shard", "deleted documents", "deleted array", "rows of an array", "exchanged shard", "document table"),
    *("merged statistics", "deleted ids", "part: too far right", "part: edited"),
)


@pytest.mark.parametrize("name", REPAIRED)
def test_a_repaired_store_is_completed_by_its_job(name):
    with in_memory(image_for(name)) as path:
        expected = values(path)
        DAMAGE[name][0](Storage.open(path))
        verify_and_print(path, repairs=True)
        run_job(path)
        assert verify_and_print(path) == 0
        assert values(path) == expected


@pytest.mark.parametrize(
    ("damage", "removed"),
    [
        ([edit(f"{RESID}/c.2.0.0")], [f"{RESID}/c.2.0.0", *(commit_key(0, block) for block in (1, 2, 3))]),
        (
            [edit(f"{RESID}/c.2.0.0"), edit("tokens/c.6.0")],
            [f"{RESID}/c.2.0.0", "tokens/c.6.0", *(commit_key(0, block) for block in (1, 2, 3))],
        ),
        ([delete("tokens/c.6.0")], [commit_key(0, 3)]),
        ([edit(table_key(1, 1))], [table_key(1, 1), commit_key(1, 1)]),
        ([edit(commit_key(0, 2))], [commit_key(0, 2), commit_key(0, 3)]),
        (
            [delete(commit_key(0, 3))],  # so that nothing is known of the block's objects
            [key for key in full_image() if "/c.6." in key or key.endswith("stream-00000/block-000003.parquet")],
        ),
        ([copy("tokens/c.6.0", "tokens/c.99.0")], ["tokens/c.99.0"]),
    ],
)
def test_sound_objects_stay(damage, removed):
    with in_memory(full_image()) as path:
        for change in damage:
            change(Storage.open(path))
        before = set(read_image(path))
        assert verify_and_print(path, repairs=True) == 0
        assert before - set(read_image(path)) == set(removed)


def test_objects_of_no_committed_block_are_removed_only_if_asked(capsys):
    with in_memory(full_image()) as path:
        edit_root(path, lambda root: root.update(complete=False, summary=None))
        Storage.open(path).write(commit_key(0, 3), None)
        before = set(read_image(path))
        assert verify_and_print(path) == 0
        assert set(read_image(path)) == before
        assert verify_and_print(path, repairs=True) == 0
        removed = before - set(read_image(path))
        assert {f"{RESID}/c.6.0.0", table_key(0, 3)} <= removed
        assert all("c.6." in key or "block-000003" in key for key in removed)
        assert "removed 0 commit records and 12 other objects" in capsys.readouterr().out.splitlines()[-1]


def test_damaged_groups_are_removed():
    with in_memory(full_image()) as path:
        storage = Storage.open(path)
        data = {"source": "generate"}
        change_root(storage, lambda root: replace(root, metadata=replace(root.metadata, data=data)))
        for index in range(4):
            storage.write(group_key(1, index), b"damaged" if index == 2 else b"PAR1")
        verify_and_print(path, repairs=True)
        assert storage.list_keys("_generated/") == []  # none of them is a group


@pytest.mark.parametrize("is_renewed", [True, False])
def test_nothing_is_removed_while_a_lease_is_renewed(tmp_path, is_renewed):
    write_image(str(tmp_path), full_image())
    edit_root(str(tmp_path), lambda root: root["config"]["run"].update(lease_s=0.3))
    flip(str(tmp_path), f"{RESID}/c.2.0.0")
    storage = Storage.open(str(tmp_path))
    storage.write("_jobs/lease-00000.json", b"0")
    image = read_image(str(tmp_path))
    timer = threading.Timer(0.1, lambda: storage.write("_jobs/lease-00000.json", b"1"))
    if is_renewed:
        timer.start()
        with pytest.raises(StoreError, match="a job writes to .* its leases changed. Nothing was removed"):
            verify_and_print(str(tmp_path), repairs=True)
        timer.join()
        assert read_image(str(tmp_path)) == {**image, "_jobs/lease-00000.json": b"1"}
    else:
        assert verify_and_print(str(tmp_path), repairs=True) == 0
        assert not require_root(storage).complete


@pytest.mark.parametrize("is_link", [True, False])
def test_what_is_in_the_place_of_an_object_is_removed(tmp_path, is_link):
    store, outside = tmp_path / "store", tmp_path / "outside"
    write_image(str(store), full_image())
    path = store / f"{RESID}/c.2.0.0"
    path.rename(outside)
    content = outside.read_bytes()
    path.symlink_to(outside) if is_link else os.mkfifo(path)
    assert verify_and_print(str(store), repairs=True) == 0
    assert not os.path.lexists(path)
    assert outside.read_bytes() == content
    run_job(str(store))
    assert verify_and_print(str(store)) == 0


def test_nothing_is_removed_in_a_linked_folder(tmp_path):
    store, outside = tmp_path / "store", tmp_path / "outside"
    write_image(str(store), full_image())
    (store / RESID).rename(outside)
    (store / RESID).symlink_to(outside)
    root = json.loads((store / "zarr.json").read_text())
    with pytest.raises(StoreError, match="is a symbolic link, or in a linked folder. Nothing was removed"):
        verify_and_print(str(store), repairs=True)
    assert len(list(outside.iterdir())) == 7
    assert json.loads((store / "zarr.json").read_text()) == root
