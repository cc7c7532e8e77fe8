"""Stores of the same tokens, read together: each token has the activations of every store. The refusal of other stores
says where they differ."""

from dataclasses import replace

import numpy as np
import pytest

from pipeline.core.errors import StoreMismatch
from pipeline.store import ActivationStore, TokenFilter, open_aligned
from pipeline.store.write.store_writer import StoreWriter
from tests.store.example_store import (
    NUM_STREAMS,
    blocks,
    commit_block,
    copy_store,
    layout,
    metadata,
    stored_tokens,
    token_ids,
)

KEYS = [["blocks.1.resid_post", "embed"], "blocks.3.resid_post"]


@pytest.fixture
def pair(tmp_path) -> list[str]:
    """Two stores of the example's tokens, whose arrays differ in dtype and compression."""
    paths = [str(tmp_path / name) for name in ("store-a", "store-b")]
    copy_store(paths[0])
    copy_store(paths[1], dtype="float32", compression="zstd")
    return paths


def write_changed(path: str, stream: int, block: int, name: str, place: tuple[int, int]) -> None:
    """Writes the example's store with one value of a side array increased by one."""
    writer = StoreWriter.open(path, metadata(), layout())
    for number in range(NUM_STREAMS):
        for item in blocks(number):
            arrays = item.arrays
            if (number, item.record.block) == (stream, block):
                arrays = arrays | {name: arrays[name].copy()}
                arrays[name][place] += 1
            commit_block(writer, replace(item, arrays=arrays))
    writer.finish()


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("buffer_mib", [0.001, 256.0])
def test_every_token_comes_once_with_the_activations_of_all_stores(pair, shuffle, buffer_mib):
    aligned = open_aligned(pair)
    seen = []
    for batch in aligned.batches(KEYS, 7, shuffle=shuffle, seed=3, dtype="float32", buffer_mib=buffer_mib):
        ours, theirs = batch.activations
        place = ours["blocks.1.resid_post"][:, 1].astype(int)  # the example stores the token's index in its document
        np.testing.assert_array_equal(batch.tokens, token_ids(batch.documents, place))
        np.testing.assert_array_equal(ours["blocks.1.resid_post"], theirs)
        np.testing.assert_array_equal(ours["embed"], theirs[:, :4] * [1, 1, 1, 4 / 6])
        seen += zip(batch.documents.tolist(), place.tolist(), strict=True)
    assert len(seen) == len(set(seen)) == stored_tokens()


def test_the_order_equals_that_of_one_store(pair):
    """One store is read twice together, so each reader has half of the buffer."""
    store = ActivationStore.open(pair[0])
    alone = store.batches("embed", 16, shuffle=True, seed=1, buffer_mib=0.01)
    together = open_aligned([store, store]).batches(["embed"] * 2, 16, shuffle=True, seed=1, buffer_mib=0.02)
    for one, both in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one.documents, both.documents)
        np.testing.assert_array_equal(one.activations, both.activations[1])


def test_filters_ranks_states_and_normalisation_apply_to_all_stores(pair):
    aligned = open_aligned(pair)
    options = {"shuffle": True, "seed": 2, "token_filter": TokenFilter(skip_first=1), "world": 2}
    whole = [batch for rank in range(2) for batch in aligned.batches(KEYS, 8, rank=rank, **options)]
    assert all((batch.positions > 0).all() for batch in whole)
    reader = aligned.batches(KEYS, 8, rank=1, **options)
    first = next(reader)
    state = reader.state()
    rest = [first, *aligned.batches(KEYS, 8, rank=1, state=state, **options)]
    for ours, theirs in zip(rest, whole[-len(rest) :], strict=True):
        np.testing.assert_array_equal(ours.activations[1], theirs.activations[1])
    statistics = [store.sample(key, 100) for store, key in zip(aligned.stores, KEYS, strict=True)]
    normalisation = [{name: each.normalisation() for name, each in sample.items()} for sample in statistics]
    batch = next(aligned.batches(KEYS, 8, normalisation=normalisation, framework="jax"))
    assert [batch.activations[0]["embed"].dtype, batch.activations[1].dtype] == ["float32", "float32"]


def test_stores_of_other_tokens_are_refused(pair, tmp_path):
    changed, short = str(tmp_path / "changed"), str(tmp_path / "store-short")
    write_changed(changed, 1, 1, "segments", (1, 3))
    copy_store(short, finish=False, max_blocks=1)
    for other, message in (
        (changed, "segments of block 1 of stream 1 differs between "),
        (short, "whether there is a block 1 of stream 0 differs between "),
    ):
        with pytest.raises(StoreMismatch) as raised:
            open_aligned([*pair, other])
        assert str(raised.value).startswith(f"{message}{pair[0]} and {other}. Make both from the same data")


def test_wrong_arguments_are_refused(pair):
    aligned = open_aligned(pair)
    for error, arguments in (
        ("keys is .*, expected a list with one entry for each of 2 stores", {"keys": ["embed"]}),
        ("keys is 'embed'", {"keys": "embed"}),
        ("normalisation is", {"keys": KEYS, "normalisation": [{}]}),
        ("token_filter has norms", {"keys": KEYS, "token_filter": TokenFilter(norms={"embed": (0, 1)})}),
    ):
        with pytest.raises(ValueError, match=error):
            aligned.batches(batch_size=4, **arguments)
    for places in (pair[0], pair[:1]):
        with pytest.raises(ValueError, match="two or more stores"):
            open_aligned(places)
