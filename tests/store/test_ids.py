"""Documents by id: indexes of ids, lookup in them, and `pipeline.finalize`, which writes them."""

import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from pipeline.core.errors import StoreError, StoreInvalid
from pipeline.delete import main as delete
from pipeline.finalize import main as finalize
from pipeline.store import ActivationStore
from pipeline.store.check.verifying import verify_store
from pipeline.store.format.block_table import BlockTable
from pipeline.store.format.summary import IDS, put_summary
from pipeline.store.indexes import ids as ids_index
from pipeline.store.indexes.ids import StoredIds, block_entries, encode_index, index_ids
from pipeline.store.io.storage import Storage
from pipeline.store.write.store_writer import StoreWriter
from tests.store.example_store import (
    DOCUMENT_LENGTHS,
    NUM_STREAMS,
    blocks,
    commit_block,
    copy_store,
    layout,
    metadata,
    read_image,
    token_ids,
    write_store,
)
from tests.store.test_shards import changed_at

STREAMS = range(NUM_STREAMS)
DOCUMENTS = [(s, k) for s in STREAMS for k in range(len(DOCUMENT_LENGTHS[s]))]
REAL_HASH = ids_index.id_hash
in_memory = pytest.mark.parametrize("store_path", ["memory"], indirect=True)
HASHES = {"sha256": REAL_HASH, "all equal": lambda _: 1 << 63}


@pytest.fixture(params=HASHES)
def id_hash(request, monkeypatch) -> Callable[[str], int]:
    """Also hashes that collide: they only cost requests."""
    monkeypatch.setattr(ids_index, "id_hash", HASHES[request.param])
    return HASHES[request.param]


def block_table(num_blocks: int) -> BlockTable:
    [record] = [block.record for block in list(blocks(0))[:1]]
    return BlockTable.from_records([replace(record, block=block) for block in range(num_blocks)])


def tables_of(path: str) -> Iterator[tuple[int, int, str]]:
    """Stream, block and key of each document table."""
    for key in Storage.open(path).list_keys("_documents/"):
        stream, block = (int("".join(filter(str.isdigit, part))) for part in key.split("/")[1:])
        yield stream, block, key


def assert_all_found(path: str) -> None:
    store = ActivationStore.open(path)
    for stream, ordinal in DOCUMENTS:
        document = store.document(f"stream {stream} document {ordinal}")
        token = np.arange(DOCUMENT_LENGTHS[stream][ordinal])
        number = np.full_like(token, ordinal * NUM_STREAMS + stream)
        np.testing.assert_array_equal(document.tokens, token_ids(number, token))
    with pytest.raises(StoreError, match="no document has it"):
        store.document("nothing")


