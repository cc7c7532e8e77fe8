"""The text of a key is what was typed, whatever Hydra or YAML would make of it; counts may be written as numbers."""

import re
import sys
from pathlib import Path

import pytest

from pipeline.cli import main
from pipeline.config.composing import compose, from_values
from pipeline.config.schema import ParquetData, RunConfig
from pipeline.core.errors import ConfigError

TEXTS = [
    *("2026_11_25", "2024_10", "1_000", "20261125", "007", "0x10", "0o17", "12e4567", "1e5", "1E5", "1.50", "1.", ".5"),
    *("-5", "+5", "1_0.5", "inf", "-inf", "nan", "NaN", "true", "True", "FALSE", "on", "off", "yes", "no", "v1.0"),
    *("2024-10-01", "1:30", "1:30:00", "3.10", "1e", "12345678901234567890", "nullable", "5/6", "a b", "9" * 100),
]
DATA = {"hf": ["data=hf", "data.path=x"], "arc": ["data=arc"], "generate": ["data=generate", "data.path=x"]}


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_what_was_typed(text):
    hub = compose([f"store.path={text}", "model.path=owner/name", f"model.revision= {text} ", f"++data.path={text}"])
    assert (hub.store.path, hub.model.revision, hub.data.path) == (text, text, text)
    hf = compose([*DATA["hf"], f"data.info_columns=[a,{text}]", f"data.data_files=[{text}, {text}]"]).data
    assert (hf.info_columns, hf.data_files) == (["a", text], [text, text])
    assert compose([*DATA["hf"], f"data.data_files={text}"]).data.data_files == text
    assert compose([f"capture.encode={{a: {text}, b: [{text}]}}"]).capture.encode == {"a": text, "b": [text]}
    prompts = compose([*DATA["generate"], f"data.end_tokens=[{text}]", f"data.prompts.encoder={text}"]).data
    assert (prompts.end_tokens, prompts.prompts.encoder) == ([text], text)


def jobs_of(monkeypatch, *arguments: str) -> list[RunConfig]:
    jobs: list[RunConfig] = []
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # main sets it for the process, which other tests share
    monkeypatch.setattr(sys, "argv", ["run", *arguments])
    main.main(jobs.append, "")
    return jobs


def test_a_sweep_keeps_text(monkeypatch, tmp_path):
    jobs = jobs_of(monkeypatch, "-m", "store.path=2024_10,1e5 , true", f"hydra.sweep.dir={tmp_path}")
    assert [job.store.path for job in jobs] == ["2024_10", "1e5", "true"]


def test_a_number_in_a_file_is_refused_where_text_is_expected(monkeypatch, tmp_path: Path, caplog):
    file = tmp_path / "experiment" / "mine.yaml"
    file.parent.mkdir()
    for path in ("2026_11_25", "12e4567", "1.50", "true", "0x10"):
        file.write_text(f"# @package _global_\nstore:\n  path: {path}\n")
        caplog.clear()
        with pytest.raises(SystemExit, match="2"):
            jobs_of(monkeypatch, "--config-dir", str(tmp_path), "+experiment=mine")
        assert re.search("store.path is .* looks like a number needs quotes", caplog.text)
        file.write_text(f"# @package _global_\nstore:\n  path: '{path}'\n")
        [job] = jobs_of(monkeypatch, "--config-dir", str(tmp_path), "+experiment=mine")
        assert job.store.path == path


def test_null_is_no_text():
    assert compose(["data.path=null", "model.revision=null"]).data.path is None
    assert compose(["model.path=a/b", "model.revision='null'"]).model.revision == "null"


def test_a_number_is_no_text_in_python(tmp_path):
    required = {"data.source": "parquet", "data.repo": "none", "data.subset": "none", "model.path": "a/b"}
    required |= {"capture.layers": [0], "store.path": str(tmp_path)}
    for value in (2024_10, 1.5, True, [1]):
        with pytest.raises(ConfigError, match="model.revision is .*quotes"):
            from_values(ParquetData, required | {"model.revision": value})


@pytest.mark.parametrize(
    ("typed", "tokens"),
    [
        *(("1e9", 10**9), ("1E9", 10**9), ("1.5e3", 1500), ("1_000_000", 10**6), ("1e18", 10**18), ("2.0", 2)),
        *(("1B", 10**9), ("1b", 10**9), ("500M", 5 * 10**8), ("10k", 10_000), ("10K", 10_000), ("1.5B", 15 * 10**8)),
        *(("0.3M", 300_000), ("2T", 2 * 10**12)),
    ],
)
def test_tokens_may_be_counted_in_thousands(typed, tokens):
    assert compose([f"run.max_tokens={typed}"]).run.max_tokens == tokens


def test_every_count_may_be_written_as_a_power():
    assert compose(["batch.rows=1e1", "capture.layers=[0]"]).batch.rows == 10


@pytest.mark.parametrize(
    "override", ["run.max_tokens=1.5", "run.max_tokens=1e-3", "run.max_tokens=1X", "run.max_tokens=0.0001k"]
)
def test_other_counts_are_refused(override):
    with pytest.raises(ConfigError, match="run.max_tokens to a whole number|run.max_tokens is 0"):
        compose([override])
