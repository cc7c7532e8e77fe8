"""`python -m pipeline.inspect` describes the store correctly."""

import base64
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from pipeline.inspect import main
from pipeline.store import ActivationStore
from pipeline.store.inspection.views import take_sample
from tests.store.example_store import WIDTHS, stored_tokens, write_store


class Page(HTMLParser):
    """Collects text and tags, and fails if a tag is not closed, or if the page loads anything."""

    VOID = ("meta", "br", "img")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.feed(text)
        assert not self.open
        assert not re.search(r"https?://|src=\"(?!data:image/png;)|@import|url\(|href=", text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_the_summary_agrees_with_the_store(tmp_path, capsys):
    write_store(str(tmp_path))
    assert main([f"store.path={tmp_path}"]) == 0
    printed = capsys.readouterr().out
    assert f"{stored_tokens():,} in " in printed
    assert "complete" in printed
    for name, width in WIDTHS.items():
        assert re.search(rf"{re.escape(name)} +bfloat16 +{width} ", printed)
    store = ActivationStore.open(tmp_path)
    padding = 1 - stored_tokens() / (len(store.rows) * 8)
    assert f"{padding:.1%} of their slots are padding" in printed


def test_the_sample_agrees_with_numpy(tmp_path):
    write_store(str(tmp_path))
    store = ActivationStore.open(tmp_path)
    sample = take_sample(store, 10**6, seed=0)
    np.testing.assert_array_equal(sample.rows, store.rows)
    valid = sample.text.segments > 0
    for view in sample.views:
        values = store.arrays[view.name][...].read().result()[store.rows][valid].astype(np.float64)
        np.testing.assert_allclose(view.norms[valid], np.linalg.norm(values, axis=1), rtol=1e-6)
        assert np.isnan(view.norms[~valid]).all()
    again, other = take_sample(store, 8 * 5, seed=1), take_sample(store, 8 * 5, seed=2)
    assert len(again.rows) == 5
    assert again.rows.tolist() == take_sample(store, 8 * 5, seed=1).rows.tolist() != other.rows.tolist()


def test_the_page_is_complete_and_loads_nothing(real_store, tmp_path, capsys):
    file = tmp_path / "page.html"
    assert main([f"store.path={real_store}", f"inspect.html={file}", "inspect.tokens=4096"]) == 0
    text = file.read_text()
    page = Page(text)
    pictures = [base64.b64decode(picture) for picture in re.findall(r'src="data:image/png;base64,([^"]+)"', text)]
    assert len(pictures) == 3
    assert all(picture.startswith(b"\x89PNG") for picture in pictures)
    for caption in ("Mean norm by position", "blocks.4.resid_post"):
        assert f"<figcaption>{caption}" in text
    assert len(re.findall("[a-z]{4,}", page.text)) > 200  # decoded words, not ids
    assert main([f"store.path={real_store}", f"inspect.html={file}", f"inspect.tokenizer={tmp_path}"]) == 2
    assert "tokenizer.json" in capsys.readouterr().err


def test_a_store_of_an_unknown_tokenizer_is_shown_as_ids(tmp_path, capsys):
    write_store(str(tmp_path / "store"))
    file = tmp_path / "page.html"
    assert main([f"store.path={tmp_path / 'store'}", f"inspect.html={file}"]) == 0
    sample = take_sample(ActivationStore.open(tmp_path / "store"), 10**6, 0)
    assert f">{sample.text.tokens[0, 0]} </span>" in file.read_text()
    Page(file.read_text())


@pytest.mark.parametrize("max_blocks", [0, 1])
def test_unfinished_and_empty_stores_are_shown(tmp_path, capsys, max_blocks):
    write_store(str(tmp_path / "store"), finish=False, max_blocks=max_blocks)
    file = tmp_path / "page.html"
    assert main([f"store.path={tmp_path / 'store'}", f"inspect.html={file}"]) == 0
    assert "unfinished" in capsys.readouterr().out
    Page(file.read_text())


def test_values_that_are_not_finite_are_counted(tmp_path):
    write_store(str(tmp_path))
    store = ActivationStore.open(tmp_path)
    values = store.arrays["embed"][0].read().result()
    values[0, 1] = np.inf
    values[1, 0] = np.nan
    store.arrays["embed"][0].write(values).result()
    view = take_sample(store, 10**6, 0).views[-1]
    assert view.name == "embed"
    assert view.table_row()[-1] == "2"
