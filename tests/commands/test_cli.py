"""Exit codes and messages of the command line, in separate processes."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import hydra
import jax
import pytest

from pipeline import run as pipeline_run
from pipeline.cli import main
from pipeline.config import composing
from pipeline.core.errors import PipelineError, StoreMismatch
from pipeline.store.check.verifying import verify_store
from tests.jobs import assert_same_store, committed, objects, run_here, run_program, write_text

pytestmark = pytest.mark.heavy
TINY = composing.PACKAGE / "assets" / "tiny-qwen2"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"), files=2, documents=30)


def base(text, store) -> list[str]:
    return [f"data.path={text}", f"store.path={store}", "batch.rows=4", "batch.length=64", "store.shard_mib=0.25"]


def damaged_model(tmp_path: Path, name: str) -> Path:
    """A copy of the bundled checkpoint with one defect."""
    model = tmp_path / "model"
    shutil.copytree(TINY, model)
    weights = model / "model.safetensors"
    match name:
        case "missing weights":
            weights.unlink()
        case "missing config":
            (model / "config.json").unlink()
        case "truncated weights":
            weights.write_bytes(weights.read_bytes()[:-1000])
        case "garbled header":
            weights.write_bytes(b"\x10\0\0\0\0\0\0\0" + b"not json at all!" + weights.read_bytes())
        case "missing tokenizer":
            (model / "tokenizer.json").unlink()
        case "smaller vocabulary than the tokenizer's":
            config = json.loads((model / "config.json").read_text())
            (model / "config.json").write_text(json.dumps(config | {"vocab_size": 100}))
    return model


DAMAGES = {
    "missing weights": "safetensors",
    "missing config": "config.json",
    "truncated weights": "model.safetensors",
    "garbled header": "model.safetensors",
    "missing tokenizer": "tokenizer.json",
}
WRONG_VALUES = {
    "capture.dtype=float99": "float99",
    "model.path=no/such/model": "no/such/model",
    "nonsense=1": "nonsense",
    "batch.rows=three": "batch.rows is 'three'. Set it to a whole number of at least 1",
    "data=3": "Correct the command line",
    "+run.foo=1": "run.foo is not a key of the configuration",
    "data.path=/no/such/place": "/no/such/place",
    "store.path=/dev/null/store": "store.path is '/dev/null/store",
}
WRONG_CHOICES = {  # of layers and sites: refused once the model and the devices are known
    "capture.layers=[99]": "layers 0..5",
    "capture.sites=[resid_past]": "resid_post",
}
COMMAND_LINES = """
import json, os, sys
import jax
from pipeline.cli.main import main
from pipeline.job.running import join_and_run

for platforms, overrides in json.loads(sys.argv[1]):
    jax.config.update("jax_platforms", platforms)
    sys.argv[1:] = overrides
    os.environ.pop("HYDRA_FULL_ERROR", None)  # set by the command
    try:
        main(join_and_run, "")
    except SystemExit as end:
        print("exit code", end.code, file=sys.stderr)
    print("next command line", file=sys.stderr)
