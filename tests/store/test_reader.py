from pathlib import Path

import numpy as np
import pytest

from pipeline.core.errors import ArgumentError, StoreError, StoreInvalid
from pipeline.core.sites import ActivationKey, Site
from pipeline.store import ActivationStore
from pipeline.store.io.storage import Storage
from pipeline.store.read import stored_rows
from pipeline.store.read.rows import RunsRead
from pipeline.store.read.stored_rows import ArrayReads
from tests.store.example_store import (
    DOCUMENT_LENGTHS,
    LENGTH,
    NUM_STREAMS,
    ROWS,
    WIDTHS,
    activation,
    begin_block,
    blocks,
    copy_store,
    layout,
    metadata,
    stored_tokens,
    token_ids,
    write_store,
)

NAME = "blocks.3.resid_post"


@pytest.fixture
def store(read_only) -> ActivationStore:
    return ActivationStore.open(read_only)


def committed_rows() -> list[int]:
    records = [block.record for stream in range(NUM_STREAMS) for block in blocks(stream)]
    return sorted(layout().first_row(r.stream, r.block) + k for r in records for k in range(r.rows))


def test_a_store_has_its_keys_rows_and_metadata(store):
    assert store.complete
    assert store.keys == (
        ActivationKey(1, Site.resid_post),
        ActivationKey(3, Site.resid_post),
        ActivationKey(-1, Site.embed),
    )
    assert store.layers == (1, 3)
    assert store.sites == (Site.resid_post, Site.embed)
    assert store.length == LENGTH
    assert store.num_tokens == sum(map(sum, DOCUMENT_LENGTHS)) == stored_tokens()
    assert store.rows.tolist() == committed_rows()
    assert store.metadata.model == metadata().model


@pytest.mark.parametrize(
    "rows", [0, [9, 0, 1, 2, 8], slice(2, 11), slice(None), slice(None, None, 3), slice(-5, None), []]
)
def test_rows_equal_those_of_the_arrays(store, rows):
    everything = store.arrays[NAME][...].read().result()
    known = np.asarray(committed_rows())
    expected = np.arange(len(everything))[rows] if isinstance(rows, slice) else rows
    if isinstance(rows, slice):
        expected = expected[np.isin(expected, known)]
    read = store.read(3, "resid_post", rows)
    np.testing.assert_array_equal(read, everything[np.asarray(expected, int)])
    assert read.dtype == "float32"
    assert store.read(3, "resid_post", rows, dtype="stored").dtype == "bfloat16"
    side_arrays = store.read_tokens(rows)
    for name in ("tokens", "segments", "positions", "documents"):
        stored = store.arrays[name][...].read().result()
        np.testing.assert_array_equal(getattr(side_arrays, name), stored[np.asarray(expected, int)])


def test_read_converts_to_the_given_dtype(store):
    values = store.read(None, Site.embed, [0, 1], dtype=np.float32)
    assert values.dtype == np.float32
    assert values.shape == (2, LENGTH, WIDTHS["embed"])
    np.testing.assert_array_equal(values, store.read(None, "embed", [0, 1]).astype(np.float32))


def test_a_mask_selects_from_the_stored_rows(store):
    mask = np.arange(len(store.rows)) % 3 == 1
    assert not np.array_equal(store.rows, np.arange(len(store.rows)))
    expected = store.read(1, "resid_post", store.rows[mask])
    np.testing.assert_array_equal(store.read(1, "resid_post", mask), expected)
    np.testing.assert_array_equal(store.read(1, "resid_post", mask.tolist()), expected)


