"""A Slurm of one node on this machine, from Debian's packages munge and slurm-wlm, with its own configuration."""

import getpass
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.jobs import ROOT, free_port, wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "sinfo")
STATES_AT_THE_END = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}

# The devices stand for two GPUs: Slurm assigns them, and nothing opens them. A requeued job starts only once the
# credentials of its previous start have expired, hence cred_expire. Each process is bound to its CPUs.
CONFIGURATION = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
TaskPluginParam=cores
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,sched_min_interval=0
GresTypes=gpu
{hardware} NodeAddr=127.0.0.1 Gres=gpu:2
PartitionName=all Nodes={host} Default=YES State=UP
"""
DEVICES = ("/dev/null", "/dev/zero")


@dataclass(frozen=True)
class SlurmJob:
    """A job, or a task of an array. `number` is in Slurm's notation: 7, or 7_0."""

    number: str
    environment: dict[str, str]

    def poll(self) -> int | None:
        """The exit code once the job has ended for good, else None; -1 if it was cancelled or timed out."""
        said = self._ask()
        if said["JobState"] not in STATES_AT_THE_END:
            return None
        code, number = map(int, said["ExitCode"].split(":"))
        return code if said["JobState"] in ("COMPLETED", "FAILED") and not number else -1

    def wait(self, timeout_s: float = 240) -> int:
        wait_until(lambda: False, self, f"the end of job {self.number}", timeout_s, poll_s=0.1)
        return self.poll()

    def _ask(self) -> dict[str, str]:
        said = subprocess.run(
            ["scontrol", "--oneliner", "show", "job", self.number],
            env=self.environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        return dict(re.findall(r"(\w+)=(\S*)", said.stdout))


@dataclass(frozen=True)
class OneNodeSlurm:
    """environment: makes Slurm's commands use this Slurm."""

    environment: dict[str, str]

    def call(self, *command: str) -> str:
        done = subprocess.run(
            command, cwd=ROOT, env=self.environment, capture_output=True, text=True, check=True, timeout=60
        )
        return done.stdout

    def submit(self, *arguments: str) -> SlurmJob:
        return SlurmJob(self.call("sbatch", "--parsable", *arguments).strip(), self.environment)


def missing_programs() -> list[str]:
    return [program for program in PROGRAMS if shutil.which(program) is None]


@contextmanager
def one_node_slurm(folder: Path, **variables: str) -> Iterator[OneNodeSlurm]:
    """A Slurm with its files in `folder`. Jobs get `variables` as environment variables. Cancels all jobs on exit."""
    for name in ("state", "spool"):
        (folder / name).mkdir()
    host = socket.gethostname().partition(".")[0]
    settings = {
        **{"host": host, "user": getpass.getuser(), "folder": folder},
        **{"controller_port": free_port(), "node_port": free_port()},
        "hardware": subprocess.check_output(["slurmd", "-C"], text=True).splitlines()[0],
    }
    (folder / "slurm.conf").write_text(CONFIGURATION.format(**settings))
    (folder / "gres.conf").write_text("".join(f"NodeName={host} Name=gpu File={file}\n" for file in DEVICES))
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), **variables}
    files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
    with ExitStack() as stack:

        def run(name: str, *arguments: str) -> subprocess.Popen:
            log = stack.enter_context((folder / f"{name}.out").open("w"))
            daemon = subprocess.Popen([name, *arguments], env=environment, stdout=log, stderr=subprocess.STDOUT)
            stack.callback(_end, daemon)
            return daemon

        # --force: only warn that other users cannot enter pytest's folder.
        munge = run("munged", "--foreground", "--force", *files, f"--socket={folder}/munge.socket")
        wait_until((folder / "munge.socket").exists, munge, "munge's socket", timeout_s=30)
        controller, node = run("slurmctld", "-D", "-c"), run("slurmd", "-D", "-c")
        slurm = OneNodeSlurm(environment)
        wait_until(lambda: _is_idle(environment), node, "an idle node", timeout_s=60, poll_s=0.1)
        for daemon in (munge, controller, node):
            assert daemon.poll() is None, "".join((folder / f"{daemon.args[0]}.out").read_text()[-2000:])
        stack.callback(_cancel_all, environment)
        yield slurm


def _is_idle(environment: dict[str, str]) -> bool:
    said = subprocess.run(["sinfo", "-h", "-o", "%T"], env=environment, capture_output=True, text=True, timeout=60)
    return said.stdout.split() == ["idle"]


def _cancel_all(environment: dict[str, str]) -> None:
    user = getpass.getuser()
    subprocess.run(["scancel", "--user", user], env=environment, timeout=60)
    deadline = time.monotonic() + 60
    while not _is_idle(environment) and time.monotonic() < deadline:
        time.sleep(0.1)


def _end(daemon: subprocess.Popen) -> None:
    daemon.terminate()
    try:
        daemon.wait(20)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()
