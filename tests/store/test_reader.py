import copy

import numpy as np
import pyarrow as pa
import pytest

from pipeline.core.errors import ArgumentError, StoreError
from pipeline.core.sites import ActivationKey, Site
from pipeline.store import ActivationStore, TokenFilter
from pipeline.store.io.shards import encode_shard
from pipeline.store.io.storage import Storage
from tests.store.example_store import (
    DOCUMENT_LENGTHS,
    LENGTH,
    NUM_STREAMS,
    ROWS,
    WIDTHS,
    activation,
    blocks,
    layout,
    metadata,
    stored_tokens,
    token_ids,
    write_store,
)

NAME = "blocks.3.resid_post"
PADDED = 26  # a row that ends with padding


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
    read = store.read("blocks.3.resid_post", rows)
    np.testing.assert_array_equal(read, everything[np.asarray(expected, int)])
    assert read.dtype == "float32"
    assert store.read("blocks.3.resid_post", rows, dtype="stored").dtype == "bfloat16"
    side_arrays = store.read_tokens(rows)
    for name in ("tokens", "segments", "positions", "documents"):
        stored = store.arrays[name][...].read().result()
        np.testing.assert_array_equal(getattr(side_arrays, name), stored[np.asarray(expected, int)])


def test_numpys_numbers_are_accepted(store):
    np.testing.assert_array_equal(store.read(NAME, np.int32(9)), store.read(NAME, 9))
    assert store.document(np.int64(4)).id == store.document(4).id
    assert next(store.batches(NAME, 5)).activations.shape == (5, WIDTHS[NAME])
    assert list(next(store.batches((NAME, "embed"), 5)).activations) == [NAME, "embed"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda store: store.read("blocks.2.resid_post", 0), r"has no array .*: it has blocks\.1\.resid_post, "),
        (lambda store: store.read("resid_post", 0), "has no array 'resid_post', or several"),
        (lambda store: store.read("blocks.1.resid_post", [0, 10**6]), r"rows \[1000000\] are not in the store"),
        (lambda store: store.read_tokens(-1), r"rows \[-1\] are not in the store"),
        (lambda store: store.document("nothing"), "no document has it"),
        (lambda store: store.document(10**6), "no document has it"),
        (lambda store: store.batches([], 4), r"keys is empty; the store .* has blocks\.1\."),
        (lambda store: store.batches([(1, "resid_post")], 4), "has blocks.*; expected a name such as"),
        (lambda store: store.documents(["nothing"]), r"have no columns \['nothing'\], expected \[.*'id'"),
        (lambda store: store.labels("url", pa.table({"id": ["a"]})), r"no columns \['url'\]; it has \['id'"),
        (lambda store: store.labels("url")[np.array([0, 10**6])], r"documents \[1000000\] have no url"),
        (lambda store: store.labels("url")[None], r"labels\[...\] takes numbers of documents, got None"),
        (lambda store: store.labels("id", pa.table({"id": [[1]]})), r"column id is of list<.*>, expected strings"),
        (lambda store: copy.copy(store.batches("embed", 4)), "BatchReader cannot be copied or given to"),
        (lambda store: store.tokens_at([0, 1], [0]), "positions is .*, expected an integer for each of 2 rows"),
        (lambda store: store.tokens_at(0, LENGTH), f"positions are {LENGTH} to {LENGTH}, expected 0 to {LENGTH - 1}"),
        (lambda store: store.tokens_at(PADDED, LENGTH - 1), rf"no activations at the .* pairs \[\({PADDED}, 7\)\]"),
        (lambda store: store.read_tokens([0.5, 1.0]), r"rows have the shape \[2\] and dtype float64"),
        (lambda store: store.read_tokens(0, whole=np.arange(3)), "whole is array.*, expected True or False"),
        (
            lambda store: store.read_tokens([True, False]),
            r"shape \[2\] and dtype bool; .* For a mask, use store.rows\[mask\]",
        ),
    ],
)
def test_missing_arrays_rows_and_documents_are_refused(store, call, message):
    with pytest.raises((StoreError, ArgumentError), match=message):
        call(store)


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
        by_number = store.document(number, keys=["blocks.3.resid_post", "blocks.3.resid_post"])
        assert list(by_number.activations) == [NAME]
        np.testing.assert_array_equal(by_number.tokens, found.tokens)
        np.testing.assert_array_equal(by_number.positions[np.diff(found.rows, prepend=-1) != 0], 0)