@pytest.mark.parametrize("count", [0, 1, 3000])
def test_each_id_is_found_in_the_blocks_that_have_it(count, id_hash, monkeypatch):
    monkeypatch.setattr(ids_index, "_ROW_GROUP", 100)
    table, storage = block_table(60), Storage.open(f"memory://ids-{uuid.uuid4().hex}")
    names = [f"document {n // 2}" for n in range(count)]  # each in two blocks, or twice in one
    placed = [(name, (17 * n) % 50) for n, name in enumerate(names)]
    content = encode_index([block_entries([name], block) for name, block in placed], [50])
    ids = StoredIds(storage, put_summary(storage, IDS, content), len(content), 1)
    for name in [*dict.fromkeys(names[:: 1 + count // 8]), "nothing", ""]:
        expected = sorted({block for other, block in placed if id_hash(other) == id_hash(name)})
        assert ids.find(name, table).column("block").tolist() == expected
    assert ids.covers(table).tolist() == [True] * 50 + [False] * 10


def write_ids(path: str, ids: dict[tuple[int, int], str]) -> None:
    """Writes the example store with other ids for some documents, given by stream and ordinal."""
    writer = StoreWriter.open(path, metadata(), layout())
    for stream in STREAMS:
        for block in blocks(stream):
            ordinals = [number // NUM_STREAMS for number in block.table["document"].to_pylist()]
            column = [ids.get((stream, k), f"stream {stream} document {k}") for k in ordinals]
            table = block.table.set_column(1, "id", pa.array(column))
            commit_block(writer, replace(block, table=table))
    writer.finish()


@pytest.mark.parametrize(
    ("ids", "asked", "expected"),
    [
        ({}, "stream 1 document 0", 1),
        ({}, "stream 0 document 5", 10),  # in several blocks
        ({}, "stream 0 document 99", "no document has it"),
        ({(0, 2): "文書 \N{GRINNING FACE}"}, "文書 \N{GRINNING FACE}", 4),
        ({(0, 2): "a\0b"}, "a\0b", 4),
        ({(1, 1): ""}, "", 3),
        ({}, "", "no document has it"),
        ({(0, 1): "same", (0, 2): "same"}, "same", r"documents \[2, 4\] have it; pass a number"),
        ({(0, 1): "same", (0, 7): "same", (1, 0): "same"}, "same", r"documents \[1, 2, 14\] have it"),
        ({(0, 5): "same", (1, 3): "same"}, "same", r"documents \[7, 10\] have it"),
    ],
)
@pytest.mark.parametrize("id_hash", ["sha256", "all equal"], indirect=True)
@in_memory
def test_an_index_does_not_change_the_result(ids, asked, expected, store_path, id_hash):
    write_ids(store_path, ids)
    for _ in ("without", "with"):
        store = ActivationStore.open(store_path)
        if isinstance(expected, int):
            assert store.document(asked).document == expected
        else:
            with pytest.raises(StoreError, match=expected):
                store.document(asked)
        index_ids(store.storage)


def test_only_the_documents_tables_are_read(tmp_path):
    copy_store(str(tmp_path))
    assert finalize([f"store.path={tmp_path}", "index=true"]) == 0
    document = ActivationStore.open(tmp_path).document("stream 0 document 2")
    stored = layout().rows_per_block * NUM_STREAMS
    own = {(0, int(row) // stored) for row in document.rows}
    for stream, block, key in list(tables_of(str(tmp_path))):
        if (stream, block) not in own:
            (tmp_path / key).unlink()
    np.testing.assert_array_equal(
        ActivationStore.open(tmp_path).document("stream 0 document 2").activations["embed"],
        document.activations["embed"],
    )
    with pytest.raises(StoreInvalid, match="is missing, although it is in _commits"):
        ActivationStore.open(tmp_path).document("stream 1 document 0")


def test_documents_missing_from_an_index_are_read_from_the_tables(tmp_path):
    path = tmp_path / "store"
    write_store(str(path), max_blocks=1)
    assert finalize([f"store.path={path}", "index=true"]) == 0
    earlier = ActivationStore.open(path)
    write_store(str(path))
    assert verify_store(str(path)) == []
    assert_all_found(str(path))
    gone = path / "_documents/stream-00000/block-000000.parquet"  # in the index, so not read
    content = gone.read_bytes()
    gone.unlink()
    assert ActivationStore.open(path).document("stream 1 document 3").document == 7
    gone.write_bytes(content)
    assert finalize([f"store.path={path}", "index=true"]) == 0
    assert_all_found(str(path))
    assert verify_store(str(path)) == []
    with pytest.raises(StoreError, match="no document has it"):
        earlier.document("stream 0 document 8")  # its block was committed after the store was opened
    assert earlier.document("stream 0 document 1").document == 2


def index_key(path: str) -> str:
    [key] = Storage.open(path).list_keys("_summary/ids-")
    return key


@pytest.mark.parametrize("change", [changed_at(100), changed_at(-6), changed_at(-1), lambda _: b"", lambda c: c[:-1]])
@in_memory
def test_a_damaged_index_is_refused(store_path, change):
    copy_store(store_path)
    storage = Storage.open(store_path)
    index_ids(storage)
    key = index_key(store_path)
    storage.write(key, change(storage.read(key)))
    with pytest.raises(StoreInvalid, match=r"_summary/ids-.*pipeline\.verify"):
        ActivationStore.open(store_path).document("stream 0 document 1")
    assert [problem.where for problem in verify_store(store_path)] == [key]


def test_the_index_is_written_once_and_deleted_with_its_store(tmp_path, capsys):
    copy_store(str(tmp_path))
    assert finalize([f"store.path={tmp_path}", "index=true"]) == 0
    assert capsys.readouterr().out.endswith(
        f"{tmp_path}: complete\n{tmp_path}: indexed {len(ActivationStore.open(tmp_path).documents())} ids\n"
    )
    before = read_image(str(tmp_path))
    assert finalize([f"store.path={tmp_path}", "index=true"]) == 0
    assert read_image(str(tmp_path)) == before  # nothing is written again
    assert finalize([f"store.path={tmp_path / 'nothing'}", "index=true"]) == 2

    assert delete([f"store.path={tmp_path}", "confirm=true"]) == 0
    assert not tmp_path.exists()


@in_memory
def test_only_a_finished_store_has_an_index(store_path):
    write_store(store_path, finish=False)
    with pytest.raises(StoreError, match="is not finished"):
        index_ids(Storage.open(store_path))
