"""`capture.positions`: stores of selected tokens have the values that a store of all tokens has for them."""

import re
from pathlib import Path

import numpy as np
import pytest
import zarr

from pipeline.config import composing
from pipeline.core.errors import StoreError, StoreInvalid, StoreMismatch
from pipeline.data.text.tokenizer import load_tokenizer
from pipeline.export import main as export
from pipeline.inspect import main as inspect
from pipeline.store import ActivationStore, TokenFilter
from pipeline.store.check.verifying import verify_store
from pipeline.store.read.reader import DocumentActivations
from tests.jobs import run_here, write_text
from tests.store.written_check import assert_well_written

pytestmark = pytest.mark.heavy
KEYS = ["blocks.0.resid_post", "blocks.1.attn_out"]
OUTPUTS = ["capture.outputs=[loss,entropy,top_logprobs]", "capture.top_logprobs=3"]

TOKENIZER = load_tokenizer(str(composing.PACKAGE / "assets" / "tiny-qwen2"))
PERIOD = TOKENIZER.token_id("", ".")

SELECTIONS = {
    "every": ["capture.positions=every", "capture.every=8", *OUTPUTS],
    "sample": ["capture.positions=sample", "capture.rate=0.1", "capture.seed=5"],
    # With as many slots as tokens, rows are packed as for all tokens, so activations are equal bit by bit.
    "last": ["capture.positions=last", "capture.per_row=2"],
    "token": ["capture.positions=token", "capture.token=.", "capture.per_row=128"],
}


@pytest.fixture(scope="module")
def overrides(tmp_path_factory, compilation_cache) -> list[str]:
    text = write_text(tmp_path_factory.mktemp("text"), files=3, documents=8)
    return [
        f"data.path={text}",
        "data.num_streams=2",
        "batch.rows=2",
        "batch.length=128",
        "capture.layers=[0,1]",
        "capture.sites=[resid_post,attn_out]",
        "capture.dtype=float32",
        "model.dtype=float32",
        "store.shard_mib=1000",  # blocks, and so rows, are the same whatever is selected
        compilation_cache,
    ]


@pytest.fixture(scope="module")
def of_all(overrides, tmp_path_factory) -> ActivationStore:
    return made(tmp_path_factory.mktemp("all"), overrides, *OUTPUTS)


@pytest.fixture(scope="module")
def documents(of_all) -> dict[int, DocumentActivations]:
    return {number: of_all.document(number) for number in of_all.documents()["document"].unique().to_pylist()}


def made(path: Path, overrides: list[str], *more: str) -> ActivationStore:
    run_here(*overrides, *more, f"store.path={path / 'store'}")
    return ActivationStore.open(path / "store")


