"""A Stream yields the tokens and values of a store of the same configuration, each once. The order depends only on
configuration and seed. A Stream resumes bit for bit wherever it was stopped."""

import gc
import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline import Stream
from pipeline.core.errors import ConfigError, InputError
from pipeline.library import StreamReader
from pipeline.store import ActivationStore, Batch, TokenFilter
from pipeline.store.read.iterating import sealed
from tests.interrupting import read_with_interruptions
from tests.jobs import run_here, write_text
from tests.token_batches import assert_all_same, tokens_of

pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("cached_steps")]
try:
    import torch
except ModuleNotFoundError:
    torch = None

KEYS = ["blocks.0.resid_post", "blocks.1.resid_post"]
SMALL = ["batch.rows=4", "batch.length=128", "store.shard_mib=0.25", "run.progress=false"]
BUFFER = 4096  # slots for tokens: two halves of four steps
SIZE = 100


def overrides_of(text: Path) -> list[str]:
    return ["data=demo", f"data.path={text}", "model=tiny", "capture.layers=[0,1]", *SMALL, "data.num_streams=2"]


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """Three parquet files of documents, some of several windows, so that one of two streams ends early."""
    return write_text(tmp_path_factory.mktemp("text"), files=3, documents=20, max_characters=1500)


@pytest.fixture(scope="module")
def overrides(text) -> list[str]:
    return overrides_of(text)


@pytest.fixture(scope="module")
def stream(overrides) -> Stream:
    return Stream.from_config(overrides)


@pytest.fixture(scope="module")
def store(overrides, tmp_path_factory) -> ActivationStore:
    path = str(tmp_path_factory.mktemp("store") / "store")
    run_here(*overrides, f"store.path={path}")
    return ActivationStore.open(path)


def batches_of(stream: Stream, **options) -> StreamReader:
    return stream.batches(SIZE, **{"shuffle_buffer_tokens": BUFFER, "seed": 3} | options)


def test_every_token_once_with_the_values_of_the_store(whole, store):
    assert sum(len(batch.tokens) for batch in whole) == store.num_tokens > 2 * BUFFER
    assert tokens_of(whole) == tokens_of(store.batches(KEYS, SIZE))
    assert [len(batch.tokens) for batch in whole[:-1]] == [SIZE] * (len(whole) - 1)


def test_without_shuffling_batches_equal_the_stores(stream, store):
    assert_all_same(batches_of(stream, shuffle=False), store.batches(KEYS, SIZE))


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        (
            ["model.dtype=bfloat16", "capture.dtype=int8", "capture.scale_group=32", "capture.statistics=false"],
            {"stack": True},
        ),
        (
            [
                *("capture.positions=regex", 'capture.regex="^ [a-z]"', "capture.outputs=[loss,top_logprobs]"),
                *("capture.dtype=float32", "batch.packing=pad"),
            ],
            {"outputs": ("loss", "top_ids", "top_logprobs"), "dtype": "float16"},
        ),
    ],
    ids=["int8", "selected and padded"],
)
def test_streams_of_other_forms_equal_their_stores(overrides, tmp_path, settings, options):
    settings = [*overrides, *settings, "run.max_tokens=3000"]
    run_here(*settings, f"store.path={tmp_path / 'store'}")
    store = ActivationStore.open(str(tmp_path / "store"))
    stream = Stream.from_config(settings)
    batches = list(batches_of(stream, **options))
    assert sum(len(batch.tokens) for batch in batches) == store.num_activations
    assert tokens_of(batches) == tokens_of(store.batches(KEYS, SIZE, **options))


def test_an_abandoned_stream_resumes_with_the_same_batches(stream, whole):
    state, resumed = None, []
    for stop in (1, 18, 56, 95):
        batches = batches_of(stream, state=state)
        resumed += [next(batches) for _ in range(stop - len(resumed))]
        state = json.loads(json.dumps(batches.state()))
        del batches  # without closing it
    assert len(json.dumps(state)) < 1000
    assert_all_same(resumed, whole[:95])
    assert_all_same(batches_of(stream, state=state), whole[95:])


