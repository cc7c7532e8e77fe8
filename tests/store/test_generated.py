"""Groups of generated documents are read as written, from any document on, and damage is reported."""

import io
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.core.errors import StoreInvalid
from pipeline.data.documents import STREAM_START, Cursor, Document, SkippedDocument
from pipeline.data.tokenised import TokenisedDocument
from pipeline.store.generated.completions import completion_slots
from pipeline.store.generated.documents import (
    COMPLETION_SCHEMA,
    GeneratedDocuments,
    GeneratedGroups,
    Group,
    encode_group,
    group_key,
    read_group,
)
from pipeline.store.io.storage import Storage
from tests.store.example_store import flip

SCHEMA = pa.unify_schemas([pa.schema([("url", pa.string()), ("correct", pa.bool_())]), COMPLETION_SCHEMA])
STREAM, NUM_STREAMS, SIZE = 1, 3, 2


def document(ordinal: int, shard: int, index: int) -> TokenisedDocument:
    columns = {"n_prompt": 2, "n_prompt_cut": 1, "n_completion": 1 + ordinal, "finish_reason": "stop"}
    info = {"url": f"http://{ordinal}", "correct": [True, False, None][ordinal % 3], "sampling_seed": 7, **columns}
    tokens = np.arange(3 + ordinal, dtype=np.int32)
    return TokenisedDocument(Document(f"d{ordinal}", "", "a", index, info), tokens, Cursor(shard, index, 0, ordinal))


SKIPS = [SkippedDocument("a", 0, "empty"), SkippedDocument("b", 1, "too long")]
GROUPS = [
    Group(0, [SKIPS[0], document(0, 0, 1), document(1, 1, 0)], Cursor(1, 1, 0, 2), exhausted=False),
    Group(1, [SKIPS[1], document(2, 1, 2), document(3, 1, 3)], Cursor(1, 4, 0, 4), exhausted=False),
    Group(2, [], Cursor(2, 0, 0, 4), exhausted=True),
]


@pytest.fixture
def groups(tmp_path) -> GeneratedGroups:
    storage = Storage.open(tmp_path)
    opened = GeneratedGroups(storage, stream=STREAM, num_streams=NUM_STREAMS, size=SIZE, info_schema=SCHEMA)
    for group in GROUPS:
        opened.write(group)
    return opened


def plain(item) -> object:
    if isinstance(item, SkippedDocument):
        return item
    return item.document, item.tokens.tolist(), item.cursor


def test_groups_are_read_as_written(groups):
    assert groups.stored() == [0, 1, 2]
    for group in GROUPS:
        found = groups.read(group.index)
        assert list(map(plain, found.items)) == list(map(plain, group.items))
        assert replace(found, items=()) == replace(group, items=())


@pytest.mark.parametrize(
    ("start", "first"),
    [(STREAM_START, 0), (Cursor(1, 0, 0, 1), 2), (Cursor(1, 2, 0, 2), 4), (Cursor(1, 3, 16, 3), 5)],
)
def test_reading_starts_at_any_document(groups, start, first):
    """Documents skipped before the first one belong to the previous block, except at the start of the stream."""
    items = [item for group in GROUPS for item in group.items]
    found = GeneratedDocuments(groups, num_shards=2).read(start)
    assert list(map(plain, found)) == list(map(plain, items[first:]))


def test_an_existing_group_is_kept(groups, tmp_path):
    """Also one with other bytes, written by another version of a library."""
    storage = Storage.open(tmp_path)
    sink = io.BytesIO()
    pq.write_table(read_group(storage, STREAM, 1)[0], sink, compression="none", use_dictionary=False)
    storage.write(group_key(STREAM, 1), sink.getvalue())
    other = replace(GROUPS[1], items=[SKIPS[1], document(2, 1, 2), document(4, 1, 3)])
    assert list(map(plain, groups.write(other).items)) == list(map(plain, GROUPS[1].items))
    assert storage.read(group_key(STREAM, 1)) == sink.getvalue()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activations_are_read_with_their_documents(tmp_path, dtype):
    options = {"stream": STREAM, "num_streams": NUM_STREAMS, "size": SIZE, "info_schema": SCHEMA}
    groups = GeneratedGroups(Storage.open(tmp_path), **options)
    values = {row: {"embed": np.arange(2.0 * n).astype(dtype).reshape(n, 2)} for row, n in ((1, 3), (2, 4))}
    assert groups.write(replace(GROUPS[0], activations=values)).activations is values
    found = groups.read_activations(0, {"embed": 2}, dtype)
    assert found.keys() == {0, 1}
    for document, row in enumerate(values):
        np.testing.assert_array_equal(found[document]["embed"], values[row]["embed"])
    assert list(map(plain, groups.read(0).items)) == list(map(plain, GROUPS[0].items))
    for widths, message in (
        ({"embed": 3}, "activations that do not fit"),
        ({"final_norm": 2}, "no column activations.final_norm"),
    ):
        with pytest.raises(StoreInvalid, match=f"group-000000.parquet has {message}"):
            groups.read_activations(0, widths, dtype)
    key, storage = group_key(STREAM, 0), Storage.open(tmp_path)
    content = storage.read(key)
    flip(storage, key, content.index(values[2]["embed"].tobytes()) + 5)
    with pytest.raises(StoreInvalid, match="does not match its own checksum"):
        groups.read(0)


def test_a_group_that_readers_would_refuse_is_not_written(monkeypatch):
    monkeypatch.setattr("pipeline.store.generated.documents._MAX_ROWS", 1)
    with pytest.raises(StoreInvalid, match=r"group-000000\.parquet has 2 rows, expected at most 1: data.on_error=skip"):
        encode_group(pa.table({"document": [0, 1]}), {}, STREAM, 0)


def test_damage_is_reported(groups, tmp_path):
    storage = Storage.open(tmp_path)
    flip(storage, group_key(STREAM, 0), 20)
    with pytest.raises(StoreInvalid, match="group-000000.parquet cannot be read"):
        groups.read(0)
    storage.write(group_key(STREAM, 1), None)  # is generated again
    assert groups.stored() == [0, 2]
    with pytest.raises(StoreInvalid, match="group-000001.parquet is missing"):
        groups.read(1)


def test_completion_slots_are_found_across_windows_and_blocks():
    """Document 4 begins in an earlier block and continues in a second window; document 7 has no completion here."""
    documents = np.array([[4, 4, 4, 4], [4, 4, 9, 9], [7, 7, -1, -1]])
    columns = {"document": [4, 7, 9], "first_token": [4, 0, 0], "n_prompt": [7, 2, 1]}
    expected = [[0, 0, 0, 1], [1, 1, 0, 1], [0, 0, 0, 0]]
    assert completion_slots(documents, pa.table(columns)).astype(int).tolist() == expected
