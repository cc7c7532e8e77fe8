"""`launch/slurm.sbatch` and `launch/verify.sbatch` on a real Slurm of one node, in two processes on CPUs."""

import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.jobs import ROOT, assert_same_store, commits_held, wait_for_blocks, wait_until
from tests.launch.one_node_slurm import OneNodeSlurm, SlurmJob, missing_programs, one_node_slurm

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(missing_programs()),
        reason=f"{', '.join(missing_programs())} not installed: apt-get install slurm-wlm munge",
    ),
]

SIZE = ("--nodes=1", "--gpus-per-node=2", "--ntasks-per-node=2", "--cpus-per-task=1")
HELD = (0, 4)  # a block of the first process, committed after about seven others
STREAMS = 3


@pytest.fixture(scope="module")
def slurm(tmp_path_factory) -> Iterator[OneNodeSlurm]:
    variables = {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    with one_node_slurm(tmp_path_factory.mktemp("slurm"), **variables) as slurm:
        yield slurm


def submit(slurm: OneNodeSlurm, log: Path, *overrides: str) -> SlurmJob:
    return slurm.submit(*SIZE, f"--output={log}", "launch/slurm.sbatch", *overrides)


def requeue(slurm: OneNodeSlurm, job: SlurmJob) -> None:
    slurm.call("scontrol", "requeue", job.number)


def preempt(slurm: OneNodeSlurm, job: SlurmJob) -> None:
    """Sends SIGTERM to the processes, not to the script, as Slurm does before a time limit or preemption."""
    slurm.call("scancel", "--signal=TERM", job.number)


def kill_one(slurm: OneNodeSlurm, job: SlurmJob) -> None:
    place = {"SLURM_JOB_ID": job.number, "SLURM_PROCID": "1"}
    [victim] = [
        process.pid
        for process in psutil.process_iter(["environ", "cmdline"])
        if place.items() <= (process.info["environ"] or {}).items() and process.info["cmdline"][0] == sys.executable
    ]
    os.kill(victim, signal.SIGKILL)


@pytest.mark.parametrize(("disturb", "says"), [(requeue, None), (preempt, 42), (kill_one, 137)])
def test_a_disturbed_job_is_requeued_and_resumes(slurm, small_job, small_store, tmp_path, disturb, says):
    """`scontrol requeue` also ends the script, which then prints nothing."""
    store, log = tmp_path / "store", tmp_path / "log"
    with commits_held(store, [HELD], *small_job):
        job = submit(slurm, log, *small_job, f"store.path={store}")
        wait_for_blocks(job, store, 5)
        assert job.poll() is None, log.read_text()
        disturb(slurm, job)
        if disturb is not kill_one:
            wait_until(lambda: log.read_text().count("SIGTERM caught") == 2, job, "SIGTERM in both processes")
    assert job.wait() == 0, log.read_text()
    codes = re.findall(r"exit code (\d+), after (\d+) restarts", log.read_text())
    assert codes == [*([] if says is None else [(str(says), "0")]), ("0", "1")], log.read_text()
    assert_same_store(store, small_store)


def test_each_process_gets_the_cpus_per_task(slurm, tmp_path):
    """srun takes the number from sbatch no longer, and would bind each process to one CPU."""
    python, tasks = tmp_path / "python", max(1, min(2, os.cpu_count() // 2))
    python.write_text(f"#!{sys.executable}\nimport os\nprint(len(os.sched_getaffinity(0)))\n")
    python.chmod(0o755)
    size = (
        f"--ntasks-per-node={tasks}",
        "--cpus-per-task=2",
        f"--export=ALL,PYTHON={python}",
        f"--output={tmp_path}/log",
    )
    assert slurm.submit("--nodes=1", "--gpus-per-node=2", *size, "launch/slurm.sbatch").wait() == 0
    assert re.findall(r"^\d+: (\d+)$", (tmp_path / "log").read_text(), re.MULTILINE) == ["2"] * tasks
    share = slurm.submit("--array=0", *size[1:-1], f"--output={tmp_path}/share", "launch/verify.sbatch")
    assert SlurmJob(f"{share.number}_0", slurm.environment).wait() == 0
    assert (tmp_path / "share").read_text() == "2\n"


def test_a_wrong_configuration_is_not_requeued(slurm, small_job, tmp_path):
    log = tmp_path / "log"
    job = submit(slurm, log, *small_job, f"store.path={tmp_path / 'store'}", "capture.layers=[99]")
    assert job.wait() == 2, log.read_text()
    assert "exit code 2, after 0 restarts" in log.read_text()
    assert not list(ROOT.glob("wrong-*"))


def test_an_array_verifies_a_store_in_shares_and_one_task_can_be_repeated(slurm, small_store, tmp_path):
    store = tmp_path / "store"
    shutil.copytree(small_store, store)
    damaged = store / "blocks.1.resid_post/c.1.0.0"  # the first block of stream 1
    content = damaged.read_bytes()
    damaged.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    arguments = (f"--output={tmp_path}/%a.log", "--cpus-per-task=1", "launch/verify.sbatch", f"store.path={store}")
    array = slurm.submit(f"--array=0-{STREAMS - 1}", *arguments)
    codes = [SlurmJob(f"{array.number}_{rank}", slurm.environment).wait() for rank in range(STREAMS)]
    assert codes == [0, 1, 0]
    assert "blocks.1.resid_post/c.1.0.0" in (tmp_path / "1.log").read_text()
    damaged.write_bytes(content)
    again = slurm.submit("--array=1", f"--export=ALL,WORLD={STREAMS}", *arguments)
    assert SlurmJob(f"{again.number}_1", slurm.environment).wait() == 0, (tmp_path / "1.log").read_text()
