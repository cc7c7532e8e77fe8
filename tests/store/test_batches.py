import itertools
import json
import re
import threading

import numpy as np
import pytest

from pipeline.core.errors import ArgumentError
from pipeline.store import ActivationStore, Batch, Normalisation, TokenFilter
from pipeline.store.format.statistics import l2_norms
from pipeline.store.read import batches
from tests.store.example_store import (
    LENGTH,
    NUM_STREAMS,
    activation,
    all_tokens,
    copy_store,
    stored_tokens,
    token_ids,
    tokens_of,
)

TINY_MIB = 2 * LENGTH * 4 * 6 * 2 / 2**20  # two blocks of rows of the example's widest array
NAME = "blocks.1.resid_post"
SHUFFLED = {"shuffle": True, "seed": 5, "buffer_mib": TINY_MIB}


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> ActivationStore:
    path = tmp_path_factory.mktemp("store")
    copy_store(str(path))
    return ActivationStore.open(path)


@pytest.mark.parametrize("batch_size", [1, 32, 1000])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("buffer_mib", [TINY_MIB, 256.0])
def test_every_token_comes_once_with_its_activations(read_only, batch_size, shuffle, buffer_mib):
    store, seen, sizes = ActivationStore.open(read_only), [], []
    options = {"shuffle": shuffle, "seed": 3, "dtype": "float32", "buffer_mib": buffer_mib}
    for batch in list(store.batches([NAME, "embed"], batch_size, **options)):  # they stay valid after the next ones
        seen += tokens_of([batch])
        sizes.append(len(batch.tokens))
        token = batch.activations[NAME][:, 1].astype(int)  # the example stores it there
        np.testing.assert_array_equal(batch.tokens, token_ids(batch.documents, token))
        for name, values in batch.activations.items():
            assert values.dtype == np.float32
            np.testing.assert_array_equal(values, activation(name, batch.documents, token, "float32"))
        assert (batch.segments > 0).all()
        assert (batch.positions <= token).all()
    assert sizes[:-1] == [batch_size] * (len(sizes) - 1)
    assert (sorted(seen) == sorted(all_tokens())) if shuffle else (seen == all_tokens())
    assert (seen == all_tokens()) != shuffle


def test_closing_an_iterator_ends_its_threads(store):
    before = set(threading.enumerate())
    batches = store.batches(NAME, 8)
    next(batches)
    started = set(threading.enumerate()) - before
    assert started
    batches.close()
    for thread in started:
        thread.join(30)
        assert not thread.is_alive()
    with pytest.raises(StopIteration):
        next(batches)


def same(left: Batch, right: Batch) -> bool:
    return all(np.array_equal(vars(left)[name], vars(right)[name]) for name in vars(left))


@pytest.mark.parametrize(
    ("keys", "options", "warns"),
    [
        (NAME, {"buffer_mib": TINY_MIB}, True),
        (NAME, {"buffer_mib": TINY_MIB, "shuffle": False}, False),
        (NAME, {}, False),  # the buffer holds the whole store
        (NAME, {"buffer_mib": TINY_MIB, "world": 100, "epochs": None}, False),
        ([NAME, "embed"], {"buffer_mib": TINY_MIB}, True),
    ],
)
def test_a_buffer_that_mixes_few_places_is_warned_about(store, monkeypatch, caplog, keys, options, warns):
    monkeypatch.setattr(batches, "MIN_PLACES", 4)
    store.batches(keys, 7, **{"shuffle": True, **options})
    assert len(caplog.records) == warns
    if warns:
        assert f"a buffer of {TINY_MIB:g} MiB shuffles tokens from only" in caplog.text
        assert re.search(r"buffer_mib=\d+ for 4 places \(", caplog.text)
    store.sample(keys)
    assert len(caplog.records) == warns


