"""Forks jobs from a server process: a job's imports take 2 s of a core, and the suite runs about 100 jobs.

Each process of the suite has one server. It has imported everything that jobs import, but has no other Python thread
and no JAX backend, and forks for every job. The forked job gets arguments, environment, standard streams and process
group like a new process, runs the same module as `__main__`, and exits as Python does.

Tests of the start itself, such as signals during the imports, need a new process: `subprocess.Popen`. So do tests that
could depend on the order of sets of strings: all jobs of a server share one hash seed.
"""

import gc
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
LAUNCHER = "launch/local.py"
# Prefixes of variables that are read when they are needed, or that imports set. All others are read during imports.
READ_LATE = (
    *("XLA_", "JAX_NUM_CPU_DEVICES", "PYTHONUNBUFFERED", "PYTEST_", "HYDRA_FULL_ERROR"),
    *("TENSORSTORE_", "AWS_", "TF_CPP_", "TPU_", "SLURM_", "OMPI_", "PMI_", "JAX_COORDINATOR_PORT"),
    "TORCHINDUCTOR_",  # torch sets it, and jobs do not use torch
)
_STREAMS = (0, 1, 2)
_MESSAGE_BYTES = 1 << 17


def _read_by_imports(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(READ_LATE)}


class Forked(subprocess.Popen):
    """A command of this package, a program (`-c`) or launch/local.py, in a process that this process's server forks.

    It starts a new process instead if `is_forked` is false, or if variables that imports read differ from the server's.
    """

    imported_with: Mapping[str, str] = os.environ  # the environment of the server; conftest copies it
    _server: "Server | None" = None
    _lock = threading.Lock()

    def __init__(
        self, arguments: list[str], *, is_forked: bool = True, env: Mapping[str, str] | None = None, **options: Any
    ) -> None:
        environment = dict(os.environ if env is None else env)
        imported_with = _read_by_imports(Forked.imported_with)
        with Forked._lock:
            if Forked._server is None:
                Forked._server = Server(imported_with)
        self.is_forked = is_forked and _read_by_imports(environment) == imported_with
        super().__init__(arguments, cwd=ROOT, env=environment, **options)

    def _execute_child(self, arguments: list[str], *rest: Any) -> None:
        if not self.is_forked:
            super()._execute_child(arguments, *rest)
            return
        environment, pipes = rest[5], rest[9:15]  # a read end and a write end each for stdin, stdout and stderr
        streams = [pipes[0], pipes[3], pipes[5]]
        given = [stream if pipe == -1 else pipe for stream, pipe in zip(_STREAMS, streams, strict=True)]
        self.pid = self._server.ask({"arguments": arguments[1:], "environment": environment}, given)
        self._child_created = True
        self._close_pipe_fds(*pipes)

    def _try_wait(self, flags: int) -> tuple[int, int]:
        return self._server.ask({"ended": self.pid}) if self.is_forked else super()._try_wait(flags)

    def _wait(self, timeout: float | None) -> int:
        return super()._wait(1e6 if timeout is None else timeout)  # with a timeout, it polls

    def _internal_poll(self, *_args: Any, **_options: Any) -> int | None:
        if not self.is_forked:
            return super()._internal_poll()
        with self._waitpid_lock:
            if self.returncode is None:
                pid, status = self._try_wait(os.WNOHANG)
                if pid == self.pid:
                    self._handle_exitstatus(status)
        return self.returncode


class Server:
    """The client's side of the process that forks."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._lock = threading.Lock()
        self._connection, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            command = [sys.executable, "-m", "tests.forking", str(other.fileno())]
            options = {"cwd": ROOT, "env": environment, "pass_fds": [other.fileno()], "stdin": subprocess.DEVNULL}
            self.process = subprocess.Popen(command, **options)

    def ask(self, question: dict, files: list[int] | None = None) -> Any:
        with self._lock:
            socket.send_fds(self._connection, [json.dumps(question).encode()], files or [])
            answer = self._connection.recv(_MESSAGE_BYTES)
        assert answer, "the process that forks jobs for tests has ended"
        return json.loads(answer)


class Copied(subprocess.Popen):
    """Replaces `subprocess.Popen` in a forked launch/local.py, which then forks itself for the jobs that it starts."""

    def _execute_child(self, arguments: list[str], *rest: Any) -> None:
        if arguments[:2] != [sys.executable, "-m"]:
            super()._execute_child(arguments, *rest)
            return
        environment, pipes, starts_session = rest[5], rest[9:15], rest[-2]
        read, write = pipes[0], pipes[3]
        given = [0 if read == -1 else read, write, write if pipes[5] == -1 else pipes[5]]
        self.pid = os.fork()
        if not self.pid:
            if starts_session:
                os.setsid()
            _become(arguments[1:], environment, given)
        self._child_created = True
        self._close_pipe_fds(*pipes)


def serve(connection: socket.socket) -> None:
    """Forks for every job until the client has ended."""
    while True:
        message, files, *_ = socket.recv_fds(connection, _MESSAGE_BYTES, len(_STREAMS))
        if not message:
            return
        question = json.loads(message)
        if "ended" in question:
            connection.send(json.dumps(os.waitpid(question["ended"], os.WNOHANG)).encode())
            continue
        pid = os.fork()
        if not pid:
            connection.detach()
            _become(question["arguments"], question["environment"], files)
        for file in files:
            os.close(file)
        connection.send(json.dumps(pid).encode())


def _become(arguments: list[str], environment: Mapping[str, str], files: list[int]) -> NoReturn:
    """Turns this forked process into the process of a Python command, and exits with it."""
    import jax

    for stream, file in zip(_STREAMS, files, strict=True):
        os.dup2(file, stream)
    with open(os.devnull) as nothing:
        for file in map(int, os.listdir("/proc/self/fd")):
            if file not in (*_STREAMS, nothing.fileno()):
                _replace(file, nothing.fileno())
    os.environ.clear()
    os.environ.update(environment)
    if "JAX_NUM_CPU_DEVICES" in environment:
        jax.config.update("jax_num_cpu_devices", int(environment["JAX_NUM_CPU_DEVICES"]))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=bool(environment.get("PYTHONUNBUFFERED")))
    if arguments[0] == "-c":
        sys.argv[:] = ["-c", *arguments[2:]]
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(arguments[1], "<string>", "exec"), vars(sys.modules["__main__"]))
    elif arguments[0] == LAUNCHER:
        subprocess.Popen = Copied
        sys.argv[1:] = arguments[1:]
        runpy.run_path(arguments[0], run_name="__main__")
    else:
        sys.argv[1:] = arguments[2:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    sys.exit()


def _replace(file: int, other: int) -> None:
    """Closes an inherited file. Its number stays in use, because an object that holds it may close it again."""
    os.dup2(other, file, inheritable=False)


def hold_links() -> None:
    """Makes puts of local objects in this process wait while a file `<key>.held.__lock` exists (`jobs.writes_held`)."""
    link = os.link

    def held(source: str, target: str) -> None:
        while os.path.exists(f"{target}.held.__lock"):
            time.sleep(0.005)
        link(source, target)

    os.link = held


def collect_seldom() -> None:
    """Excludes existing objects from garbage collection and makes it rare: tracing creates many objects that stay."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


if __name__ == "__main__":
    import pipeline.cli.main
    import pipeline.extraction.job_run  # noqa: F401

    collect_seldom()
    hold_links()
    serve(socket.socket(fileno=int(sys.argv[1])))