"""


@pytest.fixture(scope="module")
def refused(text, tmp_path_factory) -> dict[str, tuple[Path, str]]:
    """The store's path and the messages of each wrong command line. One process runs them all.

    JAX has no devices until the last ones, so a command that looks for devices before it refuses fails otherwise.
    """
    folders = {name: tmp_path_factory.mktemp("refused") for name in (*DAMAGES, *WRONG_VALUES, *WRONG_CHOICES)}
    wrong = {name: f"model.path={damaged_model(folders[name], name)}" for name in DAMAGES}
    wrong |= {override: override for override in (*WRONG_VALUES, *WRONG_CHOICES)}
    lines = [
        ("cpu" if name in WRONG_CHOICES else "none-such", [*base(text, folders[name] / "store"), override])
        for name, override in wrong.items()
    ]
    done = run_program(COMMAND_LINES, json.dumps(lines))
    assert done.returncode == 0, done.stderr
    *said, end = done.stderr.split("next command line\n")
    assert not end
    return {name: (folders[name] / "store", each) for name, each in zip(wrong, said, strict=True)}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.items())
def test_a_damaged_model_gives_exit_code_2_and_names_the_file(refused, damage, message):
    store, said = refused[damage]
    assert said.endswith("exit code 2\n"), said
    assert message in said
    assert "Traceback" not in said
    assert not store.exists()


def test_a_token_outside_the_vocabulary_is_reported_with_its_document(text, tmp_path):
    model = damaged_model(tmp_path, "smaller vocabulary than the tokenizer's")
    with pytest.raises(PipelineError, match=r"000\.parquet.*100") as caught:
        run_here(*base(text, tmp_path / "store"), f"model.path={model}", "model.init=random")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(("override", "message"), (WRONG_VALUES | WRONG_CHOICES).items())
def test_a_wrong_value_gives_exit_code_2_and_is_named(refused, override, message):
    _, said = refused[override]
    assert said.endswith("exit code 2\n"), said
    assert message in said
    assert "Traceback" not in said


def test_a_bad_file_ends_the_run_after_the_blocks_before_it(text, tmp_path, compilation_cache):
    """A truncated file gives exit code 2. Blocks before it stay, and a run that skips it continues from them."""
    broken = tmp_path / "text"
    shutil.copytree(text, broken)
    whole = (broken / "001.parquet").read_bytes()
    (broken / "001.parquet").write_bytes(whole[: len(whole) // 2])
    store = tmp_path / "store"
    with pytest.raises(PipelineError, match=r"001\.parquet.*data\.on_error=skip") as caught:
        run_here(*base(broken, store), compilation_cache)
    assert caught.value.exit_code == 2
    blocks = committed(store)
    run_here(*base(broken, store), compilation_cache, "data.on_error=skip")
    assert committed(store) >= blocks
    assert verify_store(str(store)) == []
    records = [json.loads(file.read_text()) for file in store.glob("_commits/*/*.json")]
    assert [skip["source"] for record in records for skip in record["skipped"]] == ["001.parquet"]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MiB, for more blocks of 1 MiB than may be written at the same time."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = (
        os.geteuid() == 0
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], capture_output=True
        ).returncode
    )
    if not mounted:
        pytest.skip("mounting a tmpfs needs root")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_run_resumes_after_the_disk_was_full(text, tmp_path, small_disk, compilation_cache):
    job = [*base(text, small_disk / "store"), "capture.layers=[0,1]", "capture.sites=[resid_post,attn_out]"]
    job += ["run.max_tokens=12000"]
    with pytest.raises(PipelineError, match=r"No space left.*resume") as caught:
        run_here(*job, compilation_cache)
    assert caught.value.exit_code == 1
    committed = {key: value for key, value in objects(small_disk / "store").items() if key.startswith("_commits")}
    assert committed, "some blocks were stored before the disk was full"

    subprocess.run(["mount", "-o", "remount,size=200m", str(small_disk)], check=True)
    run_here(*job, compilation_cache)
    run_here(*job, compilation_cache, f"store.path={tmp_path / 'reference'}")
    assert_same_store(small_disk / "store", tmp_path / "reference")


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("--cfg=job", [f"\n{group}:" for group in ("data", "batch", "capture", "store", "mesh", "run")]),
        ("--help", ["Exit codes: 0", "python -m pipeline.run", "stall_timeout_s: 600.0"]),
    ],
)
def test_the_configuration_and_the_help_are_printed(option, expected, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["run", option])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # main sets it for the process, which other tests share
    with suppress(SystemExit):
        main.main(lambda _config: pytest.fail("a job was started"), pipeline_run.__doc__)
    printed = capsys.readouterr().out
    assert [text for text in expected if text not in printed] == []


def run_alone(task) -> int:
    composing.prepare()
    with hydra.initialize_config_dir(str(composing.CONFIGS), version_base="1.3"):
        return main.run_task(task, hydra.compose("config", []))


def test_an_error_that_replaces_another_is_reported_alone(caplog):
    def task(_config) -> None:
        try:
            raise StoreMismatch("first")
        except StoreMismatch:
            raise StoreMismatch("second") from None

    assert run_alone(task) == 2
    assert caplog.messages == ["StoreMismatch: second"]


def test_exhausted_device_memory_is_reported_with_a_remedy(caplog):
    def task(_config) -> None:
        jax.numpy.zeros(1 << 48).block_until_ready()  # 1 PiB

    assert run_alone(task) == 1
    [message] = caplog.messages
    assert "does not fit in the memory of a device" in message
    assert "batch.rows" in message
