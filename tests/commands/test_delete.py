"""The command line of `python -m pipeline.delete`."""

import itertools
import json
import os
import re
import shutil
import threading

import pytest

from pipeline.delete import main
from pipeline.store.io.storage import Storage
from pipeline.store.write.leases import Leases
from tests.store.emulators import new_bucket
from tests.store.example_store import write_store
from tests.store.hostile_stores import seal_root


@pytest.mark.parametrize(("finish", "max_blocks", "blocks"), [(True, None, 6), (False, 1, 2), (False, 0, 0)])
def test_a_local_store_is_deleted_completely(tmp_path, finish, max_blocks, blocks, capsys):
    path = tmp_path / "store"
    write_store(str(path), finish=finish, max_blocks=max_blocks)
    assert main([f"store.path={path}"]) == 2
    assert re.search(f" with {blocks} blocks, created .* confirm=true deletes it", capsys.readouterr().err)
    before = sorted(path.rglob("*"))
    assert before
    assert main([f"store.path={path}", "confirm=true"]) == 0
    assert not path.exists()
    assert main([f"store.path={path}", "confirm=true"]) == 2
    assert "there is no activation store" in capsys.readouterr().err


def test_other_objects_of_an_s3_bucket_stay(s3, capsys):
    """Only on S3, since the GCS emulator does not list by prefix."""
    bucket = new_bucket("s3", s3.backend)
    write_store(f"{bucket}/store")
    mine = ["store/tokens.txt", "store/tokens/mine", "store/_commits/notes.json", "store2/zarr.json"]
    for key in mine:
        Storage.open(bucket).write(key, b"mine")
    assert main([f"store.path={bucket}/store", "confirm=true"]) == 0
    assert Storage.open(bucket).list_keys() == sorted(mine)
    assert "except files that are not part of the store: " in capsys.readouterr().out


FOREIGN = (
    "documents/thesis.txt",
    "tokens/mine.npy",
    "tokens/c.x.0",
    "tokens/c.0.0.bak",
    "embed.scale.old/zarr.json",
    "_commits/notes.json",
    "_commits/stream-00000/block-1.json",
    "_commits/stream-00000/block-000000.json.orig",
    "_documents/stream-00000/mine.parquet",
    "_statistics/mine.csv",
    "_summary/blocks-mine.parquet",
    "_jobs/mine.jsonl",
    "_jobs/mine.parquet",
    "inner/zarr.json",
    "inner/_commits/stream-00000/block-000000.json",
    ".hidden",
    "a\nb",
)


def test_only_objects_with_the_exact_names_of_a_store_are_deleted(tmp_path, capsys):
    path = tmp_path / "store"
    write_store(str(path))
    own = ["_jobs/20261122T150044Z-a-host-28071.jsonl", "_generated/stream-00001/group-000003.parquet"]
    own += [
        "_jobs/lease-123456.json",
        "_jobs/manifest.json",
        "zarr.json.__lock",
        "tokens/c.7.0.0123abcd.__lock",
    ]
    for key in (*FOREIGN, *own):
        (path / key).parent.mkdir(parents=True, exist_ok=True)
        (path / key).write_text("mine")
    assert main([f"store.path={path}", "confirm=true", "force=true"]) == 0
    left = sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())
    assert left == sorted(FOREIGN)
    assert all((path / key).read_text() == "mine" for key in FOREIGN)
    assert "except files that are not part of the store" in capsys.readouterr().out


@pytest.mark.parametrize(
    "linked",
    ["_commits", "tokens", "embed/zarr.json", "tokens/c.0.0", "_documents", "_documents/stream-00000"],
)
def test_links_are_neither_followed_nor_removed(tmp_path, capsys, linked):
    path, elsewhere = tmp_path / "store", tmp_path / "elsewhere"
    write_store(str(path))
    (path / linked).rename(elsewhere)
    (path / linked).symlink_to(elsewhere)
    before = {file: file.read_bytes() for file in (elsewhere, *elsewhere.rglob("*")) if file.is_file()}
    assert before
    assert main([f"store.path={path}", "confirm=true"]) == 0
    assert {file: file.read_bytes() for file in (elsewhere, *elsewhere.rglob("*")) if file.is_file()} == before
    assert [str(file.relative_to(path)) for file in path.rglob("*") if file.is_symlink()] == [linked]
    assert f"except files that are not part of the store: {linked}" in capsys.readouterr().out
    assert not (path / "zarr.json").exists()


