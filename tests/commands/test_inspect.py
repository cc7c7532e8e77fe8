"""`python -m pipeline.inspect` describes the store correctly."""

import json
import math
import re
import subprocess
import sys
from contextlib import closing
from html.parser import HTMLParser

import numpy as np
import pytest

from pipeline.cli.settings import parse
from pipeline.core.errors import ConfigError
from pipeline.inspect import Settings, main
from pipeline.inspection.sample import take_sample
from pipeline.inspection.summary import summarise
from pipeline.job.metrics import Metrics
from pipeline.store import ActivationStore
from pipeline.store.io.storage import Storage
from tests.jobs import ROOT, run
from tests.store.emulators import new_bucket
from tests.store.example_store import DOCUMENT_LENGTHS, WIDTHS, stored_tokens, write_store


class Page(HTMLParser):
    """Collects text and tags, and fails if a tag is not closed."""

    VOID = ("meta", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.feed(text)
        assert not self.open

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
    summary = summarise(ActivationStore.open(tmp_path))
    slots = sum(record.rows for record in summary.blocks) * 8
    assert summary.padding == pytest.approx(1 - stored_tokens() / slots)
    assert set(summary.document_tokens.tolist()) == {n for lengths in DOCUMENT_LENGTHS for n in lengths}


def test_the_sample_agrees_with_numpy(tmp_path):
    write_store(str(tmp_path))
    store = ActivationStore.open(tmp_path)
    sample = take_sample(store, 10**6, seed=0)
    np.testing.assert_array_equal(sample.rows, store.rows)
    valid = sample.side_arrays.segments > 0
    for view in sample.views:
        values = store.arrays[view.name][...].read().result()[store.rows][valid].astype(np.float64)
        np.testing.assert_allclose(view.norms[valid], np.linalg.norm(values, axis=1), rtol=1e-6)
        assert np.isnan(view.norms[~valid]).all()
        shares = np.sort(np.linalg.eigvalsh(np.cov(values.T)))[::-1]
        np.testing.assert_allclose(view.spectrum, shares / shares.sum(), atol=1e-9)
    again, other = take_sample(store, 8 * 5, seed=1), take_sample(store, 8 * 5, seed=2)
    assert len(again.rows) == 5
    assert again.rows.tolist() == take_sample(store, 8 * 5, seed=1).rows.tolist() != other.rows.tolist()


def test_the_sample_has_a_maximum_number_of_rows(tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.inspection.sample.MAX_TEXT_SLOTS", 3 * 8)
    write_store(str(tmp_path))
    assert len(take_sample(ActivationStore.open(tmp_path), 10**6, seed=0).rows) == 3


def test_the_page_is_complete_and_loads_nothing(real_store, tmp_path, capsys):
    file = tmp_path / "page.html"
    assert main([f"store.path={real_store}", f"inspect.html={file}", "inspect.tokens=4096"]) == 0
    text = file.read_text()
    page = Page(text)
    assert page.tags.count("svg") >= 8
    assert not re.search(r"https?://|src=|@import|url\((?!#)|href=\"(?!#|data:image/png;)", text)
    ids = set(re.findall(r'id="([^"]+)"', text))
    assert all((clip or shape) in ids for clip, shape in re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', text))
    for caption in (
        "Norm by layer",
        "Mean norm by position",
        "Variance explained",
        "Document lengths",
        "Share of padding",
    ):
        assert f"<figcaption>{caption}" in text
    assert "<h2>Packing</h2>" in text
    assert "blocks.4.resid_post" in page.text
    assert "Seconds of the writer thread" in page.text
    assert len(re.findall("[a-z]{4,}", page.text)) > 200  # decoded words, not ids
    capsys.readouterr()


def test_a_page_that_cannot_be_written_is_refused(real_store, tmp_path, capsys):
    arguments = [f"store.path={real_store}", f"inspect.html={tmp_path}/no/such/folder.html", "inspect.tokens=512"]
    assert main(arguments) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_matplotlib_is_imported_only_to_draw(real_store):
    program = f"""
import sys
from pipeline.inspect import main
assert main(["store.path={real_store}", "inspect.tokens=512"]) == 0
print("matplotlib" in sys.modules)"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.endswith("\nFalse\n"), done.stderr


def test_a_missing_tokenizer_is_refused(real_store, tmp_path, capsys):
    assert main([f"store.path={real_store}", f"inspect.html={tmp_path / 'p'}", f"inspect.tokenizer={tmp_path}"]) == 2
    assert "tokenizer.json" in capsys.readouterr().err


def test_a_store_of_an_unknown_tokenizer_is_shown_as_ids(tmp_path, capsys):
    write_store(str(tmp_path / "store"))
    file = tmp_path / "page.html"
    assert main([f"store.path={tmp_path / 'store'}", f"inspect.html={file}"]) == 0
    sample = take_sample(ActivationStore.open(tmp_path / "store"), 10**6, 0)
    assert f">{sample.side_arrays.tokens[0, 0]} </span>" in file.read_text()
    Page(file.read_text())
    capsys.readouterr()


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
    assert view.non_finite == 2
    assert np.isfinite(view.spectrum).all()
    assert np.isfinite(view.valid_norms).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, "_metrics/run.jsonl, a run's log, is not JSON"),
        ({"tokens_per_s": "<b>"}, "_metrics/run.jsonl is not a run's log"),
        ({"peak_rss_mib": None}, "_metrics/run.jsonl is not a run's log"),
        ({"elapsed_s": math.nan}, "_metrics/run.jsonl is not a run's log"),
        ({"tokens": 10**400}, "_metrics/run.jsonl is not a run's log"),
        ({"seconds": {"feed": {"work": math.inf}}}, "_metrics/run.jsonl is not a run's log"),
        ({"seconds": {"feed": 1.0}}, "_metrics/run.jsonl is not a run's log"),
        ({}, None),
    ],
)
def test_a_damaged_log_is_reported(tmp_path, capsys, change, message):
    write_store(str(tmp_path / "store"))
    with closing(Metrics(total_tokens=None, stored_tokens=0, progress=False, interval_s=1)) as metrics:
        line = b'{"tokens": 1' if change is None else json.dumps(metrics.snapshot() | change).encode()
    Storage.open(str(tmp_path / "store")).write("_metrics/run.jsonl", line)
    assert main([f"store.path={tmp_path / 'store'}", f"inspect.html={tmp_path / 'page.html'}"]) == (2 if message else 0)
    assert (message or "") in capsys.readouterr().err


def test_a_missing_store_is_refused(tmp_path, capsys):
    assert main([f"store.path={tmp_path}"]) == 2
    assert "there is no activation store" in capsys.readouterr().err


def test_the_command_runs_in_a_process(real_store):
    done = run(f"store.path={real_store}", "inspect.tokens=512", module="pipeline.inspect")
    assert done.returncode == 0, done.stderr
    assert "blocks.2.resid_post" in done.stdout


def test_settings_are_parsed():
    given = ["store.path='/a b'", "inspect.html=p", "inspect.tokens=5", "inspect.seed=0", "inspect.tokenizer=t"]
    assert parse(Settings, given) == Settings("/a b", "p", 5, 0, "t")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "store.path is missing"),
        (["store.path="], "store.path has no value"),
        (["store.path=a", "inspect.htm=b"], "'inspect.htm=b' is not a setting"),
        (["store.path=a", "inspect.tokens=0"], "inspect.tokens=0"),
        (["store.path=a", "inspect.seed=-1"], "inspect.seed=-1"),
        (["store.path=a", "inspect.tokens=1e3"], "inspect.tokens=1e3"),
    ],
)
def test_wrong_settings_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        parse(Settings, arguments)


def test_a_remote_store_is_shown(gcs, tmp_path, capsys):
    path = f"{new_bucket('gs', gcs.backend)}/store"
    write_store(path)
    assert main([f"store.path={path}", f"inspect.html={tmp_path / 'page.html'}"]) == 0
    assert f"{stored_tokens():,} in " in capsys.readouterr().out
    Page((tmp_path / "page.html").read_text())
