"""The command line of `python -m pipeline.verify`."""

from pipeline.verify import main
from tests.store.example_store import write_store


def test_a_sound_store_is_reported_as_sound(tmp_path, capsys):
    write_store(str(tmp_path))
    assert main([f"store.path={tmp_path}"]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{tmp_path}: sound\n"
    assert "block" in printed.err


def test_damage_is_reported_and_repaired(tmp_path, capsys):
    write_store(str(tmp_path))
    (tmp_path / "embed/c.0.0.0").unlink()
    (tmp_path / "_commits/stream-00001/block-000001.json").write_text("{}")
    (tmp_path / "_documents/stream-00000/block-000002.parquet").write_bytes(b"PAR1")
    assert main([f"store.path={tmp_path}"]) == 1
    printed = capsys.readouterr().out.splitlines()
    for where in ("embed/c.0.0.0", "_commits/stream-00001/block-000001.json", "_documents/stream-00000/block-000002"):
        assert any(line.startswith(where) for line in printed)
    assert not any("pipeline.verify" in line for line in printed)
    assert printed[-2] == f"{tmp_path}: 3 problems."
    assert printed[-1].startswith("verify.repair=true deletes the commit records of damaged blocks")
    assert main([f"store.path={tmp_path}", "verify.repair=true"]) == 0
    # From block 0 of stream 0 and from block 1 of stream 1, and the document table.
    assert "removed 5 commit records and 2 other objects. Run the job's command again" in capsys.readouterr().out
    write_store(str(tmp_path))
    assert main([f"store.path={tmp_path}"]) == 0


def test_a_partial_check_does_not_call_the_store_sound(tmp_path, capsys):
    write_store(str(tmp_path))
    part = ["verify.rank=1", "verify.world=2", "verify.sample=0.5"]
    assert main([f"store.path={tmp_path}", *part]) == 0
    assert capsys.readouterr().out == f"{tmp_path}: no problem found\n"
