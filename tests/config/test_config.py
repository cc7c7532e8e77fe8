"""Composing a configuration: defaults, texts as they were typed, and a message for every wrong value."""

import re
import sys
from dataclasses import replace
from enum import Enum
from pathlib import Path

import pytest

from pipeline.cli import main
from pipeline.config import schema
from pipeline.config.choices import ComputeDtype
from pipeline.config.composing import PACKAGE, compose, from_values
from pipeline.config.schema import ParquetData, RunConfig
from pipeline.core.errors import ConfigError
from scripts.docs import config_table

SECRET = "hunter2"


def jobs_of(monkeypatch, *arguments: str) -> list[RunConfig]:
    """The configurations that a command gets from the command line."""
    jobs: list[RunConfig] = []
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # main sets it for the process, which other tests share
    monkeypatch.setattr(sys, "argv", ["run", *arguments])
    main.main(jobs.append, "")
    return jobs


def test_the_document_of_keys_is_up_to_date():
    assert config_table.FILE.read_text() == config_table.document()


def test_every_key_has_a_doc_with_its_choices():
    for key, field in schema.all_fields():
        doc = field.metadata["doc"]
        assert doc, key
        if isinstance(field.type, type) and issubclass(field.type, Enum):
            assert [str(choice) for choice in field.type if f"`{choice}`" not in doc] == [], key


def test_the_default_job_is_the_schemas_with_the_files_changes():
    text = ParquetData(path="build/demo/text")
    assert compose([]) == RunConfig(
        model=schema.ModelConfig(path=str(PACKAGE / "assets" / "tiny-qwen2"), dtype=ComputeDtype.float32),
        data=text,
        capture=schema.CaptureConfig(layers=[2, 4]),
        store=schema.StoreConfig(path="build/demo/stores/default"),
    )
    edu = compose(["data=fineweb_edu"]).data
    assert edu == replace(text, path="hf://datasets/HuggingFaceFW/fineweb-edu/sample/10BT")


@pytest.mark.parametrize(
    ("key", "url"),
    [
        ("data.path", f"https://somebody:{SECRET}@example.org/texts"),
        ("data.path", f"https://example.org/a.parquet?X-Amz-Date=1&X-Amz-Signature={SECRET}"),
        ("model.path", f"https://example.org/model?sv=1&sig={SECRET}"),
        ("store.path", f"gs://bucket/store?auth={SECRET}"),
        ("store.path", f"s3://somebody:{SECRET}@bucket/store"),
    ],
)
def test_credentials_in_a_url_are_refused_and_not_repeated(key, url):
    with pytest.raises(ConfigError, match=f"{key} has a URL with credentials") as caught:
        compose(["data=fineweb", f'{key}="{url}"'])
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "path", ["hf://datasets/owner/name@refs%2Fpr%2F1/data", "gs://bucket/a b", "/home/me@work/key=3/a.parquet"]
)
def test_other_paths_are_used_unchanged(path):
    assert compose(["data=fineweb", f'data.path="{path}"']).data.path == path


def test_null_is_no_text():
    assert compose(["model.tokenizer=null"]).model.tokenizer is None
    assert compose(["model.tokenizer='null'"]).model.tokenizer == "null"


def test_a_number_is_refused_where_text_is_expected(monkeypatch, tmp_path: Path, caplog):
    file = tmp_path / "experiment" / "mine.yaml"
    file.parent.mkdir()
    file.write_text("# @package _global_\nstore:\n  path: 2026_11_25\n")
    with pytest.raises(SystemExit, match="2"):
        jobs_of(monkeypatch, "--config-dir", str(tmp_path), "+experiment=mine")
    assert re.search("store.path is .* looks like a number needs quotes", caplog.text)
    file.write_text("# @package _global_\nstore:\n  path: '2026_11_25'\n")
    [job] = jobs_of(monkeypatch, "--config-dir", str(tmp_path), "+experiment=mine")
    assert job.store.path == "2026_11_25"
    for text in ("2026_11_25", "12e4567", "true"):
        with pytest.raises(ConfigError, match="store.path is .*quotes"):
            compose([f"store.path={text}"])
        assert compose([f"store.path='{text}'"]).store.path == text
    required = {"data.path": "a", "model.path": "a/b", "capture.layers": [0], "store.path": str(tmp_path)}
    for value in (2024_10, 1.5, True, [1]):
        with pytest.raises(ConfigError, match="model.revision is .*quotes"):
            from_values(ParquetData, required | {"model.revision": value})


def test_whole_numbers_may_be_written_with_an_exponent():
    assert [compose([f"run.max_tokens={text}"]).run.max_tokens for text in ("1.5e3", "1_000", "1e18")] == [
        1500,
        1000,
        10**18,
    ]


