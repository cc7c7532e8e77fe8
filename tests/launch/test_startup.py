"""launch/startup.sh on a worker, with a recorded job that returns given exit codes, and slowly with the real job."""

import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from tests.hub import contents
from tests.jobs import ROOT, committed, write_text
from tests.launch.conftest import HERE, JOB, Recorded

pytestmark = pytest.mark.heavy


@pytest.fixture
def worker(recorded: Recorded, tmp_path) -> Recorded:
    """A worker with an uploaded job and a virtual environment whose Python is recorded."""
    assert recorded.run("launch/tpu.sh", "create", "capture.layers=[1, 3]").returncode == 0
    (recorded.path / "commands").unlink()
    python = tmp_path / "work/venv/bin/python"
    python.parent.mkdir(parents=True)
    (tmp_path / "work/venv/complete").touch()
    for program in (python, tmp_path / "bin/python3.11"):
        program.symlink_to(HERE / "recorder.sh")
    recorded.environment |= {
        "WORK": str(tmp_path / "work"),
        "HUGEPAGES": str(tmp_path / "hugepages"),
        "RETRY_DELAY_S": "0",
        "HF_TOKEN": "",
    }
    return recorded


def startup(worker: Recorded) -> Path:
    return worker.object(f"{JOB}/files/startup.sh")


def jobs(worker: Recorded) -> list[str]:
    return [command for command in worker.commands() if "pipeline.run" in command]


def verdict(worker: Recorded) -> str | None:
    file = worker.exit_code_object()
    return file.read_text().strip() if file.exists() else None


@pytest.mark.parametrize(
    ("codes", "runs", "ends_with", "steady_s"),
    [
        ([0], 1, "0", "3600"),
        ([2, 0], 1, "2", "3600"),
        ([42, 42, 42, 42, 0], 5, "0", "3600"),
        ([1, 42, 137, 0], 4, "0", "3600"),
        ([1, 1, 1, 0], 3, "1", "3600"),
        ([1, 1, 1, 0], 4, "0", "0"),
    ],
)
def test_exit_codes_restart_the_job_or_end_it(worker: Recorded, codes, runs, ends_with, steady_s):
    worker.answer("job", *codes)
    result = worker.run(startup(worker), MAX_FAILURES="3", STEADY_S=steady_s)
    assert len(jobs(worker)) == runs
    assert verdict(worker) == ends_with
    assert result.returncode == int(ends_with)
    assert list(worker.object(f"{JOB}/logs").glob("*.log"))


def test_the_commands_of_a_worker_equal_the_reviewed_ones(worker: Recorded):
    worker.answer("job", 0)
    worker.run(startup(worker))
    assert worker.commands() == (HERE / "expected/startup.txt").read_text().splitlines()
    assert (worker.path / "hugepages").read_text() == "always\n"


@pytest.mark.parametrize("code", ["0", "2"])
def test_the_exit_code_of_another_worker_ends_this_one(worker: Recorded, code):
    worker.exit_code_object().parent.mkdir()
    worker.exit_code_object().write_text(f"{code}\n")
    assert worker.run(startup(worker)).returncode == int(code)
    assert jobs(worker) == []


def test_an_installation_that_fails_or_was_cut_off_is_repeated(worker: Recorded):
    (worker.path / "work/venv/complete").unlink()
    (worker.path / "work/venv/bin/python").unlink()
    (worker.path / "work/venv/bin/python").symlink_to("/bin/false")  # it has no pip yet
    worker.answer("install", 1, 0, 2, 0, 0)
    worker.answer("job", 0)
    assert worker.run(startup(worker)).returncode == 0
    assert len(jobs(worker)) == 1
    assert worker.commands().count("python3.11 -m venv venv") == 2


def test_failures_in_a_row_are_repeated_ever_later_and_the_exit_code_until_it_is_written(worker: Recorded):
    (worker.path / "bin/sleep").symlink_to(HERE / "recorder.sh")
    worker.answer("job", 1, 42, 1, 0)
    worker.answer("put", 0, 0, 0, 0, 1, 0)  # four logs
    assert worker.run(startup(worker), RETRY_DELAY_S="30").returncode == 0
    assert verdict(worker) == "0"
    sleeps = [command for command in worker.commands() if command.startswith("sleep")]
    assert sleeps == ["sleep 30", "sleep 30", "sleep 60", "sleep 30"]