def test_committed_blocks_of_an_unfinished_store_are_read(store_path):
    write_store(store_path, finish=False, max_blocks=1)
    spec, block = layout().arrays[0], list(blocks(0))[1]
    shard, _ = encode_shard(block.arrays[spec.name], layout().shard_format(spec))
    Storage.open(store_path).put(layout().shard_key(spec, 0, 1), *shard)  # of a block without a record
    store = ActivationStore.open(store_path)
    assert not store.complete
    assert store.rows.tolist() == list(range(ROWS * NUM_STREAMS))
    assert store.read("blocks.1.resid_post", slice(None)).shape == (ROWS * NUM_STREAMS, LENGTH, WIDTHS[NAME])
    assert sum(len(batch.tokens) for batch in store.batches("blocks.1.resid_post", 10)) == store.num_tokens


def test_a_store_without_blocks_is_read_as_empty(store_path):
    write_store(store_path, max_blocks=0)
    store = ActivationStore.open(store_path)
    assert store.complete
    assert store.num_tokens == 0
    assert store.rows.tolist() == []
    assert store.documents().num_rows == 0
    assert store.read("blocks.1.resid_post", slice(None)).shape == (0, LENGTH, WIDTHS[NAME])
    assert list(store.batches("blocks.1.resid_post", 10)) == []


@pytest.mark.parametrize("keys", [None, NAME, ["embed", NAME]])
def test_tokens_are_read_by_row_and_position_in_any_order(store, keys):
    segments = store.read_tokens(store.rows).segments
    index, positions = np.nonzero(segments)
    order = np.random.default_rng(0).permutation(len(index))[:40]
    rows, positions = store.rows[index[order]], positions[order]
    rows, positions = np.append(rows, rows[:3]), np.append(positions, positions[:3])  # some twice
    batch = store.tokens_at(rows, positions, keys)
    for name, values in ({keys: batch.activations} if keys == NAME else batch.activations).items():
        np.testing.assert_array_equal(values, store.read(name, rows)[np.arange(len(rows)), positions])
    for name in ("tokens", "segments", "positions", "documents"):
        values = getattr(store.read_tokens(rows), name)
        np.testing.assert_array_equal(getattr(batch, name), values[np.arange(len(rows)), positions])
    assert store.tokens_at([], [], keys).tokens.shape == (0,)
    assert store.tokens_at(0, 1, NAME).activations.shape == (1, WIDTHS[NAME])


def test_document_tables_are_read_by_columns(store):
    everything = store.documents()
    assert [*everything.column_names[:4], everything.column_names[-1]] == ["stream", "block", "document", "id", "url"]
    assert everything["last_token"].to_numpy().sum() - everything["first_token"].to_numpy().sum() == store.num_tokens
    ids = {f"stream {s} document {k}" for s, lengths in enumerate(DOCUMENT_LENGTHS) for k in range(len(lengths))}
    assert set(everything["id"].to_pylist()) == ids
    assert store.documents(["id", "block"]).equals(everything.select(["id", "block"]))


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_labels_of_a_users_table_are_joined_by_id(store, framework):
    pytest.importorskip(framework)
    table = pa.table(
        {"label": [3, 5, 9], "id": ["stream 1 document 0", "nothing", "stream 0 document 2"], "more": "abc"}
    )
    labels = store.labels("label", table)
    assert labels.numbers.tolist() == [1, 4]
    batches = store.batches(NAME, 7, token_filter=TokenFilter(documents=labels.numbers), framework=framework)
    values = [labels[batch.documents] for batch in batches]
    assert np.concatenate(values).tolist().count(3) == DOCUMENT_LENGTHS[1][0]
    assert np.concatenate(values).tolist().count(9) == DOCUMENT_LENGTHS[0][2]
    vectors = table.set_column(0, "document", [[[0.5, 3], [1, 1], [2.5, 9]]]).set_column(
        1, "id", table["id"].cast(pa.large_string())
    )
    joined = store.labels("document", pa.concat_tables([vectors, vectors.slice(0, 1)]))
    assert np.stack(joined[labels.numbers]).tolist() == [[0.5, 3], [2.5, 9]]
    assert store.labels("document")[joined.numbers].tolist() == [1, 4]
    urls = store.labels("url")
    assert urls[np.array([[4], [1]])].tolist() == [["https://example.org/2"], ["https://example.org/0"]]
