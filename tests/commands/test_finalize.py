"""The command line of `python -m pipeline.finalize`."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from pipeline.finalize import main
from pipeline.store import ActivationStore
from pipeline.store.check.verifying import verify_store
from pipeline.store.generated.documents import group_key
from pipeline.store.io.storage import Storage
from pipeline.store.write.store_writer import StoreWriter
from tests.store.example_store import (
    LENGTH,
    NUM_STREAMS,
    blocks,
    commit_block,
    comparable_image,
    layout,
    metadata,
    write_blocks,
    write_store,
)


def test_an_unfinished_store_is_completed_as_by_a_run(tmp_path, capsys):
    write_store(str(tmp_path / "run"))
    write_store(str(tmp_path / "left"), finish=False)
    expected, outputs = comparable_image(str(tmp_path / "run")), []
    for _ in range(2):
        assert main([f"store.path={tmp_path / 'left'}"]) == 0
        assert comparable_image(str(tmp_path / "left")) == expected
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    assert outputs[0] == f"{tmp_path / 'left'}: complete\n"


def test_groups_with_activations_are_deleted_once_all_their_documents_are_in_blocks(tmp_path):
    storage = Storage.open(tmp_path)
    changed = {"capture": metadata().capture | {"when": "decode"}, "data": {"source": "generate", "group": 2}}
    writer = StoreWriter.open(str(tmp_path), metadata(**changed), layout())
    for stream in range(NUM_STREAMS):
        write_blocks(writer, stream)
    used = writer.streams[1].last.next["ordinal"] // 2
    for index in range(used + 2):
        storage.write(group_key(1, index), b"a group")
    assert used > 0
    assert main([f"store.path={tmp_path}"]) == 0
    assert storage.list_keys("_generated/") == [group_key(1, used), group_key(1, used + 1)]


def test_several_commands_may_run_at_once(tmp_path):
    write_store(str(tmp_path), finish=False)
    with ThreadPoolExecutor() as pool:
        codes = list(pool.map(main, [[f"store.path={tmp_path}"]] * 4))
    assert codes == [0] * 4
    assert ActivationStore.open(tmp_path).complete
    assert verify_store(str(tmp_path)) == []


def test_an_unfinished_stream_is_reported_unless_forced(tmp_path, capsys):
    writer = StoreWriter.open(str(tmp_path), metadata(config={"run": {"max_tokens": None}}), layout())
    write_blocks(writer, 0)
    commit_block(writer, next(blocks(1)))
    assert main([f"store.path={tmp_path}"]) == 1
    assert "streams 1 are unfinished" in capsys.readouterr().err
    assert ActivationStore.open(tmp_path).complete is False
    assert main([f"store.path={tmp_path}", "force=true"]) == 0
    assert ActivationStore.open(tmp_path).complete
    assert verify_store(str(tmp_path)) == []


@pytest.mark.parametrize(("missing", "code"), [(0, 0), (-LENGTH + 1, 0), (-LENGTH, 0), (1, 1)])
def test_a_share_of_max_tokens_that_ends_with_a_block_ends_its_stream(tmp_path, missing, code):
    """The share of stream 0 has `missing` more tokens than are stored."""
    stored = next(blocks(0)).record.tokens
    config = {"run": {"max_tokens": 2 * (stored + missing)}}
    writer = StoreWriter.open(str(tmp_path), metadata(config=config), layout())
    write_blocks(writer, 0, max_blocks=1)
    write_blocks(writer, 1)
    assert writer.streams[0].last.tokens == stored
    assert main([f"store.path={tmp_path}"]) == code
