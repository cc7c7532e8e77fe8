"""A reader can be iterated again: it goes on after Ctrl-C, raises an error again, and begins another pass after one. It
keeps the blocks that were committed when it was opened, and so does its state."""

import itertools
import json
import os
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from pipeline.core.errors import ArgumentError, StoreError, StoreInvalid
from pipeline.core.sites import ActivationKey, Site
from pipeline.store import ActivationStore, Batch, BatchReader, TokenFilter, open_aligned
from pipeline.store.io.storage import Storage
from pipeline.store.read.iterating import sealed
from tests.interrupting import read_with_interruptions
from tests.store.example_store import (
    LENGTH,
    all_tokens,
    blocks,
    commit_block,
    copy_store,
    edit_root,
    flip,
    layout,
    stored_tokens,
    tokens_of,
    write_store,
)

NAME = "blocks.1.resid_post"
TINY_MIB = 2 * LENGTH * 4 * 6 * 2 / 2**20
OPTIONS = {"shuffle": True, "seed": 5, "buffer_mib": TINY_MIB}


@pytest.fixture
def store(tmp_path) -> ActivationStore:
    copy_store(str(tmp_path))
    return ActivationStore.open(tmp_path)


def epochs_of(batches: Iterable[Batch]) -> list[list[tuple[int, int]]]:
    tokens = tokens_of(batches)
    return [tokens[start : start + stored_tokens()] for start in range(0, len(tokens), stored_tokens())]


@pytest.mark.parametrize("kind", ["numpy", "aligned"])
def test_a_loop_interrupted_at_random_moments_yields_every_token_once(store, kind):
    interruptions = 0
    for seed in itertools.count():
        if kind == "aligned":
            reader = open_aligned([store, store]).batches([NAME, "embed"], 3, epochs=3, **OPTIONS)
        else:
            reader = store.batches([NAME, "embed"], 3, epochs=3, **OPTIONS)
        received, interrupted = read_with_interruptions(reader, 5, 0.05, seed)
        assert [sorted(epoch) for epoch in epochs_of(received)] == 3 * [sorted(all_tokens())]
        if (interruptions := interruptions + interrupted) >= 13:
            return