def test_numpy_numbers_are_accepted(store):
    row = np.int32(9)
    expected = store.read(3, "resid_post", 9)
    assert expected.shape == (LENGTH, WIDTHS[NAME])
    np.testing.assert_array_equal(store.read(np.int64(3), "resid_post", row), expected)
    assert store.document(np.int64(4)).id == store.document(4).id
    assert next(store.batches((np.int64(3), "resid_post"), 5)).activations.shape == (5, WIDTHS[NAME])
    assert list(next(store.batches(((np.int64(3), "resid_post"), "embed"), 5)).activations) == [NAME, "embed"]
    assert next(store.batches((None, "embed"), 5)).activations.shape == (5, WIDTHS["embed"])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda store: store.read(2, "resid_post", 0),
            r"has no array .*, or several: it has blocks\.1\.resid_post, ",
        ),
        (lambda store: store.read(1, "resid", 0), "has no array .*'resid'., or several"),
        (lambda store: store.read(None, "resid_post", 0), "has no array .*'resid_post'., or several"),
        (lambda store: store.read(1, "resid_post", [0, 10**6]), r"rows \[1000000\] are not in the store"),
        (lambda store: store.read_tokens(-1), r"rows \[-1\] are not in the store"),
        (lambda store: store.document("nothing"), "no document has it"),
        (lambda store: store.document(10**6), "no document has it"),
        (lambda store: store.batches("blocks.9.resid_post", 4), "has no array"),
        (lambda store: store.batches([], 4), r"keys is empty; the store .* has blocks\.1\."),
        (lambda store: store.batches((), 4), "keys is empty; the store .* has"),
        (lambda store: store.batches([(1,)], 4), "has blocks.*; expected a name such as"),
        (lambda store: store.batches([None], 4), "has blocks.*; expected a name such as"),
        (lambda store: store.read(1.0, "resid_post", 0), "has blocks.*; the layer is 1.0, expected an integer"),
        (lambda store: store.read_tokens([0.5, 1.0]), r"rows have the shape \[2\] and dtype float64"),
        (lambda store: store.read_tokens([[0, 1]]), r"rows have the shape \[1, 2\]"),
        (lambda store: store.read_tokens(0, whole=np.arange(3)), "whole is array.*, expected True or False"),
        (lambda store: store.read_tokens([True, False]), r"shape \[2\] and dtype bool; .* a mask of the \d+ rows"),
    ],
)
def test_missing_arrays_rows_and_documents_are_refused(store, call, message):
    with pytest.raises((StoreError, ArgumentError), match=message):
        call(store)


def test_a_folder_without_a_store_is_refused(tmp_path):
    with pytest.raises(StoreInvalid, match="there is no activation store"):
        ActivationStore.open(str(tmp_path / "nothing"))


@pytest.mark.parametrize("stream", range(NUM_STREAMS))
def test_a_document_has_all_its_tokens_in_order(store, stream):
    """Also if it is longer than a block."""
    for ordinal, length in enumerate(DOCUMENT_LENGTHS[stream]):
        number = ordinal * NUM_STREAMS + stream
        found = store.document(f"stream {stream} document {ordinal}")
        token = np.arange(length)
        document = np.full(length, number)
        assert found.document == number
        np.testing.assert_array_equal(found.tokens, token_ids(document, token))
        assert list(found.activations) == list(WIDTHS)
        for name, values in found.activations.items():
            np.testing.assert_array_equal(values, activation(name, document, token))
        assert (np.diff(found.rows) >= 0).all()
        by_number = store.document(number, keys=[(3, "resid_post")])
        assert list(by_number.activations) == [NAME]
        np.testing.assert_array_equal(by_number.tokens, found.tokens)
        np.testing.assert_array_equal(by_number.positions[np.diff(found.rows, prepend=-1) != 0], 0)


