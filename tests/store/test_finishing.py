"""Finishing does not hide a lost record, and does not restore a deleted root."""

import pytest

from pipeline.core.errors import StoreError
from pipeline.store.check.verifying import verify_store
from pipeline.store.format.metadata import ROOT_KEY, read_root
from pipeline.store.io.storage import Storage
from pipeline.store.write.store_writer import StoreWriter
from tests.store.example_store import write_store


def test_finishing_does_not_shrink_a_complete_store_that_lost_a_record(store_path):
    record = write_store(store_path).streams[0].last
    before = read_root(Storage.open(store_path))
    Storage.open(store_path).write(record.key, None)
    problems = [problem.where for problem in verify_store(store_path)]
    assert not StoreWriter.open_existing(store_path).finish()
    assert read_root(Storage.open(store_path)) == before
    assert [problem.where for problem in verify_store(store_path)] == problems
    assert StoreWriter.open_existing(store_path).finish(force=True)
    assert read_root(Storage.open(store_path)).blocks[0] == record.block


@pytest.mark.parametrize(
    "change", [StoreWriter.finish, StoreWriter.reopen, lambda store: store.record(may_be_not_finite=True)]
)
def test_a_root_that_was_deleted_meanwhile_is_not_written_again(tmp_path, change):
    writer = write_store(str(tmp_path / "store"))
    writer.storage.write(ROOT_KEY, None)
    with pytest.raises(StoreError, match=r"store/zarr\.json was deleted while the store was being written"):
        change(writer)
    assert writer.storage.read(ROOT_KEY) is None