def test_every_epoch_has_every_token_in_another_order(store):
    tokens = tokens_of(store.batches(NAME, 7, epochs=3, **SHUFFLED))
    epochs = [tokens[i : i + stored_tokens()] for i in range(0, 3 * stored_tokens(), stored_tokens())]
    assert len(tokens) == 3 * stored_tokens()
    assert all(sorted(epoch) == sorted(all_tokens()) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    other_seeds = [tokens_of(store.batches(NAME, 7, **SHUFFLED | {"seed": seed})) for seed in (5, 6)]
    assert [tokens == epochs[0] for tokens in other_seeds] == [True, False]
    first = next(store.batches(NAME, 48, shuffle=True, seed=0))  # from all over the store
    assert set((first.documents % NUM_STREAMS).tolist()) == set(range(NUM_STREAMS))
    assert len(set(first.documents.tolist())) >= 6


@pytest.mark.parametrize("options", [{}, SHUFFLED, {**SHUFFLED, "rank": 1, "world": 2, "batch_size": 3}])
@pytest.mark.parametrize("epochs", [2, None])
def test_a_reader_resumes_where_another_stopped(store, options, epochs):
    options = {"batch_size": 7, "epochs": epochs, **options}
    expected = list(itertools.islice(store.batches(NAME, **options), 60))
    for stop in [0, 1, 8, len(expected) // 2, len(expected) - 1]:
        first = store.batches(NAME, **options)
        taken = list(itertools.islice(first, stop))
        state = json.loads(json.dumps(first.state()))
        first.close()
        rest = list(itertools.islice(store.batches(NAME, **options, state=state), len(expected) - stop))
        assert len(taken) + len(rest) == len(expected)
        assert all(map(same, taken + rest, expected))
    reader = store.batches(NAME, 7)
    list(reader)
    assert list(store.batches(NAME, 7, state=reader.state())) == []


@pytest.mark.parametrize(
    "change",
    [
        {"batch_size": 8},
        {"seed": 6},
        {"shuffle": False},
        {"token_filter": TokenFilter(skip_first=1)},
        {"buffer_mib": 1.0},
    ],
)
def test_a_state_of_another_reading_is_refused(store, change):
    state = store.batches(NAME, **{"batch_size": 7, "seed": 5, "shuffle": True}).state()
    with pytest.raises(ValueError, match="state belongs to a different reader configuration"):
        store.batches(NAME, **{"batch_size": 7, "seed": 5, "shuffle": True, **change}, state=state)


def test_readers_of_another_world_begin_at_an_epoch(store):
    before = {"batch_size": 3, "epochs": 2, "rank": 1, "world": 2, **SHUFFLED}
    after = {**before, "rank": 2, "world": 3}
    first, second = (
        list(itertools.islice(store.batches(NAME, **after, state={"epoch": epoch}), 20)) for epoch in (0, 1)
    )
    assert tokens_of(first) != tokens_of(second)
    reader = store.batches(NAME, **before)
    for epoch in (0, 1):  # a part of the first one was read only then
        with pytest.raises(ValueError, match=f"rank and world.*begin an epoch: state={{'epoch': {epoch}}}"):
            store.batches(NAME, **after, state=reader.state())
        next(reader)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("token_filter", [TokenFilter(), TokenFilter(drop_tokens=(3, 40), skip_first=1)])
def test_ranks_share_the_store_and_have_equally_many_full_batches(store, world, token_filter):
    options = {"epochs": 2, "world": world, "token_filter": token_filter, **SHUFFLED}
    readers = [store.batches(NAME, 3, rank=rank, **options) for rank in range(world)]
    found = [[(reader.state()["epoch"], batch) for batch in reader] for reader in readers]
    assert len({tuple(epoch for epoch, _ in batches) for batches in found}) == 1
    assert {epoch for epoch, _ in found[0]} == {0, 1}
    assert all(len(batch.tokens) == 3 for batches in found for _, batch in batches)
    for epoch in range(2):
        seen = tokens_of(batch for batches in found for e, batch in batches if e == epoch)
        assert len(set(seen)) == len(seen)
        assert set(seen) <= set(all_tokens())


def test_ranks_of_endless_readers_count_no_tokens_first(store):
    """The first batch needs no pass over the data, and each rank reads its whole share."""
    limits = TokenFilter(norms={NAME: (0, np.inf)})
    seen = []
    for rank in range(2):
        reader = store.batches(NAME, 3, epochs=None, rank=rank, world=2, token_filter=limits, **SHUFFLED)
        for batch in reader:
            if reader.state()["epoch"] or reader.state()["batch"] == 0:
                break
            seen += tokens_of([batch])
        reader.close()
    assert len(set(seen)) == len(seen) >= stored_tokens() - 2 * 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"epochs": 0}, "epochs is 0"),
        ({"world": 2, "token_filter": TokenFilter(norms={NAME: (0, 1)})}, "epochs=None"),
        ({"token_filter": TokenFilter(norms={"embed": (0, 1)})}, r"norms names \['embed'\]"),
        ({"normalisation": {"embed": Normalisation(0, 1)}}, r"normalisation names \['embed'\]"),
        ({"normalisation": {"embed": None}}, "expected a dict: a Normalisation"),
        ({"rank": 2, "world": 2}, "rank is 2 with world=2"),
        ({"framework": "tensorflow"}, "framework is 'tensorflow'. Choose one of numpy, jax, torch"),
        ({"pin_memory": True}, 'pin_memory=True needs framework="torch", got numpy'),
        ({"keys": [NAME, "embed"], "stack": True}, "stack=True needs equal widths"),
        ({"keys": [NAME, NAME], "stack": True}, "stack=True needs each key once"),
        ({"state": {}}, "not a state as a reader's state"),
    ],
)
def test_contradictory_arguments_are_refused(store, options, message):
    with pytest.raises(ValueError, match=message):
        store.batches(**{"keys": NAME, "batch_size": 4, **options})