def test_the_example_for_one_document_in_the_docs_works(store):
    """Runs the lines of docs/reading.md and compares their results with the stored values."""
    section = (Path(__file__).parents[2] / "docs" / "reading.md").read_text().split("## One document")[1].split("##")[0]
    lines = [line.strip().partition("  #")[0] for line in section.splitlines() if line.startswith("    ")]
    names = {"store": store}
    exec("\n".join(lines[:2]), names)
    tokens, activations, (rows, positions), row = (eval(line, names) for line in lines[2:])
    token = np.arange(DOCUMENT_LENGTHS[0][0])
    document = np.zeros_like(token)
    np.testing.assert_array_equal(tokens, token_ids(document, token))
    np.testing.assert_array_equal(activations, activation(NAME, document, token))
    np.testing.assert_array_equal(positions, token)
    [slots] = np.nonzero(store.read_tokens(rows[0]).documents == names["document"].document)
    np.testing.assert_array_equal(row[slots], activations)


def test_the_document_table_has_all_documents(store):
    table = store.documents
    assert table.column_names[:4] == ["stream", "block", "document", "id"]
    assert table.column_names[-1] == "url"
    tokens = np.asarray(table["last_token"]) - np.asarray(table["first_token"])
    assert tokens.sum() == store.num_tokens
    assert set(table["id"].to_pylist()) == {
        f"stream {stream} document {k}" for stream, lengths in enumerate(DOCUMENT_LENGTHS) for k in range(len(lengths))
    }


def test_committed_blocks_of_an_unfinished_store_are_read(store_path):
    writer = write_store(store_path, finish=False, max_rows=ROWS)
    unfinished = list(blocks(0))[1]
    pending = begin_block(writer, unfinished)
    for future in pending.futures.values():
        future.result()
    store = ActivationStore.open(store_path)
    assert not store.complete
    assert store.rows.tolist() == list(range(ROWS * NUM_STREAMS))
    assert store.read(1, "resid_post", slice(None)).shape == (ROWS * NUM_STREAMS, LENGTH, WIDTHS[NAME])
    assert sum(len(batch.tokens) for batch in store.batches((1, "resid_post"), 10)) == store.num_tokens


def test_a_store_without_blocks_is_read_as_empty(store_path):
    write_store(store_path, max_rows=0)
    store = ActivationStore.open(store_path)
    assert store.complete
    assert store.num_tokens == 0
    assert store.rows.tolist() == []
    assert store.documents.num_rows == 0
    assert store.read(1, "resid_post", slice(None)).shape == (0, LENGTH, WIDTHS[NAME])
    assert list(store.batches((1, "resid_post"), 10)) == []


@pytest.mark.parametrize("name", ["tokens", "segments", "documents", NAME])
def test_a_deleted_object_is_never_read_as_zeros(store_path, name):
    copy_store(store_path)
    spec = next(spec for spec in layout().all_arrays if spec.name == name)
    Storage.open(store_path).write(layout().shard_key(spec, 1, 0), None)
    store = ActivationStore.open(store_path)
    with pytest.raises(StoreError, match=r"Run pipeline\.verify"):
        store.read(3, "resid_post", [4]) if name == NAME else store.read_tokens([4])
    with pytest.raises(StoreError, match=r"Run pipeline\.verify"):
        list(store.batches((3, "resid_post"), 10))


@pytest.mark.parametrize(
    ("bytes_ahead", "expected"),
    [
        (1 << 30, ["start a", "start b", "start c", "finish a", "finish b", "finish c"]),
        (1, ["start a", "finish a", "start b", "finish b", "start c", "finish c"]),
    ],
)
def test_arrays_are_read_concurrently_within_a_memory_limit(store, monkeypatch, bytes_ahead, expected):
    monkeypatch.setattr(stored_rows, "BYTES_AHEAD", bytes_ahead)
    rows, events = np.array([9, 0, 1]), []

    def start(name: str) -> RunsRead:
        events.append(f"start {name}")
        return RunsRead(store.arrays["tokens"], rows)

    def finish(name: str, read: RunsRead) -> np.ndarray:
        events.append(f"finish {name}")
        return read.wait()

    arrays = dict(ArrayReads("abc", start, finish))
    assert events == expected
    for values in arrays.values():
        np.testing.assert_array_equal(values, store.read_tokens(rows).tokens)
