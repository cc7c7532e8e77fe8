"""Documents by id: indexes of ids, lookup in them, and `pipeline.index`, which writes them."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from pipeline.core.errors import StoreError, StoreInvalid
from pipeline.delete import main as delete
from pipeline.index import main as index
from pipeline.store import ActivationStore
from pipeline.store.check.scope import Level, Scope
from pipeline.store.check.verifying import verify_store
from pipeline.store.format.block_table import BlockTable
from pipeline.store.format.problems import Remedy
from pipeline.store.ids import index_file, lookup
from pipeline.store.ids.index_file import (
    ENTRY,
    HEADER_BYTES,
    IndexHeader,
    block_entries,
    decode_index,
    ids_key,
    sorted_entries,
)
from pipeline.store.ids.lookup import StoredIds
from pipeline.store.io.storage import Storage
from pipeline.store.write.indexing import index_ids
from pipeline.store.write.store_writer import StoreWriter
from tests.store.example_store import (
    DOCUMENT_LENGTHS,
    NUM_STREAMS,
    ROWS,
    blocks,
    commit_block,
    copy_store,
    layout,
    metadata,
    token_ids,
    write_store,
)
from tests.store.test_shard_files import changed_at

STREAMS = range(NUM_STREAMS)
DOCUMENTS = [(s, k) for s in STREAMS for k in range(len(DOCUMENT_LENGTHS[s]))]
REAL_HASH = index_file.id_hash
in_memory = pytest.mark.parametrize("store_path", ["memory"], indirect=True)
HASHES = {
    "sha256": REAL_HASH,
    "all equal": lambda _: 1 << 63,
    "of 3 bits": lambda id: REAL_HASH(id) >> 61 << 61,
    "all small": lambda id: REAL_HASH(id) >> 40,
    "all large": lambda id: (1 << 64) - 1 - (REAL_HASH(id) >> 40),
}


@pytest.fixture(params=HASHES)
def id_hash(request, monkeypatch) -> Callable[[str], int]:
    """Also hashes that collide or are not uniform: they only cost requests."""
    for module in (index_file, lookup):
        monkeypatch.setattr(module, "id_hash", HASHES[request.param])
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


@pytest.mark.parametrize("count", [0, 1, 256, 257, 3000])
def test_each_id_is_found_in_the_blocks_that_have_it(count, id_hash):
    table, key = block_table(50), ids_key(0)
    names = [f"document {n // 2}" for n in range(count)]  # each in two blocks, or twice in one
    placed = [(name, (17 * n) % 50) for n, name in enumerate(names)]
    entries = sorted_entries([block_entries([name], block) for name, block in placed])
    content = IndexHeader.of(table, len(entries), key).encode(entries)
    header, decoded = decode_index(content, key)
    assert (header.num_blocks, header.num_entries) == (50, count)
    np.testing.assert_array_equal(decoded, entries)
    storage = Storage.open(f"memory://ids-{count}")
    storage.write(key, content)
    ids = StoredIds(storage, [table])
    for name in [*dict.fromkeys(names[:: 1 + count // 8]), "nothing", ""]:
        expected = sorted({block for other, block in placed if id_hash(other) == id_hash(name)})
        hits, unknown = ids.find(name)
        assert hits.column("block").tolist() == expected
        assert len(unknown) == 0


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
        index_ids(store.storage, STREAMS)


def test_only_the_documents_tables_are_read(tmp_path):
    copy_store(str(tmp_path))
    assert index([f"store.path={tmp_path}"]) == 0
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
    with pytest.raises(StoreInvalid, match="is missing, although the block is committed"):
        ActivationStore.open(tmp_path).document("stream 1 document 0")


@pytest.mark.parametrize(
    ("is_finished", "max_rows"),
    [(True, ROWS), (True, ROWS + 2), (False, ROWS)],  # with ROWS + 2, the last blocks are truncated
)
def test_documents_missing_from_an_index_are_read_from_the_tables(tmp_path, is_finished, max_rows):
    path = tmp_path / "store"
    write_store(str(path), finish=is_finished, max_rows=max_rows)
    index_ids(Storage.open(path), STREAMS)
    assert verify_store(str(path)) == []
    earlier = {key: Storage.open(path).read(key) for key in map(ids_key, STREAMS)}
    write_store(str(path))
    assert verify_store(str(path)) == []
    assert {key: Storage.open(path).read(key) for key in earlier} == earlier
    assert_all_found(str(path))
    gone = path / "_documents/stream-00000/block-000000.parquet"  # in the index, so not read again
    content = gone.read_bytes()
    gone.unlink()
    assert ActivationStore.open(path).document("stream 1 document 3").document == 7
    index_ids(Storage.open(path), STREAMS)
    gone.write_bytes(content)
    assert_all_found(str(path))
    copy_store(str(tmp_path / "other"))
    index_ids(Storage.open(tmp_path / "other"), STREAMS)
    for key in earlier:
        assert (path / key).read_bytes() == (tmp_path / "other" / key).read_bytes()


@in_memory
def test_a_reader_continues_when_another_index_is_written(store_path):
    write_store(store_path, finish=False, max_rows=2 * ROWS)
    storage = Storage.open(store_path)
    index_ids(storage, STREAMS)
    store = ActivationStore.open(store_path)
    assert store.document("stream 0 document 1").document == 2
    write_store(store_path)
    index_ids(storage, STREAMS)
    assert store.document("stream 0 document 1").document == 2
    with pytest.raises(StoreError, match="no document has it"):
        store.document("stream 0 document 8")  # its block was committed after the store was opened


def edit(key: str, change: Callable[[bytes], bytes]) -> Callable[[Storage], None]:
    def edit_object(storage: Storage) -> None:
        storage.write(key, change(storage.read(key)))

    return edit_object


def of_another_stream(storage: Storage) -> None:
    storage.write(ids_key(0), storage.read(ids_key(1)))


@pytest.mark.parametrize(
    "damage",
    [
        *(edit(ids_key(0), changed_at(at)) for at in (0, 8, 16, 30, 70, HEADER_BYTES - 1, HEADER_BYTES, -6, -1)),
        *(edit(ids_key(0), change) for change in (lambda _: b"", lambda c: c[:50], lambda c: c[:-1])),
        of_another_stream,
    ],
)
@in_memory
def test_a_damaged_index_is_refused_and_written_again(store_path, damage):
    copy_store(store_path)
    storage = Storage.open(store_path)
    index_ids(storage, STREAMS)
    sound = storage.read(ids_key(0))
    damage(storage)
    with pytest.raises(StoreInvalid, match=r"_ids/stream-00000\.ids.*pipeline\.verify"):
        ActivationStore.open(store_path).document("stream 0 document 1")
    problems = verify_store(store_path)
    assert [(problem.where, problem.remedy) for problem in problems] == [(ids_key(0), Remedy.index_again)]
    index_ids(storage, STREAMS)
    assert storage.read(ids_key(0)) == sound
    assert verify_store(store_path) == []


def test_a_directory_instead_of_an_index_is_refused(tmp_path):
    copy_store(str(tmp_path))
    (tmp_path / ids_key(0)).mkdir(parents=True)
    with pytest.raises(StoreInvalid, match="is a folder, expected a file"):
        ActivationStore.open(tmp_path).document("stream 0 document 1")
    assert [problem.where for problem in verify_store(str(tmp_path))] == [ids_key(0)]


@in_memory
def test_an_index_of_other_blocks_is_reported_and_not_used(store_path):
    copy_store(store_path)
    storage = Storage.open(store_path)
    content = IndexHeader.of(block_table(3)[1:], 0, ids_key(0)).encode(np.empty(0, ENTRY))
    storage.write(ids_key(0), content)
    assert_all_found(store_path)
    [problem] = verify_store(store_path, scope=Scope(level=Level.records))
    assert str(problem) == f"{ids_key(0)}: does not agree with the commit records"


@pytest.mark.parametrize("change", ["a hash", "a block", "one less", "one more"])
@pytest.mark.parametrize("sample", [1.0, 0.99])
@in_memory
def test_verify_compares_an_index_with_the_tables(store_path, change, sample):
    copy_store(store_path)
    storage = Storage.open(store_path)
    index_ids(storage, STREAMS)
    _, entries = decode_index(storage.read(ids_key(0)), ids_key(0))
    table = ActivationStore.open(store_path).blocks
    table = table[table.column("stream") == 0]
    entries = entries.copy()
    match change:
        case "a hash":
            entries["hash"][3] += 1
        case "a block":
            entries["block"][3] = (entries["block"][3] + 1) % len(table)
        case "one less":
            entries = entries[1:]
        case "one more":
            entries = np.append(entries, entries[-1:])
    storage.write(ids_key(0), IndexHeader.of(table, len(entries), ids_key(0)).encode(entries))
    problems = verify_store(store_path, scope=Scope(sample=sample))
    assert [str(problem) for problem in problems] == [f"{ids_key(0)}: does not agree with the document tables"]


def test_processes_share_the_streams(tmp_path, capsys):
    copy_store(str(tmp_path))
    for rank in STREAMS:
        assert not (tmp_path / ids_key(rank)).exists()
        assert index([f"store.path={tmp_path}", f"index.rank={rank}", f"index.world={NUM_STREAMS}"]) == 0
        assert (tmp_path / ids_key(rank)).exists()
    assert capsys.readouterr().out == f"{tmp_path}: indexed the ids of 1 stream\n" * NUM_STREAMS
    written = [(tmp_path / ids_key(stream)).stat().st_ino for stream in STREAMS]
    assert index([f"store.path={tmp_path}"]) == 0
    assert [(tmp_path / ids_key(stream)).stat().st_ino for stream in STREAMS] == written  # nothing is written again
    assert index([f"store.path={tmp_path}", "index.rank=2", "index.world=2"]) == 2
    assert "expected a number below index.world=2" in capsys.readouterr().err
    assert index([f"store.path={tmp_path / 'nothing'}"]) == 2


@in_memory
def test_a_store_without_blocks_has_no_index(store_path):
    writer = StoreWriter.open(store_path, metadata(), layout())
    index_ids(writer.storage, STREAMS)
    assert writer.storage.list_keys("_ids/") == []
    with pytest.raises(StoreError, match="no document has it"):
        ActivationStore.open(store_path).document("any")


def test_an_index_is_deleted_with_its_store(tmp_path, capsys):
    path = tmp_path / "store"
    copy_store(str(path))
    index_ids(Storage.open(path), STREAMS)
    assert delete([f"store.path={path}", "confirm=true"]) == 0
    assert not path.exists()
