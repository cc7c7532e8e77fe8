"""A reader keeps the blocks that were committed when it was opened, and so does its state."""

import itertools
import json
import pickle
from collections.abc import Callable

import pytest

from pipeline.core.errors import ArgumentError, StoreInvalid
from pipeline.store import ActivationStore, TokenFilter
from pipeline.store.io.storage import Storage
from tests.store.example_store import (
    LENGTH,
    blocks,
    commit_block,
    copy_store,
    edit_root,
    tokens_of,
    write_store,
)

NAME = "blocks.1.resid_post"
OPTIONS = {"batch_size": 7, "shuffle": True, "seed": 5, "buffer_mib": 2 * LENGTH * 4 * 6 * 2 / 2**20}


def extend_one_stream(path: str) -> None:
    commit_block(write_store(path, finish=False, max_blocks=1), list(blocks(1))[1])


CHANGES: dict[str, Callable[[str], object]] = {
    "extended by one stream": extend_one_stream,
    "extended": lambda path: write_store(path, finish=False, max_blocks=2),
    "finished": lambda path: write_store(path, max_blocks=1),
    "extended and finished": write_store,
}


def everything(store: ActivationStore) -> list[object]:
    documents = store.documents()
    ids = documents["id"].unique().to_pylist()
    return [
        *(store.complete, store.num_tokens, store.rows.tolist(), documents.to_pylist()),
        *(store.read(key, slice(None)).tolist() for key in store.keys),
        *(vars(store.read_tokens(store.rows))["tokens"].tolist(), tokens_of(store.batches(NAME, 7))),
        *(store.document(id).activations[NAME].tolist() for id in ids),
        {name: array[...].read().result().tolist() for name, array in store.arrays.items()},
    ]


@pytest.mark.parametrize(
    ("change", "finish"),
    [(change, False) for change in CHANGES] + [("extended", True), ("extended and finished", True)],
)
@pytest.mark.parametrize("store_path", ["memory"], indirect=True)
def test_a_reader_and_its_state_keep_their_blocks(store_path, change, finish):
    copy_store(store_path, finish=finish, max_blocks=1)
    store = ActivationStore.open(store_path)
    pickled = pickle.dumps(store)
    before, expected = everything(store), tokens_of(store.batches(NAME, **OPTIONS, epochs=3))
    reader = store.batches(NAME, **OPTIONS, epochs=3)
    received = [next(reader), next(reader)]
    state = json.loads(json.dumps(reader.state()))
    ended = store.batches(NAME, **OPTIONS)
    list(ended)
    CHANGES[change](store_path)
    assert everything(store) == everything(pickle.loads(pickled)) == before
    assert tokens_of([*received, *reader]) == expected
    fresh, refreshed = ActivationStore.open(store_path), store.refresh()
    assert fresh.blocks.values.tolist() == refreshed.blocks.values.tolist()
    assert (len(fresh.blocks) > len(store.blocks)) == ("extended" in change)
    for later in (fresh, refreshed):
        assert tokens_of([*received, *later.batches(NAME, **OPTIONS, epochs=3, state=state)]) == expected
        assert list(later.batches(NAME, **OPTIONS, state=ended.state())) == []
        again = later.batches(NAME, **OPTIONS, epochs=2, state=ended.state())  # the second epoch of the same blocks
        assert sorted(tokens_of(again)) == sorted(tokens_of(store.batches(NAME, 7)))
    if "extended" in change:
        with pytest.raises(ArgumentError, match=r"covers blocks that were committed after this store was opened"):
            store.batches(NAME, **OPTIONS, state=fresh.batches(NAME, **OPTIONS).state())


READS: dict[str, Callable[[ActivationStore], object]] = {
    "rows": lambda store: store.read(NAME, slice(None)),
    "tokens": lambda store: store.read_tokens(0),
    "tokens by position": lambda store: store.tokens_at([0], [1], NAME),
    "a document": lambda store: store.document(0),
    "documents": lambda store: store.documents(["id"]),
    "labels": lambda store: store.labels("url"),
    "batches": lambda store: list(store.batches(NAME, 7)),
    "shuffled batches": lambda store: list(store.batches(NAME, **OPTIONS)),
    "refresh": lambda store: store.refresh(),
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("is_made_again", [False, True])
def test_a_store_that_was_deleted_is_noticed(store_path, read, is_made_again):
    """Also if one of the same configuration, whose values may differ in their last bits, was made in its place."""
    copy_store(store_path)
    store = ActivationStore.open(store_path)
    READS[read](store)
    state = store.batches(NAME, **OPTIONS).state()
    if is_made_again:
        edit_root(store_path, lambda root: root.update(created="2001-02-03T04:05:06+00:00"))
    else:
        Storage.open(store_path).write("zarr.json", None)
    with pytest.raises(StoreInvalid, match=r"was deleted( and made again)? after it was opened\. Open the store again"):
        READS[read](store)
    if is_made_again:
        with pytest.raises(ArgumentError, match="the state is from a reader of a different store"):
            ActivationStore.open(store_path).batches(NAME, **OPTIONS, state=state)


def test_a_filter_by_documents_reads_the_tokens_of_these_documents(read_only):
    store = ActivationStore.open(read_only)
    table = store.documents(["document", "first_token", "last_token"]).to_pylist()
    numbers = sorted({row["document"] for row in table})
    for some in [*itertools.combinations(numbers, 1), *itertools.combinations(numbers, 2)]:
        found = tokens_of(store.batches(NAME, **OPTIONS, token_filter=TokenFilter(documents=some)))
        assert sorted({document for document, _ in found}) == sorted(some)
        assert len(found) == sum(row["last_token"] - row["first_token"] for row in table if row["document"] in some)
    assert list(store.batches(NAME, 7, token_filter=TokenFilter(documents=[10**6]))) == []