@pytest.mark.parametrize("options", [{}, OPTIONS, {**OPTIONS, "epochs": 2}, {**OPTIONS, "drop_last": True}])
def test_every_loop_is_a_pass_and_the_next_one_has_the_order_of_the_next_epochs(store, options):
    reader = store.batches(NAME, 7, **options)
    epochs = options.get("epochs", 1)
    expected = list(store.batches(NAME, 7, **options | {"epochs": 3 * epochs}))
    passes = [list(reader) for _ in range(3)]
    assert [len(batches) for batches in passes] == 3 * [len(reader)] == 3 * [len(expected) // 3]
    assert next(reader, None) is None  # only a loop begins another pass
    assert tokens_of(itertools.chain(*passes)) == tokens_of(expected)
    from_epoch = store.batches(NAME, 7, **options, state={"epoch": 2 * epochs})
    assert tokens_of(from_epoch) == tokens_of(passes[2])


def test_a_loop_goes_on_after_the_last_one_was_left_or_the_reader_closed(store):
    reader = store.batches(NAME, 7, epochs=2, **OPTIONS)
    expected = list(store.batches(NAME, 7, epochs=2, **OPTIONS))
    received = []
    for stop in (3, 1, 9):
        for _, batch in zip(range(stop), reader, strict=False):
            received.append(batch)
        received += [next(reader)]
        reader.close()
        assert next(reader, None) is None
    assert tokens_of([*received, *reader]) == tokens_of(expected)


def test_an_error_is_raised_by_every_loop(tmp_path):
    copy_store(str(tmp_path))
    flip(str(tmp_path), layout().shard_key(layout().arrays[0], 0, 1), 10)
    reader = ActivationStore.open(tmp_path).batches(NAME, 8)
    for _ in range(3):
        with pytest.raises(StoreError, match="does not match its checksum"):
            list(reader)


@pytest.mark.parametrize(
    ("options", "length"),
    [
        ({}, -(-stored_tokens() // 7)),
        ({"drop_last": True, "epochs": 3}, 3 * (stored_tokens() // 7)),
        ({"world": 2, "epochs": 2, **OPTIONS}, None),
        ({"epochs": None}, TypeError),
        ({"token_filter": TokenFilter(skip_first=1)}, TypeError),
    ],
)
def test_the_length_is_the_number_of_batches_where_it_is_known(store, options, length):
    reader = store.batches(NAME, 7, **options)
    if length is TypeError:
        with pytest.raises(TypeError, match="no length"):
            len(reader)
    else:
        assert len(reader) == len(list(reader)) == (length or len(reader))


EDITS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "another batch": lambda state: state | {"batch": state["batch"] + 1},
    "another store": lambda state: state | {"store": "0" * 64},
    "no checksum": lambda state: {name: value for name, value in state.items() if name != "checksum"},
    "cut": lambda state: dict(list(state.items())[:3]),
    "text": json.dumps,
    "empty": lambda state: {},
    "list": list,
    "not JSON": lambda state: state | {"token": {1}},
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_changed_state_is_refused(store, edit):
    reader = store.batches(NAME, 7, **OPTIONS)
    next(reader)
    state = json.loads(json.dumps(reader.state()))
    store.batches(NAME, 7, **OPTIONS, state=state)
    with pytest.raises(ArgumentError, match="not a state as a reader's state\\(\\) returned it"):
        store.batches(NAME, 7, **OPTIONS, state=EDITS[edit](state))


def test_the_state_of_a_different_store_is_refused(store, tmp_path):
    copy_store(str(tmp_path / "other"), dtype="float16")
    other = ActivationStore.open(tmp_path / "other")
    with pytest.raises(ArgumentError, match="the state is from a reader of a different store"):
        other.batches(NAME, 7, state=store.batches(NAME, 7).state())


def test_the_state_of_another_version_is_refused(store):
    state = store.batches(NAME, 7).state()
    del state["checksum"]
    with pytest.raises(ArgumentError, match="or of another version"):
        store.batches(NAME, 7, state=sealed(state | {"blocks": "eJxjYWBgYAYAABsACA=="}))


NAMES = [
    *(NAME, "1.resid_post", "blocks.1.hook_resid_post", "1.hook_resid_post", ActivationKey(1, Site.resid_post)),
]


@pytest.mark.parametrize("name", NAMES)
def test_an_array_has_the_same_names_everywhere(store, name):
    expected = store.read("blocks.1.resid_post", [0, 1])
    batch = next(store.batches([name, "embed"], 5))
    document = store.document(2, keys=[name])
    equal = np.testing.assert_array_equal
    equal(store.read(name, [0, 1]), expected)
    equal(store.read(name, 0), expected[0])
    equal(store.tokens_at([0, 1], [3, 2], name).activations, expected[[0, 1], [3, 2]])
    equal(next(store.batches(name, 5)).activations, batch.activations[NAME])
    equal(batch.activations[name], batch.activations[NAME])
    equal(document.activations[name], document.activations[NAME])
    assert store.sample(name, 9)[NAME].count == 9
    wrong = (
        "hook_resid_post",
        "resid_post",
        "blocks.1.hook_mlp_in",
        "blocks.2.resid_post",
        "blocks.1.embed",
        (1, "embed"),
    )
    for unknown in wrong:
        with pytest.raises(StoreError, match=r" blocks\.1\.resid_post, "):
            store.batches(unknown, 5)


def test_numpys_means_of_bfloat16_are_right(store, tmp_path):
    values = [batch.activations for batch in store.batches(NAME, 7)]
    read = [store.read(NAME, store.rows), store.document(2).activations[NAME], *values]
    assert {array.dtype.name for array in read} == {"float32"}
    stored = [next(store.batches(NAME, 7, dtype="stored")).activations, store.read(NAME, 0, dtype="stored")]
    stored.append(store.document(2, dtype="stored").activations[NAME])
    assert {array.dtype.name for array in stored} == {"bfloat16"}
    torch = pytest.importorskip("torch")
    assert torch.from_numpy(values[0]).dtype == torch.float32
    assert next(store.batches(NAME, 7, framework="torch")).activations.dtype == torch.bfloat16
    for dtype, name in ((torch.float16, "float16"), (np.float32, "float32")):
        assert next(store.batches(NAME, 7, dtype=dtype)).activations.dtype == name


def in_a_fork(call: Callable[[], object]) -> str:
    """What a forked process reports of a call: its error, or nothing."""
    read, write = os.pipe()
    if not (child := os.fork()):
        try:
            call()
        except BaseException as error:
            os.write(write, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read) as report:
        return report.read()


def test_a_forked_process_is_told_to_spawn(store, tmp_path):
    reader: BatchReader = store.batches(NAME, 7)
    next(reader)
    for call in (
        lambda: next(reader),
        lambda: store.read(NAME, 0),
        lambda: store.document(2),
        lambda: next(store.batches(NAME, 7)),
        lambda: ActivationStore.open(tmp_path),
    ):
        message = in_a_fork(call)
        assert message.startswith("ConfigError: this process was forked from one that has used TensorStore")
        assert 'multiprocessing_context="spawn"' in message


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
    before, expected = everything(store), tokens_of(store.batches(NAME, 7, **OPTIONS, epochs=3))
    reader = store.batches(NAME, 7, **OPTIONS, epochs=3)
    received = [next(reader), next(reader)]
    state = json.loads(json.dumps(reader.state()))
    ended = store.batches(NAME, 7, **OPTIONS)
    list(ended)
    CHANGES[change](store_path)
    assert everything(store) == everything(pickle.loads(pickled)) == before
    assert tokens_of([*received, *reader]) == expected
    fresh, refreshed = ActivationStore.open(store_path), store.refresh()
    assert fresh.blocks.values.tolist() == refreshed.blocks.values.tolist()
    assert (len(fresh.blocks) > len(store.blocks)) == ("extended" in change)
    for later in (fresh, refreshed):
        assert tokens_of([*received, *later.batches(NAME, 7, **OPTIONS, epochs=3, state=state)]) == expected
        assert list(later.batches(NAME, 7, **OPTIONS, state=ended.state())) == []
        again = later.batches(NAME, 7, **OPTIONS, epochs=2, state=ended.state())  # the second epoch of the same blocks
        assert sorted(tokens_of(again)) == sorted(tokens_of(store.batches(NAME, 7)))
    if "extended" in change:
        with pytest.raises(ArgumentError, match=r"covers blocks that were committed after this store was opened"):
            store.batches(NAME, 7, **OPTIONS, state=fresh.batches(NAME, 7, **OPTIONS).state())


READS: dict[str, Callable[[ActivationStore], object]] = {
    "rows": lambda store: store.read(NAME, slice(None)),
    "tokens": lambda store: store.read_tokens(0),
    "tokens by position": lambda store: store.tokens_at([0], [1], NAME),
    "a document": lambda store: store.document(0),
    "documents": lambda store: store.documents(["id"]),
    "labels": lambda store: store.labels("url"),
    "batches": lambda store: list(store.batches(NAME, 7)),
    "shuffled batches": lambda store: list(store.batches(NAME, 7, **OPTIONS)),
    "refresh": lambda store: store.refresh(),
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("is_made_again", [False, True])
def test_a_store_that_was_deleted_is_noticed(store_path, read, is_made_again):
    """Also if one of the same configuration, whose values may differ in their last bits, was made in its place."""
    copy_store(store_path)
    store = ActivationStore.open(store_path)
    READS[read](store)
    state = store.batches(NAME, 7, **OPTIONS).state()
    if is_made_again:
        edit_root(store_path, lambda root: root.update(created="2001-02-03T04:05:06+00:00"))
    else:
        Storage.open(store_path).write("zarr.json", None)
    with pytest.raises(StoreInvalid, match=r"was deleted( and made again)? after it was opened\. Open the store again"):
        READS[read](store)
    if is_made_again:
        with pytest.raises(ArgumentError, match="the state is from a reader of a different store"):
            ActivationStore.open(store_path).batches(NAME, 7, **OPTIONS, state=state)


def test_a_filter_by_documents_reads_the_tokens_of_these_documents(read_only):
    store = ActivationStore.open(read_only)
    table = store.documents(["document", "first_token", "last_token"]).to_pylist()
    numbers = sorted({row["document"] for row in table})
    for some in [*itertools.combinations(numbers, 1), *itertools.combinations(numbers, 2)]:
        found = tokens_of(store.batches(NAME, 7, **OPTIONS, token_filter=TokenFilter(documents=some)))
        assert sorted({document for document, _ in found}) == sorted(some)
        assert len(found) == sum(row["last_token"] - row["first_token"] for row in table if row["document"] in some)
    assert list(store.batches(NAME, 7, token_filter=TokenFilter(documents=[10**6]))) == []