def test_a_state_at_the_end_yields_nothing(stream, ended):
    _, batches = ended
    assert next(batches, None) is None
    assert next(batches_of(stream, state=batches.state()), None) is None


def test_a_loop_interrupted_at_random_moments_yields_every_token_once(stream, whole, tmp_path):
    for seed, options in enumerate([{"framework": "torch"}, {"store": str(tmp_path / "store")}]):
        batches = batches_of(stream, dtype="float32", **options)
        received, interruptions = read_with_interruptions(batches, 4, 0.4, seed)
        assert_all_same(received, whole)
        assert interruptions
    assert ActivationStore.open(str(tmp_path / "store")).complete


def test_the_next_loop_is_another_pass_in_another_order(stream, whole):
    batches = batches_of(stream)
    first, state = list(batches), batches.state()
    second = list(batches)
    assert_all_same(first, whole)
    assert tokens_of(second) == tokens_of(whole)
    assert any(a.tokens.tobytes() != b.tokens.tobytes() for a, b in zip(second[:5], whole[:5], strict=True))
    resumed = batches_of(stream, state=state)
    assert list(resumed) == []  # of the first pass
    partly = [next(iter(resumed)), *itertools.islice(resumed, 40)]
    assert_all_same([*partly, *batches_of(stream, state=json.loads(json.dumps(resumed.state())))], second)


def test_a_changed_state_is_refused(stream):
    batches = batches_of(stream)
    next(batches)
    state = json.loads(json.dumps(batches.state()))
    for changes in ({"row": 1}, {"token": 0}, {"streams": state["streams"][:1]}, {"of": {}}, {"checksum": 1}):
        with pytest.raises(ValueError, match=r"not a state as a reader's state\(\) returned it"):
            batches_of(stream, state=state | changes)


class StreamDataset(torch.utils.data.IterableDataset if torch else object):
    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def __iter__(self) -> Iterator[dict]:
        return (vars(batch) for batch in batches_of(self.stream, framework="torch"))


@pytest.mark.skipif(torch is None, reason="needs torch")
def test_workers_of_a_data_loader_are_refused_at_once(stream):
    loader = torch.utils.data.DataLoader(
        StreamDataset(stream), batch_size=None, num_workers=1, multiprocessing_context="fork"
    )
    with pytest.raises(ConfigError, match="forked from one that has used JAX"):
        next(iter(loader))
    alone = torch.utils.data.DataLoader(StreamDataset(stream), batch_size=None)
    assert next(iter(alone))["activations"][KEYS[0]].dtype == torch.bfloat16


def test_at_most_half_a_buffer_is_computed_again(stream, whole):
    batches = batches_of(stream)
    for _ in range(90):
        next(batches)
    state = batches.state()
    batches.close()
    begin = int(np.cumsum([len(batch.tokens) for batch in whole])[89]) - state["token"]
    assert 0 <= state["token"] <= BUFFER // 2
    assert begin >= BUFFER // 2  # the first half is not computed again


def test_the_order_depends_on_the_seed_and_not_on_speed(stream, whole):
    def slowly(batches: Iterator[Batch]) -> Iterator[Batch]:
        for number, batch in enumerate(batches):
            time.sleep(0.02 * (number % 40 == 0))
            yield batch

    assert_all_same(slowly(batches_of(stream)), whole)
    other = list(batches_of(stream, seed=4))
    assert any(a.tokens.tobytes() != b.tokens.tobytes() for a, b in zip(other[:5], whole[:5], strict=True))
    assert tokens_of(other) == tokens_of(whole)


def test_batches_mix_the_documents_of_half_a_buffer(whole, stream):
    in_order = next(batches_of(stream, shuffle=False))
    assert len(np.unique(whole[5].documents)) > 3 * len(np.unique(in_order.documents))


