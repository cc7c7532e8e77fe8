"""Finishing a store: any number of times, by several processes, beside an extension."""

import pytest

from pipeline.core.errors import StoreInvalid
from pipeline.store import ActivationStore
from pipeline.store.format.metadata import ROOT_KEY, read_root
from pipeline.store.io.storage import Storage
from pipeline.store.write.store_writer import StoreWriter
from tests.store.example_store import (
    NUM_STREAMS,
    blocks,
    commit_block,
    read_image,
    stored_tokens,
    write_blocks,
    write_store,
)


def test_finishing_again_changes_nothing(store_path):
    writer = write_store(store_path)
    before = read_image(store_path)
    assert writer.finish()
    assert StoreWriter.open_existing(store_path).finish()
    assert read_image(store_path) == before


def test_a_late_finisher_does_not_undo_an_extension(store_path):
    """It read the records before the extension began, and finds that the root has changed."""
    writer = write_store(store_path, finish=False, max_blocks=1)
    other = StoreWriter.open_existing(store_path)

    def extend_while_reading():
        streams = type(other.streams).read_all_again(other.streams)
        writer.reopen("all")
        return streams

    other.streams.read_all_again = extend_while_reading
    assert not other.finish()
    assert not read_root(Storage.open(store_path)).complete
    for stream in range(NUM_STREAMS):
        write_blocks(writer, stream)
    assert writer.finish()


def test_a_finisher_reads_what_other_writers_have_committed(store_path):
    writers = [write_store(store_path, finish=False, max_blocks=1) for _ in range(NUM_STREAMS)]
    writers[0].reopen("all")
    for stream, writer in enumerate(writers):
        write_blocks(writer, stream)
    assert writers[0].finish()
    assert ActivationStore.open(store_path).num_tokens == stored_tokens()


def test_finishing_does_not_hide_a_lost_record(store_path):
    record = write_store(store_path).streams[0].last
    Storage.open(store_path).write(record.key, None)
    before = read_root(Storage.open(store_path))
    writer = StoreWriter.open_existing(store_path)
    writer.reopen("all")
    assert not writer.finish()
    assert writer.finish(force=True)
    assert read_root(Storage.open(store_path)).summary != before.summary
    assert len(ActivationStore.open(store_path).blocks) == 5


@pytest.mark.parametrize(
    "change", [StoreWriter.finish, StoreWriter.reopen, lambda store: store.record(weights_error={})]
)
def test_a_root_that_was_deleted_meanwhile_is_not_written_again(tmp_path, change):
    writer = write_store(str(tmp_path / "store"))
    writer.storage.write(ROOT_KEY, None)
    with pytest.raises(StoreInvalid, match=r"store/zarr\.json was deleted while the store was being written"):
        change(writer)
    assert writer.storage.read(ROOT_KEY) is None


def test_a_forced_store_takes_more_blocks_later(store_path):
    """A job that runs beside `finalize force=true` goes on, and completes the store again."""
    writer = write_store(store_path, finish=False, max_blocks=1)
    assert StoreWriter.open_existing(store_path).finish(force=True)
    [_, block, *_] = blocks(0)
    commit_block(writer, block)
    for stream in range(NUM_STREAMS):
        write_blocks(writer, stream)
    assert writer.finish()
    assert len(ActivationStore.open(store_path).blocks) == sum(len(list(blocks(s))) for s in range(NUM_STREAMS))
