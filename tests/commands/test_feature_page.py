"""The page of features that `pipeline.inspect` writes agrees with the store."""

import re
import shutil
from dataclasses import replace

import numpy as np
import pytest

from pipeline.data.text.tokenizer import load_tokenizer
from pipeline.inspect import main
from pipeline.store import ActivationStore
from pipeline.store.format.metadata import change_root
from pipeline.store.inspection.page import store_page
from pipeline.store.inspection.views import TOKENS_AFTER, TOKENS_BEFORE, most_and_least_frequent, view_features
from pipeline.store.io.storage import Storage
from tests.commands.test_inspect import Page
from tests.store.test_feature_batches import ENCODERS, write

pytestmark = pytest.mark.heavy
KEY = "blocks.4.resid_post"


@pytest.fixture(scope="module")
def store(encoded_store) -> ActivationStore:
    return ActivationStore.open(encoded_store)


@pytest.fixture(scope="module")
def dense(store) -> np.ndarray:
    """The values of all features, [rows, positions, F], from the arrays by token."""
    outputs = store.read_outputs(slice(None))
    index, value = (outputs[f"features.{KEY}.{part}"] for part in ("index", "value"))
    values = np.zeros((*index.shape[:2], 769), np.float32)
    np.put_along_axis(values, index, value.astype(np.float32), axis=2)
    return values[..., :768]


def test_the_most_and_the_least_frequent_features_are_chosen(store, dense):
    assert most_and_least_frequent(np.array([3, 0, 9, 9, 1, 0, 5]), 2) == (2, 3, 0, 4)
    assert most_and_least_frequent(np.array([3, 0, 9]), 2) == (2, 0)
    assert most_and_least_frequent(np.zeros(3, int), 2) == ()
    sae = view_features(store)
    counts = (dense > 0).sum(axis=(0, 1))
    assert [view.feature for view in sae.features] == list(most_and_least_frequent(counts, 4))
    for view in sae.features:
        np.testing.assert_array_equal(view.values, dense[..., view.feature][dense[..., view.feature] > 0])


@pytest.mark.parametrize("most", [None, 0], ids=["all firings", "the strongest"])
def test_contexts_come_from_the_rows_with_the_strongest_firings(store, dense, monkeypatch, most):
    if most is not None:
        monkeypatch.setattr("pipeline.store.inspection.views.MAX_FIRINGS", most)
    text = store.read_tokens(slice(None))
    cut = 0
    for view in view_features(store, features=(12, 99, 500), contexts=5).features:
        values = dense[..., view.feature]
        strongest = values.max(axis=1)
        assert [c.values[c.strongest] for c in view.contexts] == np.sort(strongest[strongest > 0])[::-1][:5].tolist()
        assert len({context.row for context in view.contexts}) == len(view.contexts)
        for context in view.contexts:
            n = int(np.flatnonzero(store.rows == context.row)[0])
            place = int(values[n].argmax())
            begin = max(place - TOKENS_BEFORE, place - int(text.positions[n, place]))
            window = slice(begin, begin + len(context.tokens))
            assert context.strongest == place - begin
            np.testing.assert_array_equal(context.tokens, text.tokens[n, window])
            np.testing.assert_array_equal(context.values, values[n, window])
            assert set(text.documents[n, window]) == {context.document}
            assert context.position == text.positions[n, place]
            is_whole = len(context.tokens) == context.strongest + TOKENS_AFTER + 1
            assert is_whole or window.stop == 256 or text.segments[n, window.stop] != text.segments[n, place]
            cut += not is_whole or context.strongest < TOKENS_BEFORE
    assert cut  # some contexts are cut where their window begins or ends