@pytest.mark.parametrize("epochs", [1, None])
def test_readers_that_the_store_cannot_feed_are_refused(store, epochs):
    for options in ({"world": 30}, {"epochs": None, "token_filter": TokenFilter(drop_tokens=range(1000))}):
        with pytest.raises(ValueError, match=r"less than one batch of 32\. Use fewer readers, .* that passes more"):
            list(store.batches(NAME, 32, **{"epochs": epochs} | options))


@pytest.mark.parametrize("shuffle", [False, True])
def test_filters_keep_the_tokens_that_numpy_keeps(store, shuffle):
    everything = next(store.batches([NAME], 1000))
    norms = l2_norms(everything.activations[NAME])
    low, high = np.quantile(norms, [0.2, 0.8])
    keep = (everything.positions >= 2) & ~np.isin(everything.tokens, [3, 40]) & (norms >= low) & (norms <= high)
    assert 0 < keep.sum() < 0.6 * len(keep)
    token_filter = TokenFilter(drop_tokens=(3, 40), skip_first=2, norms={NAME: (low, high)})
    expected = [t for t, kept in zip(tokens_of([everything]), keep, strict=True) if kept]
    found = tokens_of(store.batches(NAME, 5, shuffle=shuffle, token_filter=token_filter))
    assert (sorted(found) == sorted(expected)) if shuffle else (found == expected)


def test_equal_filters_have_equal_states(store):
    """However their numbers are given."""
    norms = {NAME: (1, 99), "embed": (3, 99)}
    given = TokenFilter(drop_tokens=np.array([3, 4]), norms=dict(reversed(norms.items())), documents={4, np.int64(2)})
    plain = TokenFilter(drop_tokens=(3, 4), norms=norms, documents=(2, 4))
    states = [store.batches([NAME, "embed"], 4, token_filter=each).state() for each in (given, plain)]
    assert states[0] == states[1]


@pytest.mark.parametrize("stack", [False, True])
@pytest.mark.parametrize("dtype", [None, "float16"])
def test_normalised_activations_equal_apply(store, stack, dtype):
    keys = ["blocks.3.resid_post", NAME]
    samples = store.sample(keys, num_tokens=50, seed=1)
    normalisation = {NAME: samples[NAME].normalisation()}
    plain = next(store.batches(keys, 20)).activations
    found = next(store.batches(keys, 20, stack=stack, normalisation=normalisation, dtype=dtype)).activations
    if stack:
        found = dict(zip(plain, np.moveaxis(found, 1, 0), strict=True))
    expected = normalisation[NAME].apply(plain[NAME], dtype)
    assert expected.dtype == (dtype or np.float32)
    np.testing.assert_array_equal(found[NAME], expected)
    np.testing.assert_array_equal(found["blocks.3.resid_post"].astype(np.float32), plain["blocks.3.resid_post"])


def test_a_sample_has_the_given_tokens_and_seed(store):
    one, same_seed, other = (store.sample(NAME, num_tokens=30, seed=seed)[NAME] for seed in (0, 0, 1))
    assert one.count == 30
    np.testing.assert_array_equal(one.mean, same_seed.mean)
    assert not np.array_equal(one.mean, other.mean)
    assert store.sample([NAME, "embed"])["embed"].count == stored_tokens()
    with pytest.raises(ValueError, match="no token passes the filter"):
        store.sample(NAME, token_filter=TokenFilter(skip_first=1000))


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_batches_of_a_framework_equal_numpys(store, framework):
    pytest.importorskip(framework)
    for ours, numpys in zip(
        store.batches([NAME, "embed"], 16, framework=framework, dtype="float32", **SHUFFLED),
        store.batches([NAME, "embed"], 16, dtype="float32", **SHUFFLED),
        strict=True,
    ):
        for name in ("tokens", "segments", "positions", "documents"):
            np.testing.assert_array_equal(np.asarray(getattr(ours, name)), getattr(numpys, name))
        for name, values in numpys.activations.items():
            assert type(ours.activations[name]).__module__.split(".")[0].startswith(framework)
            np.testing.assert_array_equal(np.asarray(ours.activations[name]), values)


def test_pinned_batches_need_cuda(store):
    torch = pytest.importorskip("torch")
    reader = store.batches(NAME, 16, framework="torch", pin_memory=True)
    if torch.cuda.is_available():
        assert next(reader).activations.is_pinned()
        return
    with pytest.raises(ArgumentError, match="pin_memory=True needs a GPU with CUDA, but torch finds none"):
        next(reader)