def test_the_shares_of_two_readers_are_disjoint_and_complete(stream, whole):
    shares = [list(batches_of(stream, rank=rank, world=2)) for rank in range(2)]
    documents = [np.unique(np.concatenate([batch.documents for batch in share])) for share in shares]
    assert len(np.intersect1d(*documents)) == 0
    assert min(map(len, shares)) > 20
    assert tokens_of([*shares[0], *shares[1]]) == tokens_of(whole)
    state = batches_of(stream, rank=0, world=2).state()
    with pytest.raises(ValueError, match="differs in rank"):
        batches_of(stream, rank=1, world=2, state=state)


def test_named_options_make_the_stream_of_the_overrides(text, stream, whole):
    options = {"rows": 4, "length": 128, "shard_mib": 0.25, "model_dtype": "float32", "progress": False}
    data = {"path": str(text), "num_streams": 2}
    named = Stream("${assets:tiny-qwen2}", layers=[0, 1], data=data, **options)
    assert_all_same(batches_of(named), whole)
    assert batches_of(named).state() == batches_of(stream).state()
    with pytest.raises(ConfigError, match="has the source 'hf'"):
        Stream("${assets:tiny-qwen2}", layers=[2], data={"source": "hf", "path": str(text)})
    with pytest.raises(ConfigError, match=r"data\.pth is not a key"):
        Stream("${assets:tiny-qwen2}", layers=[2], data={"path": str(text), "pth": str(text)})


def test_a_state_of_another_stream_is_refused_by_name(stream, overrides):
    state = batches_of(stream).state()
    for name, options in (("seed", {"seed": 4}), ("shuffle_buffer_tokens", {"shuffle_buffer_tokens": 2 * BUFFER})):
        with pytest.raises(ValueError, match=f"differs in {name} .* Use the configuration"):
            batches_of(stream, **options, state=state)
    with pytest.raises(ValueError, match=r"differs in batch_size \(100 in the state, 50 here\)"):
        stream.batches(50, shuffle_buffer_tokens=BUFFER, seed=3, state=state)
    with pytest.raises(ValueError, match="differs in token_filter"):
        batches_of(stream, token_filter=TokenFilter(skip_first=1), state=state)
    other = Stream.from_config([*overrides, "capture.layers=[3]", "run.max_tokens=9000"])
    with pytest.raises(ValueError, match=r"differs in capture .*, max_tokens \(None .*, 9000 here\), rank .*, world"):
        batches_of(other, rank=1, world=2, state=state)
    with pytest.raises(ValueError, match="the state is not from a Stream"):
        batches_of(stream, state=sealed({"epoch": 0, "batch": 3, "buffer": 0, "token": 5, "order": 1}))


def test_options_that_are_refused(stream):
    for options, error, message in (
        ({"shuffle_buffer_tokens": 1000}, ConfigError, "Set it to at least 1024, or lower batch.rows"),
        ({"shuffle_buffer_tokens": 1 << 40}, ConfigError, "Lower shuffle_buffer_tokens"),
        ({"keys": "blocks.3.resid_post"}, ConfigError, "or several: it has blocks.0"),
        ({"outputs": ("loss",)}, ConfigError, r"no outputs \['loss'\]; it has \[\]"),
        ({"features": True}, ConfigError, "no features"),
        ({"rank": 2, "world": 3}, ConfigError, "rank 2 of 3 has no documents: .*row_groups_per_shard"),
        ({"rank": 2, "world": 2}, ValueError, "rank is 2 with world=2: expected a rank from 0 to world - 1"),
        ({"framework": "tensorflow"}, ValueError, "tensorflow"),
        ({"token_filter": TokenFilter(part="prompt")}, ValueError, "a stream's documents have no parts"),
    ):
        with pytest.raises(error, match=message):
            batches_of(stream, **options)
    with pytest.raises(ConfigError, match="data=generate needs a store"):
        Stream.from_config(["data=generate", "data@data.prompts=demo", "data.path=none", "capture.layers=[0]"])


