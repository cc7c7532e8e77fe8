"""The command line of `python -m pipeline.delete`."""

import pytest

from pipeline.delete import main
from pipeline.store.claims import Claims
from pipeline.store.kvstore import open_kvstore, write_key
from tests.store.emulators import new_bucket
from tests.store.example_store import write_store


@pytest.mark.parametrize("finish", [True, False])
def test_nothing_is_left_of_a_local_store(tmp_path, finish, capsys):
    path = tmp_path / "store"
    write_store(str(path), finish=finish)
    assert main([f"store.path={path}"]) == 2
    assert "confirm=true deletes it" in capsys.readouterr().err
    before = sorted(path.rglob("*"))
    assert before
    assert main([f"store.path={path}", "confirm=true"]) == 0
    assert not path.exists()
    assert main([f"store.path={path}", "confirm=true"]) == 2
    assert "there is no activation store" in capsys.readouterr().err


def test_what_lies_beside_a_store_stays(tmp_path, capsys):
    outer, inner, note = tmp_path, tmp_path / "inner", tmp_path / "note.txt"
    write_store(str(outer))
    write_store(str(inner))
    note.write_text("mine")
    expected = sorted([note, inner, *inner.rglob("*")])
    (outer / "stats").mkdir()
    (outer / "stats" / "mine.csv").write_text("mine")
    expected = sorted([*expected, outer / "stats", outer / "stats" / "mine.csv"])
    assert main([f"store.path={outer}", "confirm=true"]) == 0
    assert sorted(outer.rglob("*")) == expected
    capsys.readouterr()


def test_a_remote_store(gcs, capsys):
    path = f"{new_bucket('gs', gcs.backend)}/store"
    write_store(path)
    assert main([f"store.path={path}", "confirm=true"]) == 0
    assert open_kvstore(path).list().result() == []
    capsys.readouterr()


def test_on_s3_nothing_else_of_the_bucket_is_deleted(s3, capsys):
    """The emulator of GCS does not list by prefix."""
    bucket = new_bucket("s3", s3.backend)
    write_key(open_kvstore(bucket), "store/tokens.txt", b"mine")
    write_store(f"{bucket}/store")
    assert main([f"store.path={bucket}/store", "confirm=true"]) == 0
    assert open_kvstore(bucket).list().result() == [b"store/tokens.txt"]
    capsys.readouterr()


def test_a_store_that_a_worker_holds_stays(tmp_path, capsys):
    path = str(tmp_path / "store")
    write_store(path, finish=False)
    before = sorted(tmp_path.rglob("*"))
    claims = Claims(path, lease_s=60)
    [vacancy, *_] = claims.vacancies([1])
    assert claims.claim(vacancy)
    assert main([f"store.path={path}", "confirm=true"]) == 1
    assert f"workers hold streams (1 by {claims.owner})" in capsys.readouterr().err
    assert set(before) <= set(tmp_path.rglob("*"))
    assert main([f"store.path={path}", "confirm=true", "force=true"]) == 0  # as if the worker were dead
    assert not (tmp_path / "store").exists()
    claims.close()


@pytest.mark.parametrize("arguments", [[], ["store.path="], ["store.path=a", "confirm=yes"], ["store.path=a", "x=1"]])
def test_usage(arguments, capsys):
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith("usage: python -m pipeline.delete store.path=...")