def test_a_full_disk_does_not_keep_a_worker_from_ending_the_job(worker: Recorded):
    (worker.path / "work/log").write_bytes(bytes(1 << 16))
    worker.answer("job", 1, 0)
    limited = 'trap "" XFSZ; ulimit -f 64; exec bash "$0"'
    assert worker.run("-c", limited, startup(worker)).returncode == 0
    assert verdict(worker) == "0"


def test_a_token_is_only_in_the_environment(worker: Recorded):
    worker.answer("job", 0)
    script = startup(worker)
    script.write_text(script.read_text().replace("HF_TOKEN_SECRET=''", "HF_TOKEN_SECRET=my-secret"))
    assert worker.run(script).returncode == 0
    assert (worker.path / "token").read_text() == "hf_secret\n"
    assert "--secret=my-secret" in "".join(worker.commands())
    assert "hf_secret" not in "".join(worker.commands())
    assert "hf_secret" not in (worker.path / "work/log").read_text()


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < deadline, f"no {file}"
        time.sleep(0.02)
    file.unlink()


def test_sigterm_reaches_the_job_and_leaves_no_exit_code(worker: Recorded):
    worker.answer("job", "wait", 0)
    process = worker.start(startup(worker))
    wait_for(worker.path / "waiting")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 42
    assert len(jobs(worker)) == 1
    assert verdict(worker) is None


def test_a_second_start_ends_the_first(worker: Recorded):
    worker.answer("job", "wait", 0)
    first = worker.start(startup(worker))
    wait_for(worker.path / "waiting")
    assert worker.run(startup(worker)).returncode == 0
    first.communicate(timeout=60)
    assert first.returncode == 42
    assert verdict(worker) == "0"


def test_the_exit_code_of_a_job_does_not_end_the_next(worker: Recorded):
    worker.answer("job", "released 0", 2)
    first = worker.start(startup(worker))
    wait_for(worker.path / "waiting")
    assert worker.run("launch/tpu.sh", "create").returncode == 0
    (worker.path / "released").touch()
    first.communicate(timeout=60)
    assert first.returncode == 0
    worker.answer("request", "ACTIVE")
    worker.answer("slice", "READY")
    assert "job       not ended" in worker.run("launch/tpu.sh", "status").stdout
    assert worker.run(startup(worker)).returncode == 2
    assert verdict(worker) == "2"


def test_a_job_without_an_id_is_not_run(worker: Recorded):
    worker.object(f"{JOB}/run-id").unlink()
    assert worker.run(startup(worker), MAX_FAILURES="2").returncode == 1
    assert jobs(worker) == []


def test_the_wheel_has_every_file_of_the_package(tmp_path):
    source = tmp_path / "source"
    for name in ("pipeline", "configs"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = "import sys; from setuptools.build_meta import build_wheel; print(build_wheel(sys.argv[1]))"
    result = subprocess.run([sys.executable, "-c", build, tmp_path], cwd=source, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    with zipfile.ZipFile(tmp_path / result.stdout.splitlines()[-1]) as wheel:
        packed = {name: wheel.read(name) for name in wheel.namelist() if ".dist-info/" not in name}
    modules, configs = contents(source / "pipeline"), contents(source / "configs")
    assert packed == {
        **{f"pipeline/{name}": content for name, content in modules.items()},
        **{f"pipeline/configs/{name}": content for name, content in configs.items()},
    }


@pytest.mark.slow
def test_a_clean_machine_ends_with_a_finished_store(recorded: Recorded, tmp_path):
    """Takes minutes and needs a package index: runs the job in a new environment with the built wheel."""
    text = write_text(tmp_path / "text", files=2, documents=100)
    store = tmp_path / "store"
    overrides = [f"data.path={text}", f"store.path={store}", f"run.compilation_cache={tmp_path / 'cache'}"]
    assert recorded.run("launch/tpu.sh", "create", *overrides, PYTHON=sys.executable).returncode == 0
    environment = recorded.environment | {
        "WORK": str(tmp_path / "work"),
        "HUGEPAGES": str(tmp_path / "hugepages"),
        "EXTRAS": "",  # no libtpu
        "PYTHONPATH": "",
        "JAX_PLATFORMS": "cpu",
    }
    result = subprocess.run(["bash", startup(recorded)], cwd=tmp_path, env=environment, timeout=1800)
    log = (tmp_path / "work/log").read_text()
    assert result.returncode == 0, log
    assert verdict(recorded) == "0"
    assert committed(store) > 0
    python = tmp_path / "work/venv/bin/python"
    check = [python, "-m", "pipeline.verify", f"store.path={store}"]
    assert subprocess.run(check, cwd=tmp_path, env=environment).returncode == 0
    assert str(ROOT) not in log