def test_keys_filters_and_frameworks_apply_as_in_a_store(stream, store, whole):
    token_filter = TokenFilter(skip_first=2, norms={KEYS[1]: (0.0, 100.0)})
    batches = list(batches_of(stream, keys="blocks.1.resid_post", token_filter=token_filter, framework="jax"))
    assert isinstance(batches[0].activations, jax.Array)
    assert batches[0].activations.dtype == jax.numpy.bfloat16
    expected = store.batches("blocks.1.resid_post", SIZE, token_filter=token_filter, dtype="stored")
    assert tokens_of(batches) == tokens_of(expected)
    stacked = next(batches_of(stream, keys=["blocks.1.resid_post", KEYS[0]], stack=True))
    assert stacked.activations.tobytes() == np.stack([whole[0].activations[k] for k in KEYS[::-1]], 1).tobytes()


def test_normalisation_is_computed_from_a_sample(stream, store):
    normalisation = stream.normalisation(num_tokens=6000)
    values = np.concatenate([batch.activations[KEYS[0]] for batch in batches_of(stream, normalisation=normalisation)])
    assert values.dtype == np.float32
    assert np.abs(values.mean(axis=0)).max() < 0.2
    np.testing.assert_allclose((values**2).mean(), 1, atol=0.1)
    everything = stream.sample(KEYS[0], num_tokens=1 << 30)[KEYS[0]]
    np.testing.assert_allclose(everything.mean, store.statistics("blocks.0.resid_post").mean, rtol=1e-3, atol=1e-4)


def test_a_stream_does_not_use_reserved_memory(overrides, monkeypatch):
    """JAX knows the memory of this device: the CPU reports 24 MiB."""
    device = type(jax.local_devices()[0])
    stats = {"bytes_limit": 24 << 20}
    monkeypatch.setattr(device, "memory_stats", lambda _: stats, raising=False)
    stream = Stream.from_config([*overrides, "run.reserved_mib=8"])
    assert "reserved  8 MiB on each device" in stream._job.plan.describe()
    stream.batches(SIZE)
    with pytest.raises(ConfigError, match=r"of each device \(.*, which has .* besides the 0.02 of run.reserved_mib"):
        Stream.from_config([*overrides, "batch.rows=64", "run.reserved_mib=20"]).batches(SIZE)
    with pytest.raises(ConfigError, match="run.reserved_mib is 24, but each device has 24 MiB"):
        Stream.from_config([*overrides, "run.reserved_mib=24"])


def test_closing_or_dropping_a_reader_ends_its_threads(stream):
    def threads() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name in ("feed", "fill")]

    gc.collect()
    before = threads()
    batches = batches_of(stream)
    next(batches)
    begun = [thread for thread in threads() if thread not in before]
    assert sorted(thread.name for thread in begun) == ["feed", "fill"]
    batches.close()
    assert next(batches, None) is None
    assert not any(thread.is_alive() for thread in begun)
    batches = batches_of(stream)
    next(batches)
    begun = [thread for thread in threads() if thread not in before]
    assert len(begun) == 2
    del batches
    for thread in begun:
        thread.join(5)
    assert not any(thread.is_alive() for thread in begun)


def test_a_bad_document_is_raised_at_its_place_in_the_data(tmp_path):
    text = write_text(tmp_path / "text", files=1, documents=60, max_characters=1500)
    [file] = text.iterdir()
    table = pq.read_table(file).to_pydict()
    table["text"][55] = ""
    pq.write_table(pa.table(table), file)
    settings = [setting for setting in overrides_of(text) if "num_streams" not in setting]
    batches = Stream.from_config(settings).batches(SIZE, shuffle_buffer_tokens=2048)
    with pytest.raises(InputError, match="row 55"):
        for number, _ in enumerate(batches):  # noqa: B007
            pass
    assert number > 50
    with pytest.raises(InputError, match="row 55"):  # and again
        list(batches)


DROPS = """
import sys
from pipeline import Stream

next(Stream.from_config(sys.argv[1:]).batches(100, shuffle_buffer_tokens=4096, seed=3))
"""


def test_a_program_may_end_after_it_dropped_a_reader(overrides):
    """The thread of the dropped reader computes on for a while, and would abort the process as it exits."""
    for _ in range(3):
        result = subprocess.run([sys.executable, "-c", DROPS, *overrides], capture_output=True, text=True)
        assert (result.returncode, "failed" in result.stderr) == (0, False), result.stderr