NUMBER = "Set it to a whole number of at least 1 and at most 1,000,"
PATH = "Set it to a folder that exists or can be created"
UNKNOWN = "is not a key of the configuration"
REFUSED = {
    # limits of numbers
    "run.max_tokens=0": f"run.max_tokens is 0. {NUMBER}.*, or to null",
    "run.max_tokens=1e20": f"run.max_tokens is 100000000000000000000. {NUMBER}",
    "run.max_tokens=1.5": f"run.max_tokens is 1.5. {NUMBER}",
    "batch.rows=10k": f"batch.rows is '10k'. {NUMBER}",
    "batch.rows=true": f"batch.rows is True. {NUMBER}",
    "run.stall_timeout_s=0": "run.stall_timeout_s is 0.0. Set it to a number of at least 1",
    "run.stall_timeout_s=nan": "run.stall_timeout_s is nan. Set it to a number",
    "run.max_inflight_mib=inf": "run.max_inflight_mib is inf. Set it to a number of more than 0",
    "data=generate data@data.prompts=fineweb data.path=x data.temperature=1e-9": "Set it to a number: 0",
    "capture.rate=1": "capture.rate is 1.0. Set it to a number of more than 0 and less than 1",
    # paths, addresses and texts
    "run.profile=gs://bucket/trace": "run.profile is 'gs://bucket/trace'. Set it to a local folder",
    "run.compilation_cache=FILE": f"run.compilation_cache is '.*. {PATH}",
    "store.path=FILE/below": f"store.path is .*{PATH}",
    "store.path=''": f"store.path is ''. {PATH}",
    "store.path='~nosuchuser/x'": "store's path is '~nosuchuser/x', but there is no such user",
    "store.path=LONG": r"store.path is 'a+\.\.\.a+'. Set it to",
    "data.path=DEEP": "data.path is 'a/a/.*Set it to a non-empty path or URL",
    "distributed.coordinator='host:99999'": "coordinator is 'host:99999'. Set it to host:port, with a port from 1 to",
    "distributed.coordinator='http://host:1'": "distributed.coordinator is 'http://host:1'. Set it to host:port",
    "topology=''": "topology is ''. Set it to a non-empty string, or to null",
    "data=arc data.path=x data.date=2026-7-1": "data.date is '2026-7-1'. Set it to a date, as in 2026-07-01, or to",
    "data=hf data.path=json data.data_files={a:true}": "data.data_files is .*. Set it to a non-empty string, or a",
    "capture.sites=resid_post": r"capture.sites is 'resid_post'. Set it to a list of strings, as in \[a,b\]",
    "data=hf data.path=x data.info_columns=${batch.rows}": "data.info_columns is 8. Set it to a list of strings",
    "capture.dtype=float99": "capture.dtype is 'float99'. Set it to one of float32, bfloat16",
    "capture=${batch.rows}": "capture is 8. Set it to a group of keys",
    "run=3": "run is 3. Set it to a group of keys",
    "run.max_tokens=${nothing.here}": "run.max_tokens has no value: Interpolation key 'nothing.here' not found",
    "run.lease_s=${run.lease_s}": "run.lease_s has no value: Recursive interpolation",
    # keys and choices
    "+run.foo=1": f"run.foo {UNKNOWN}",
    "++run.max_token=1": f"run.max_token {UNKNOWN}. Did you mean run.max_tokens",
    "+foo={a: 1}": f"foo {UNKNOWN}",
    "data.prompts=3": f"data.prompts {UNKNOWN}. It belongs to another choice of data",
    "++run.token_budget=1": f"run.token_budget {UNKNOWN}. --cfg job prints all keys",
    "~run.exclusive": "no value for run.exclusive, which was deleted. Set it to its default",
    "++data.source=none": "data is .*, expected a source of documents. Choose one, e.g. data=fineweb",
    "data=generate": r"no value for data.path. Set it on the command line, e.g. data.path=\.\.\.$",
    "data=[1]": r"data=\[1\].* Correct the command line",
    "data=3": "data=3.* Correct the command line",
    "data=nothing": "data=nothing is not one of ai2_arc, arc, demo, fineweb, fineweb_edu, generate, hf. "
    "For JSON, CSV or text: data=hf data.path=json data.data_files=FILE.$",
    "model=gpt3": r"model=gpt3 is not one of bert_base, .*tiny. For any checkpoint.*: model.path=owner/name.$",
    "+experiment=nope": r"experiment=nope is not one of demo_arc, [a-z_, ]*\.$",
    # what Hydra cannot parse
    "capture.layers=[2,": r"A list with spaces needs quotes for the shell: 'capture.layers=\[2, 3\]'.",
    "data.text={{ body }}": """needs quotes within quotes: 'data.text="{{ body }}"'. Correct the command line""",
    "data.path=/a, b": "A string with special characters needs quotes",
    "mine.jsonl": "missing EQUAL at '<EOF>'. .* Correct the command line",
    "run.max_tokens=10,000": "A string with special characters needs quotes",
}


@pytest.mark.parametrize(("override", "message"), REFUSED.items(), ids=REFUSED)
def test_a_wrong_value_is_refused_with_the_allowed_ones(tmp_path, override, message):
    file = tmp_path / "file"
    file.touch()
    for name, value in {"FILE": file, "LONG": "a" * 300, "DEEP": "a/" * 2000}.items():
        override = override.replace(name, str(value))
    with pytest.raises(ConfigError, match=message):
        compose(override.split(" ") if override.startswith("data=") else [override])


@pytest.mark.parametrize(
    "override",
    [
        *("run.max_tokens=1", "model.init=random model.seed=-5", "batch.rows=1e1"),
        *("distributed.coordinator='[::1]:1234'", "distributed.coordinator=host-1.example.org:8476"),
        "store.path=gs://bucket/store store.retry_delay_s=0 run.exclusive=1",
        *("run.compilation_cache=gs://bucket/cache", "topology=v5e-4 plan.mfu=1", "data.path=a/*.x"),
    ],
)
def test_values_at_their_limits_are_accepted(override):
    compose(override.split(" "))


@pytest.mark.parametrize("value", ["2", "-1", "2.5", "maybe", "nan"])
def test_a_bool_must_be_true_or_false(value):
    with pytest.raises(ConfigError, match=rf"run.exclusive is '?{value}'?. Set it to true or false"):
        compose([f"run.exclusive={value}"])
