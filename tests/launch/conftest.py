"""Runs launch scripts with stand-ins for all commands that would reach other machines; calls are recorded."""

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.jobs import ROOT

HERE = Path(__file__).parent
COMMANDS = ("gcloud", "kubectl", "docker", "srun", "scontrol", "python")
JOB = "gs://my-bucket/launch/qwen-fineweb"


@dataclass
class Recorded:
    """A folder with the recorded calls, the responses to give, and the buckets."""

    path: Path
    environment: dict[str, str]

    def answer(self, what: str, *lines: object) -> None:
        (self.path / what).write_text("".join(f"{line}\n" for line in lines))

    def object(self, url: str) -> Path:
        return self.path / "buckets" / url.removeprefix("gs://")

    def exit_code_object(self) -> Path:
        """The object for the exit code of the last uploaded job."""
        return self.object(f"{JOB}/exit-codes/{self.object(f'{JOB}/run-id').read_text().strip()}")

    def start(self, *command: str | Path, **environment: str) -> subprocess.Popen:
        return subprocess.Popen(
            ["bash", *command],
            cwd=ROOT,
            env=self.environment | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *command: str | Path, **environment: str) -> subprocess.CompletedProcess:
        with self.start(*command, **environment) as process:
            output, errors = process.communicate(timeout=60)
        return subprocess.CompletedProcess(command, process.returncode, output, errors)

    def commands(self) -> list[str]:
        """The recorded calls, with host names and job ids replaced."""
        file = self.path / "commands"
        text = file.read_text() if file.exists() else ""
        text = text.replace(f"{self.path}/build", "BUILD").replace(f"/{os.uname().nodename}.log", "/HOST.log")
        return re.sub(r"/exit-codes/\S+", "/exit-codes/ID", text).splitlines()


@pytest.fixture
def recorded(tmp_path) -> Recorded:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in COMMANDS:
        (programs / name).symlink_to(HERE / "recorder.sh")
    (tmp_path / "buckets/my-bucket/launch/qwen-fineweb").mkdir(parents=True)
    environment = os.environ | {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "RECORD": str(tmp_path),
        "BUILD": str(tmp_path / "build"),
        "JOB_NAME": "qwen-fineweb",
        "PYTHON": "python",
        "TPU_ENV": "launch/tpu.env.example",
        "POLL_S": "0",
    }
    return Recorded(tmp_path, environment)