def test_the_page_shows_features(encoded_store, store, tmp_path, capsys):
    file = tmp_path / "page.html"
    arguments = [f"store.path={encoded_store}", f"inspect.html={file}", "inspect.features=[12,99]"]
    assert main([*arguments, "inspect.contexts=3", "inspect.tokens=512"]) == 0
    assert f"{file}: " in capsys.readouterr().out
    text = file.read_text()
    page = Page(text)
    for caption, count in (("How often features fire", 1), ("Values of firings", 2)):
        assert text.count(f"<figcaption>{caption}") == count
    assert re.findall(r"<h2>Feature (\d+)", text) == ["12", "99"]
    assert text.count('class="context"') == 6
    statistics, tokenizer = store.feature_statistics(KEY), load_tokenizer("pipeline/assets/tiny-qwen2")
    assert f"{statistics.explained_variance:.1%}" in page.text
    for view in view_features(store, features=(12, 99), contexts=3).features:
        count, mean, maximum = (
            values[view.feature] for values in (statistics.count, statistics.mean, statistics.maximum)
        )
        assert f"({count:,}); mean {mean:.4g}, maximum {maximum:.4g}." in page.text
        for context in view.contexts:
            shown = "".join(tokenizer.decode([token]) for token in context.tokens)
            assert shown.replace("\n", "↵") in page.text


def test_the_numbers_of_firing_features_are_printed(encoded_store, store, dense, capsys):
    assert main([f"store.path={encoded_store}", "inspect.tokens=512"]) == 0
    frequency = (dense > 0).sum(axis=(0, 1)) / store.num_tokens
    counts = [(frequency == 0).sum(), (frequency > 0.01).sum(), (frequency > 0.1).sum()]
    assert counts[2] > 0
    assert re.search(" +".join([KEY, "768", r"16\.0", r"8\d\.\d%", *map(str, counts)]), capsys.readouterr().out)


def test_a_feature_that_never_fires_and_one_with_too_many_firings_have_no_histogram(store):
    sae = view_features(store, features=(12, 99))
    count = sae.statistics.count.copy()
    count[12] = 0
    silent, many = replace(sae.features[0], values=np.empty(0, np.float32), contexts=()), sae.features[1]
    views = (silent, replace(many, values=many.values[:64]))
    sae = replace(sae, statistics=replace(sae.statistics, count=count), features=views)
    page = Page(store_page(store, {}, None, sae, None))
    assert "Stored in 0 % of tokens (0)" in page.text
    assert "Values of firings" not in page.text
    assert "".join(f"{token} " for token in many.contexts[0].tokens) in page.text  # without a tokenizer


def test_a_missing_tokenizer_is_reported(encoded_store, tmp_path, capsys):
    path = shutil.copytree(encoded_store, tmp_path / "store")
    gone = {"config": {"model": {"path": str(tmp_path / "gone")}, "run": {"max_tokens": None}}}
    change_root(Storage.open(str(path)), lambda root: replace(root, metadata=replace(root.metadata, **gone)))
    assert main([f"store.path={path}", f"inspect.html={tmp_path / 'page.html'}", "inspect.tokens=512"]) == 0
    assert capsys.readouterr().err.count("tokens are shown as ids") == 1


def test_features_that_cannot_be_shown_are_refused(small_store, encoded_store, tmp_path, capsys):
    two, page = write(str(tmp_path / "two"), keeps_activations=True), f"inspect.html={tmp_path / 'p'}"
    for store, *arguments, message in (
        (encoded_store, page, "inspect.features=[768]", "inspect.features contains 768, but"),
        (encoded_store, page, "inspect.features=[1,,2]", "inspect.features=[1,,2]: expected whole numbers"),
        (encoded_store, page, "inspect.sae=blocks.2.resid_post", "statistics, of: blocks.4.resid_post. Choose one"),
        (encoded_store, "inspect.features=[1]", "inspect.features is only for the page"),
        (small_store, page, "inspect.features=[1]", "statistics, of: no SAE"),
        (two, page, f"inspect.sae={ENCODERS[0][0]}", "statistics, of: no SAE"),
    ):
        assert main([f"store.path={store}", "inspect.tokens=512", *arguments]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "p").exists()


def test_an_index_that_contradicts_the_arrays_is_reported(encoded_store, tmp_path, capsys):
    copy = shutil.copytree(encoded_store, tmp_path / "store")
    array = ActivationStore.open(copy).arrays[f"features.{KEY}.index"]
    array.write(np.zeros(array.shape, np.int32)).result()
    assert main([f"store.path={copy}", f"inspect.html={tmp_path / 'p'}", "inspect.features=12"]) == 2
    assert "the index by feature has a firing of feature 12" in capsys.readouterr().err