def wanted(name: str, tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The indices of a document's selected tokens."""
    return {
        "every": np.flatnonzero(positions % 8 == 7),
        "last": np.array([len(tokens) - 1]),
        "token": np.flatnonzero(tokens == PERIOD),
    }[name]


def test_attention_patterns_of_selected_tokens_stay_within_their_window(overrides, tmp_path, capsys):
    store = made(tmp_path, overrides, *SELECTIONS["every"], "capture.sites=[attn_pattern,attn_entropy]")
    assert verify_store(store.path) == []
    for number in store.documents()["document"].unique().to_pylist():
        document = store.document(number)
        for layer in (0, 1):
            pattern = document.activations[f"blocks.{layer}.attn_pattern"].reshape(len(document.places), 4, 128)
            np.testing.assert_allclose(pattern.sum(axis=-1), 1, atol=1e-5)
            seen = np.arange(128) <= document.positions[:, None, None]  # counted from the window's start
            assert not np.where(seen, 0, pattern).any()
            entropy = -(pattern * np.log(np.maximum(pattern, 1e-30))).sum(axis=-1)
            np.testing.assert_allclose(entropy, document.activations[f"blocks.{layer}.attn_entropy"], atol=1e-4)
    assert export([f"store.path={store.path}", f"export.path={tmp_path / 'export'}"]) == 2
    assert "has the name 'blocks.0.attn.hook_pattern' for blocks.0.attn_" in capsys.readouterr().err


@pytest.fixture(scope="module")
def every(overrides, tmp_path_factory) -> ActivationStore:
    return made(tmp_path_factory.mktemp("every"), overrides, *SELECTIONS["every"])


@pytest.mark.parametrize("name", SELECTIONS)
def test_stored_activations_equal_those_of_a_store_of_all_tokens(overrides, of_all, every, documents, tmp_path, name):
    store = every if name == "every" else made(tmp_path, overrides, *SELECTIONS[name])
    assert verify_store(store.path) == []
    assert_well_written(store.path)
    table = store.documents().to_pandas().groupby("document")[["n_selected", "n_unselected"]].sum()
    total = 0
    for number, whole in documents.items():
        some = store.document(number)
        np.testing.assert_array_equal(some.text, whole.tokens)
        np.testing.assert_array_equal(some.tokens, whole.tokens[some.places])
        np.testing.assert_array_equal(some.positions, whole.positions[some.places])
        assert table.loc[number, "n_selected"] == len(some.places)
        if name != "sample":
            expected = wanted(name, whole.tokens, whole.positions)
            assert table.loc[number, "n_unselected"] == len(expected) - len(some.places)
            if not table.loc[number, "n_unselected"]:
                np.testing.assert_array_equal(some.places, expected)
        for array in whole.activations:
            stored, computed = some.activations[array], whole.activations[array][some.places]
            if name in ("every", "sample", "token"):
                np.testing.assert_array_equal(stored, computed)
            else:  # rows are packed differently, so sums may be rounded differently
                np.testing.assert_allclose(stored, computed, atol=1e-5, rtol=1e-4)
        for array in some.outputs:
            np.testing.assert_allclose(some.outputs[array], whole.outputs[array][some.places], atol=1e-4)
        total += len(some.places)
    assert store.num_activations == total > 20
    assert store.num_tokens == of_all.num_tokens
    if name == "sample":
        assert abs(total - 0.1 * of_all.num_tokens) < 5 * np.sqrt(0.1 * of_all.num_tokens)


def test_rows_batches_filters_and_statistics_are_aligned(every, of_all):
    beside, values = every.read_tokens(every.rows), every.read(KEYS[0], every.rows)
    valid = beside.segments > 0
    assert values.shape[:2] == valid.shape == (len(every.rows), every.slots) == (len(every.rows), 16)
    assert (values[~valid] == 0).all()
    assert (beside.documents[~valid] == -1).all()
    known = of_all.read_tokens(of_all.rows)
    found = of_all.read(KEYS[0], of_all.rows)
    in_place = {}
    for row, slot in np.argwhere(known.segments > 0).tolist():
        token = (known.documents[row, slot], known.positions[row, slot], known.tokens[row, slot])
        in_place.setdefault(tuple(map(int, token)), []).append(found[row, slot])

    def check(documents, positions, tokens, activations):
        for *token, activation in zip(documents, positions, tokens, activations, strict=True):
            assert any((activation == other).all() for other in in_place[tuple(map(int, token))])

    check(beside.documents[valid], beside.positions[valid], beside.tokens[valid], values[valid])
    names = ("top_ids", "loss")
    skipping = TokenFilter(skip_first=8)
    batches = list(every.batches(KEYS[0], 100, shuffle=True, seed=1, token_filter=skipping, outputs=names))
    assert sum(len(batch.tokens) for batch in batches) == (beside.positions[valid] >= 8).sum()
    outputs = every.read_outputs(every.rows)
    for batch in batches:
        check(batch.documents, batch.positions, batch.tokens, batch.activations)
        assert list(batch.outputs) == list(names)
        for k, place in enumerate(zip(batch.documents, batch.positions, strict=True)):
            slot = (beside.documents == place[0]) & (beside.positions == place[1])
            for name in names:
                assert any(np.array_equal(batch.outputs[name][k], v, equal_nan=True) for v in outputs[name][slot])
    with pytest.raises(StoreError, match="has no outputs \\['losses'\\]"):
        every.batches(KEYS[0], 100, outputs=["losses"])
    with pytest.raises(StoreError, match="has no outputs \\['losses'\\]"):
        every.read_outputs(0, ["losses"])
    halves = [list(every.batches(KEYS, 64, rank=rank, world=2)) for rank in range(2)]
    assert len(halves[0]) == len(halves[1]) > 0
    statistics = every.statistics(KEYS[0])
    assert statistics.count == valid.sum() == every.num_activations
    np.testing.assert_allclose(statistics.mean, values[valid].mean(axis=0, dtype=np.float64), atol=1e-5)


def test_zarr_reads_the_selection(every):
    group = zarr.open_group(every.path)
    row = int(every.rows[0])
    selected, tokens = group["selected"][row], group["tokens"][row]
    assert group["blocks.0.resid_post"].metadata.dimension_names == ("row", "selection", "feature")
    np.testing.assert_array_equal(tokens[selected[selected >= 0]], every.read_tokens(row).tokens[selected >= 0])


def test_inspect_shows_the_whole_text(every, tmp_path, capsys):
    assert inspect([f"store.path={every.path}", f"inspect.html={tmp_path / 'page.html'}"]) == 0
    assert f"for {every.num_activations:,} selected tokens" in capsys.readouterr().out
    page = (tmp_path / "page.html").read_text()
    assert page.count("norm ") > 30
    assert len(re.findall(r'<span title="token \d+, position \d+">', page)) > 200


def test_a_selection_of_no_token_makes_a_sound_store(overrides, tmp_path):
    nothing = ["capture.positions=token", 'capture.token="<|endoftext|>"', "run.max_tokens=4000"]
    store = made(tmp_path, overrides, *nothing)
    assert store.num_activations == 0 < store.num_tokens
    assert verify_store(store.path) == []
    assert not store.read(KEYS[0], store.rows).any()
    assert list(store.batches(KEYS[0], 10)) == []


def test_unstored_tokens_are_warned_about_and_impossible_positions_refused(overrides, tmp_path, caplog):
    store = made(tmp_path, overrides, "capture.positions=token", "capture.token=.", "capture.per_row=1")
    assert "selected tokens are not stored" in caplog.text
    assert "more than capture.per_row=1" in caplog.text
    row = store.arrays["selected"][int(store.rows[0])]
    row.write(np.full_like(row.read().result(), 10**6)).result()
    assert "selected/c.0.0" in [problem.where for problem in verify_store(store.path)]
    for read in (
        lambda opened: opened.read_selected(opened.rows),
        lambda opened: opened.read_tokens(opened.rows),
        lambda opened: list(opened.batches(KEYS[0], 10)),
    ):
        with pytest.raises(StoreInvalid, match="selected has positions from -?\\d+ to 1000000"):
            read(ActivationStore.open(store.path))


def test_another_selection_is_refused(overrides, every):
    with pytest.raises(StoreMismatch, match=r"capture\.every: the store has 8, this run asks for 4") as caught:
        made(Path(every.path).parent, overrides, *OUTPUTS, "capture.positions=every", "capture.every=4")
    assert caught.value.exit_code == 2
