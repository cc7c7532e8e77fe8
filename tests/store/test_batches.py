import numpy as np
import pytest

from pipeline.store import ActivationStore, Batch
from pipeline.store.kvstore import open_kvstore, read_key, write_key
from tests.store.example_store import (
    LENGTH,
    NUM_STREAMS,
    activation,
    blocks,
    layout,
    stored_tokens,
    token_ids,
    write_store,
)

TINY_MIB = 2 * LENGTH * 4 * 6 * 2 / 2**20  # two blocks of rows of the example's widest array


@pytest.fixture
def store(store_path) -> ActivationStore:
    write_store(store_path)
    return ActivationStore.open(store_path)


def tokens_of(batch: Batch) -> list[tuple[int, int]]:
    return list(zip(batch.documents.tolist(), batch.tokens.tolist(), strict=True))


def all_tokens() -> list[tuple[int, int]]:
    found = []
    order = {layout().shard_index(s, b.record.block): b for s in range(NUM_STREAMS) for b in blocks(s)}
    for shard in sorted(order):
        arrays = order[shard].arrays
        valid = arrays["segments"] > 0
        found += zip(arrays["documents"][valid].tolist(), arrays["tokens"][valid].tolist(), strict=True)
    return found


@pytest.mark.parametrize("batch_size", [1, 7, 32, 1000])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("buffer_mib", [TINY_MIB, 256.0])
def test_every_token_comes_once_with_its_own_activation(store, batch_size, shuffle, buffer_mib):
    seen = []
    sizes = []
    batches = store.batches(
        [(1, "resid_post"), "embed"], batch_size, shuffle=shuffle, seed=3, dtype="float32", buffer_mib=buffer_mib
    )
    for batch in batches:
        seen += tokens_of(batch)
        sizes.append(len(batch.tokens))
        token = batch.activations["blocks.1.resid_post"][:, 1].astype(int)  # the example stores it there
        np.testing.assert_array_equal(batch.tokens, token_ids(batch.documents, token))
        for name, values in batch.activations.items():
            assert values.dtype == np.float32
            np.testing.assert_array_equal(values, activation(name, batch.documents, token, "float32"))
        assert (batch.segments > 0).all()
        assert (batch.positions <= token).all()
    assert sizes[:-1] == [batch_size] * (len(sizes) - 1)
    assert (sorted(seen) == sorted(all_tokens())) if shuffle else (seen == all_tokens())
    assert (seen == all_tokens()) != shuffle


def test_the_order_depends_on_the_seed_alone(store):
    def order(seed: int) -> list[tuple[int, int]]:
        return [t for b in store.batches((1, "resid_post"), 16, shuffle=True, seed=seed) for t in tokens_of(b)]

    assert order(0) == order(0)
    assert order(0) != order(1)


def test_a_single_activation_is_an_array(store):
    batch = next(store.batches((3, "resid_post"), 5))
    assert batch.activations.shape == (5, 6)
    assert batch.activations.dtype == "bfloat16"


@pytest.mark.parametrize("drop_last", [False, True])
def test_drop_last(store, drop_last):
    whole, rest = divmod(stored_tokens(), 50)
    assert rest
    sizes = [len(batch.tokens) for batch in store.batches("embed", 50, drop_last=drop_last)]
    assert sizes == [50] * whole + ([] if drop_last else [rest])


def test_batches_stay_valid_after_the_next_ones(store):
    kept = list(store.batches((1, "resid_post"), 8, buffer_mib=TINY_MIB))
    again = store.batches((1, "resid_post"), 8, buffer_mib=TINY_MIB)
    for before, now in zip(kept, again, strict=True):
        np.testing.assert_array_equal(before.activations, now.activations)


def test_an_abandoned_iterator_ends_its_thread(store):
    batches = store.batches((1, "resid_post"), 8)
    next(batches)
    batches.close()
    with pytest.raises(StopIteration):
        next(batches)


def test_damage_reaches_the_caller(store_path):
    write_store(store_path)
    kvstore = open_kvstore(store_path)
    key = layout().shard_key(layout().arrays[0], 0, 1)
    content = bytearray(read_key(kvstore, key))
    content[10] ^= 1
    write_key(kvstore, key, bytes(content))
    store = ActivationStore.open(store_path)
    with pytest.raises(Exception, match="Digest mismatch"):
        list(store.batches((1, "resid_post"), 8))


def test_shuffling_mixes_streams_and_blocks(store):
    """The tokens of the first batches come from all over the store."""
    first = next(store.batches((1, "resid_post"), 48, shuffle=True, seed=0))
    streams = first.documents % NUM_STREAMS
    assert 0 < streams.sum() < len(streams)
    assert len(set(first.documents.tolist())) >= 6


def test_a_batch_has_at_least_one_token(store):
    with pytest.raises(ValueError, match="batch_size"):
        next(store.batches("embed", 0))
