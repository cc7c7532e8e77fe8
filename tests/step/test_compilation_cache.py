"""Compiled programs that one process leaves to the next."""

import os
import sys

import pytest

from pipeline.core.errors import ConfigError
from pipeline.step.compiler import use_compilation_cache
from tests.jobs import run_program, write_text
from tests.store.emulators import gcs_emulator, new_bucket

pytestmark = pytest.mark.heavy
# Runs a job, then prints how many programs JAX requested from the compilation cache and how many it found: the step,
# and an empty program that asks whether XLA knows an option.
REPORTING_RUN = """
import collections, sys
import jax
from pipeline.job import running
from pipeline.config import composing

seen = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: seen.update([event.rsplit("/", 1)[-1]]))
running.run(composing.compose(sys.argv[1:]))
print("programs:", seen["compile_requests_use_cache"], seen["cache_hits"])
"""


@pytest.fixture(scope="module")
def overrides(tmp_path_factory) -> list[str]:
    text = write_text(tmp_path_factory.mktemp("text"), files=2, documents=10)
    return [
        f"data.path={text}",
        "run.progress=false",
        "batch.rows=4",
        "batch.length=64",
        "capture.layers=[1]",
        "run.max_tokens=1000",
    ]


def programs(*overrides: str, **environment: str) -> str:
    """The numbers of programs that a run requested from the cache and found in it."""
    result = run_program(REPORTING_RUN, *overrides, env=os.environ | environment)
    assert result.returncode == 0, result.stderr
    return result.stdout.split("programs: ")[1].strip()


def test_a_run_compiles_only_its_step_and_a_second_run_finds_it_in_a_bucket(overrides, tmp_path):
    pytest.importorskip("etils.epath")
    with gcs_emulator() as address:
        cached = [*overrides, f"run.compilation_cache={new_bucket('gs', address)}/cache"]
        emulated = {"STORAGE_EMULATOR_HOST": f"http://{address}", "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
        assert programs(*cached, f"store.path={tmp_path / 'first'}", **emulated) == "2 0"
        assert programs(*cached, f"store.path={tmp_path / 'second'}", **emulated) == "2 2"


def test_a_bucket_url_is_refused_without_epath(tmp_path, monkeypatch):
    """An empty package `etils`, first on the path, hides the installed one."""
    (tmp_path / "etils").mkdir()
    (tmp_path / "etils/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "etils"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ConfigError, match=r"Install etils\[epath\]"):
        use_compilation_cache("gs://bucket/cache")


@pytest.mark.parametrize("path", ["://", "://x", "http://x/cache", "nope://x"])
def test_other_urls_are_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="neither a local directory nor a gs:// or s3:// URL"):
        use_compilation_cache(path)
