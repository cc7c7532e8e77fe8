"""If hosts of one job have different files, all processes end with one message and none waits for the others."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from pipeline.config import composing
from tests.hub import Hub, contents
from tests.jobs import ROOT, command, free_port, write_text

pytestmark = pytest.mark.heavy
ASSETS = composing.PACKAGE / "assets" / "tiny-qwen2"
LIMIT_S = 300


@pytest.fixture
def server() -> Iterator[Hub]:
    with Hub().serving() as server:
        server.push("models/owner/tiny", contents(ASSETS))
        yield server


def run_on_hosts(folders: list[Path], environment: Mapping[str, str], *overrides: str) -> list[tuple[int, str]]:
    """Exit code and output of each process of a job. Each runs in its folder, which has the Hub's cache."""
    joined = [f"distributed.coordinator=localhost:{free_port()}", f"distributed.num_processes={len(folders)}"]
    common = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", **environment}
    processes = [
        subprocess.Popen(
            command(*overrides, *joined, f"distributed.process_id={number}"),
            cwd=folder,
            env=os.environ | common | {"HF_HOME": str(folder / "hf")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number, folder in enumerate(folders)
    ]
    try:
        outputs = [process.communicate(timeout=LIMIT_S)[0] for process in processes]
        return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_a_directory_that_only_one_host_has_ends_every_process(server: Hub, tmp_path: Path) -> None:
    text = write_text(tmp_path / "text", files=2, documents=4)
    hosts = [tmp_path / "host0", tmp_path / "host1"]
    for folder in hosts:
        folder.mkdir()
    shutil.copytree(ASSETS, hosts[1] / "owner" / "tiny")
    job = [f"data.path={text}", "model.path=owner/tiny", f"store.path={tmp_path / 'store'}"]
    for code, output in run_on_hosts(hosts, {"HF_ENDPOINT": server.url}, *job):
        assert code == 2, output
        assert "model.path=owner/tiny is a local directory on some hosts of this job" in output