def test_a_store_behind_a_link_is_deleted_and_the_link_stays(tmp_path, capsys):
    write_store(str(tmp_path / "store"))
    (tmp_path / "link").symlink_to("store")
    assert main([f"store.path={tmp_path / 'link'}", "confirm=true"]) == 0
    assert list((tmp_path / "link").iterdir()) == []
    assert (tmp_path / "link").is_symlink()
    capsys.readouterr()


def test_crafted_names_of_arrays_are_refused_before_anything_is_deleted(tmp_path, capsys):
    """In roots that agree with themselves, with valid checksums."""
    path = tmp_path / "store"
    write_store(str(path))
    sound = (path / "zarr.json").read_text()
    (tmp_path / "x" / "c").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    for name in ("../x", "/etc", "", "..", "_commits", "_commits/..", "tokens", "a/b", "blocks.01.resid_post"):
        root = json.loads(sound)
        attributes = root["attributes"]["activation_store"]
        attributes["capture"]["arrays"].append(name)
        attributes["arrays"][name] = attributes["arrays"]["embed"]
        (path / "zarr.json").write_text(seal_root(json.dumps(root)))
        assert main([f"store.path={path}", "confirm=true"]) == 2, name
        assert "zarr.json is damaged: 'arrays" in capsys.readouterr().err
        assert sorted(tmp_path.rglob("*")) == before


def test_a_deletion_killed_at_any_point_can_be_repeated(tmp_path, monkeypatch, capsys):
    """Killed before it removes the n-th file or folder, for every n."""

    class Killed(BaseException):
        pass

    left = -1
    one_at_a_time, is_dead = threading.Lock(), threading.Event()

    def counted(remove):
        def instead(*arguments, **options):
            nonlocal left
            with one_at_a_time:
                left -= 1
                if left == 0 or is_dead.is_set():
                    is_dead.set()
                    raise Killed
                return remove(*arguments, **options)

        return instead

    monkeypatch.setattr("os.unlink", counted(os.unlink))
    monkeypatch.setattr("os.rmdir", counted(os.rmdir))
    path = tmp_path / "store"
    write_store(str(path))
    (path / "zarr.json.__lock").touch()
    shutil.copytree(path, tmp_path / "copy")
    num_of_embed = len(list((path / "embed").rglob("*")))
    for kill in itertools.count(1):
        left = kill
        try:
            main([f"store.path={path}", "confirm=true"])
        except Killed:
            left = -1
            is_dead.clear()
            if (path / "zarr.json").exists():
                records = list((path / "_commits").rglob("*.json"))
                assert not records or len(list((path / "embed").rglob("*"))) == num_of_embed
                assert main([f"store.path={path}", "confirm=true"]) == 0
                assert not path.exists()
            else:
                assert not path.exists() or not any(path.iterdir())
            shutil.copytree(tmp_path / "copy", path, dirs_exist_ok=True)
        else:
            break
    assert kill > 60
    capsys.readouterr()


def test_a_store_with_leased_streams_is_not_deleted(tmp_path, capsys):
    path = str(tmp_path / "store")
    write_store(path, finish=False)
    before = sorted(tmp_path.rglob("*"))
    leases = Leases(path, lease_s=60)
    assert all(map(leases.take, leases.vacant([1])))
    assert main([f"store.path={path}", "confirm=true"]) == 1
    assert "processes have leased streams (_jobs/lease-00001.json)" in capsys.readouterr().err
    assert set(before) <= set(tmp_path.rglob("*"))
    assert main([f"store.path={path}", "confirm=true", "force=true"]) == 0  # as if the process were dead
    assert not (tmp_path / "store").exists()
    leases.close()


def test_a_store_that_another_process_deletes_meanwhile_is_an_error_without_a_traceback(tmp_path, monkeypatch, capsys):
    write_store(str(tmp_path / "store"))
    monkeypatch.setattr(
        "pipeline.store.write.store_path.remove_empty_folders", lambda _: shutil.rmtree(tmp_path / "store", True)
    )
    assert main([f"store.path={tmp_path / 'store'}", "confirm=true"]) == 1
    assert "No such file or directory" in capsys.readouterr().err
