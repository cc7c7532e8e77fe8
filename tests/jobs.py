"""Small real jobs for tests: text files, runs in their own processes, comparison of stores."""

import json
import os
import pydoc_data.topics
import shutil
import socket
import socketserver
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.numpy import load_file, save_file

from pipeline.store.format.commits import commit_key

ROOT = Path(__file__).resolve().parents[1]
SMALL_JOB = (
    "batch.rows=4",
    "batch.length=64",
    "capture.layers=[0,1]",
    "capture.sites=[resid_post,attn_out]",
    "store.rows_per_block=8",
    "run.progress=false",
)
"""Overrides of a job whose store has many small blocks, and whose metrics are written often."""
GENERATING_JOB = (
    *("data=generate", "data@data.prompts=fineweb", "data.num_streams=3", "data.rows=8", "data.group=2"),
    *("data.prompt_length=112", "data.on_error=skip", "data.max_new_tokens=16", "data.temperature=1", "data.seed=3"),
    *("data.end_tokens=[.]", "batch.rows=4", "batch.length=64", "capture.layers=[1,3]", "store.shard_mib=0.1"),
    "run.progress=false",
)
"""Overrides of a job that completes the documents of `write_text`; some prompts are too long."""


def write_text(directory: Path, *, files: int, documents: int, max_characters: int = 3000) -> Path:
    """Parquet files with FineWeb's columns text and id, from the language reference that ships with Python."""
    topics = sorted(pydoc_data.topics.topics.items())
    directory.mkdir(parents=True, exist_ok=True)
    for file in range(files):
        chosen = [topics[(file * documents + k) % len(topics)] for k in range(documents)]
        table = {
            "text": [f"{file}: {text[: 200 + (97 * k) % max_characters]}" for k, (_, text) in enumerate(chosen)],
            "id": [f"{file}/{k}/{name}" for k, (name, _) in enumerate(chosen)],
        }
        pq.write_table(pa.table(table), directory / f"{file:03}.parquet", row_group_size=16)
    return directory


def write_model_of_zeros(directory: Path) -> Path:
    """The bundled model, except that layer 1's MLP outputs zeros and the head is certain of every next token."""
    from pipeline.config.composing import PACKAGE  # not above: conftest sets JAX's variables first

    shutil.copytree(PACKAGE / "assets" / "tiny-qwen2", directory)
    weights = load_file(directory / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"] *= 0
    weights["model.norm.weight"] *= 1e6
    save_file(weights, directory / "model.safetensors")
    return directory


def write_random_model(directory: Path, **shape: object) -> list[str]:
    """Writes the shape of a model. Returns the overrides for random weights, with the bundled model's tokenizer."""
    from pipeline.config.composing import PACKAGE  # not above: conftest sets JAX's variables first

    bundled = PACKAGE / "assets" / "tiny-qwen2"
    vocabulary = {"vocab_size": json.loads((bundled / "config.json").read_text())["vocab_size"]}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(vocabulary | shape))
    return [f"model.path={directory}", "model.init=random", f"model.tokenizer={bundled}"]


def command(*overrides: str, module: str = "pipeline.run") -> list[str]:
    return [sys.executable, "-m", module, *overrides]


def run(*overrides: str, module: str = "pipeline.run", timeout_s: float = 300) -> subprocess.CompletedProcess:
    """Runs an entry point and waits for it."""
    return subprocess.run(
        command(*overrides, module=module), cwd=ROOT, capture_output=True, text=True, timeout=timeout_s
    )


def run_program(
    program: str, *arguments: str, devices: int = 0, env: Mapping[str, str] = os.environ, timeout_s: float = 300
) -> subprocess.CompletedProcess:
    """Runs a program, given as text, and waits for it. With `devices`, that many are on its CPU."""
    env = {**env, **({"JAX_NUM_CPU_DEVICES": str(devices), "JAX_PLATFORMS": "cpu"} if devices else {})}
    program_command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(program_command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout_s)


def run_together(commands: Iterable[Sequence[str]], timeout_s: float = 300) -> list[str]:
    """Runs programs at the same time. Returns their outputs; fails unless all end with exit code 0."""
    pipes = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = [subprocess.Popen(program_command, **pipes) for program_command in commands]
    outputs = [process.communicate(timeout=timeout_s)[0] for process in processes]
    assert not any(process.returncode for process in processes), outputs
    return outputs


def run_here(*overrides: str) -> None:
    """Runs the job in this process, which saves seconds. For tests that do not need a separate process."""
    from pipeline.config import composing  # not above: conftest sets JAX's variables first
    from pipeline.job import running

    with own_compilation_cache():
        running.run(composing.compose([*overrides, "run.progress=false"]))


def run_first_stream(*overrides: str) -> None:
    """Runs the job in this process until it has filled its first stream, and begins with the next one."""
    from pipeline.cluster.preemption import StopRequest  # not above: conftest sets JAX's variables first
    from pipeline.config import composing
    from pipeline.core.errors import Interrupted
    from pipeline.job import running
    from pipeline.job.job import Job
    from pipeline.job.loaded_step import LoadedStep, load_step
    from pipeline.job.opening import open_job

    stop = StopRequest()

    class Stopping(LoadedStep):
        def __call__(self, block, first_row):
            stop.noticed |= block is not None and block.stream != 0
            return super().__call__(block, first_row)

    def load(job: Job) -> Stopping:
        return Stopping(**vars(load_step(job)))

    with suppress(Interrupted):
        running.run_job(open_job(composing.compose([*overrides, "run.progress=false"])), stop, load)


@contextmanager
def own_compilation_cache() -> Iterator[None]:
    """Lets jobs in this process set `run.compilation_cache`; restores JAX's cache settings on exit."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    names = ["jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"]
    before = {name: getattr(jax.config, name) for name in names}
    try:
        with warnings.catch_warnings():
            yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def start(*overrides: str, cwd: Path = ROOT, env: Mapping[str, str] = os.environ) -> subprocess.Popen:
    """Starts the job in its own process."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command(*overrides), cwd=cwd, env=env, **pipes)


@contextmanager
def commits_held(store: Path, blocks: Iterable[tuple[int, int]], *overrides: str) -> Iterator[Callable[[], None]]:
    """While entered, commits of these blocks (stream, index) wait. A stream's blocks are committed in
    order, so no later one of its stream is committed either.

    First creates the store, as the job with these overrides does. Yields a function that releases the locks.
    """
    create_store(*overrides, f"store.path={store}")
    with writes_held(store, [commit_key(*block) for block in blocks]) as release:
        yield release


@contextmanager
def writes_held(store: Path, keys: Iterable[str]) -> Iterator[Callable[[], None]]:
    """While entered, no process finishes writing these objects (`every_process/sitecustomize.py`). Yields a function
    that lets them go on."""
    held = [store / f"{key}.held.__lock" for key in keys]
    for file in held:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()

    def release() -> None:
        for file in held:
            file.unlink(missing_ok=True)

    try:
        yield release
    finally:
        release()


def create_store(*overrides: str) -> None:
    """Creates the job's store, without blocks."""
    from pipeline.config import composing  # not above: conftest sets JAX's variables first
    from pipeline.job.opening import open_job
    from pipeline.store.write.store_writer import StoreWriter

    job = open_job(composing.compose([*overrides]))
    StoreWriter.open(job.config.store.path, job.metadata, job.layout)


def committed(store: Path) -> int:
    """The number of committed blocks of a store."""
    return len(list(store.glob("_commits/*/*.json")))


def num_groups(store: Path) -> int:
    """The number of groups of generated documents in a store."""
    return len(list(store.glob("_generated/*/*.parquet")))


def objects(store: Path) -> dict[str, bytes]:
    """All objects of a store except metrics, leases, earlier summaries and temporary files of killed processes, by key,
    without the time, configuration and processes that made it."""
    found = {}
    for file in sorted(store.rglob("*")):
        key = str(file.relative_to(store))
        if file.is_file() and not key.startswith(("_jobs/2", "_jobs/lease-")) and file.suffix != ".__lock":
            found[key] = file.read_bytes()
    root = json.loads(found["zarr.json"])
    del root["attributes"]["activation_store"]["created"]
    del root["attributes"]["activation_store"]["sha256"]
    del root["attributes"]["activation_store"]["config"]
    found["zarr.json"] = json.dumps(root).encode()
    summary = (root["attributes"]["activation_store"]["summary"] or {}).items()
    named = {f"_summary/{kind}-{value[:16]}.parquet" for kind, value in summary if isinstance(value, str)}
    found = {key: content for key, content in found.items() if not key.startswith("_summary/") or key in named}
    for key in found:
        if key.startswith("_commits/"):
            found[key] = without_writer(found[key])
    return found


def without_writer(record: bytes) -> bytes:
    """A commit record without the name of the process that wrote it."""
    return json.dumps(json.loads(record) | {"written_by": "", "sha256": ""}).encode()


def assert_same_store(store: Path, reference: Path) -> None:
    """Compares all objects, byte by byte."""
    left, right = objects(store), objects(reference)
    assert sorted(left.keys() ^ right.keys()) == []
    different = [key for key in left if left[key] != right[key]]
    assert not different, different[:5]


@contextmanager
def local_processes(processes: int, devices: int, *overrides: str) -> Iterator[subprocess.Popen]:
    """The job in several processes, started by launch/local.py. Kills all of them on exit."""
    arguments = [sys.executable, "launch/local.py", "--processes", str(processes), "--devices", str(devices)]
    launcher = subprocess.Popen(
        [*arguments, *overrides], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield launcher
    finally:
        for process in [*children(launcher), launcher]:
            process.kill()
        launcher.wait()


def run_processes(processes: int, devices: int, *overrides: str, timeout_s: float = 300) -> subprocess.CompletedProcess:
    """Runs the job in several processes and waits for it."""
    with local_processes(processes, devices, *overrides) as launcher:
        output, _ = launcher.communicate(timeout=timeout_s)
    return subprocess.CompletedProcess(launcher.args, launcher.returncode, output)


def children(launcher: subprocess.Popen) -> list[psutil.Process]:
    """The processes that a launcher has started, in order; empty if the launcher has ended."""
    try:
        return psutil.Process(launcher.pid).children()
    except psutil.NoSuchProcess:
        return []


def wait_until(
    is_reached: Callable[[], bool],
    process: subprocess.Popen | None,
    what: str,
    timeout_s: float = 120,
    poll_s: float = 0.002,
) -> None:
    """Waits until `is_reached()` or the process has ended. Fails after `timeout_s`; `what` names the condition."""
    deadline = time.monotonic() + timeout_s
    while not is_reached() and (process is None or process.poll() is None):
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s"
        time.sleep(poll_s)


@contextmanager
def killed_after(seconds: float, process: subprocess.Popen) -> Iterator[None]:
    """Kills the process and its children after this time, so that reading their output ends."""

    def kill() -> None:
        for running in [*children(process), process]:
            running.kill()

    timer = threading.Timer(seconds, kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def read_until(words: str, process: subprocess.Popen) -> list[str]:
    """A process's output, up to the first line that contains `words`."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if words in line:
            return lines
    raise AssertionError(f"the process ended without {words!r}: {''.join(lines)}")


def rest_of_output(process: subprocess.Popen, timeout_s: float) -> str:
    """What a process writes after `read_until`, up to its end. `communicate` would omit the lines already buffered."""
    with killed_after(timeout_s, process):
        output = process.stdout.read()
    process.wait()
    return output


def wait_for_blocks(process: subprocess.Popen, store: Path, blocks: int) -> None:
    """Waits until the store has at least `blocks` blocks, or the job has ended."""
    wait_until(lambda: committed(store) >= blocks, process, f"{blocks} blocks in {store}")


def has_loaded(pid: int, library: str) -> bool:
    """Whether a process has loaded a Python package's shared libraries. False if it has ended."""
    try:
        return f"/{library}/" in Path(f"/proc/{pid}/maps").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


@contextmanager
def served(server: socketserver.BaseServer) -> Iterator[None]:
    """Answers requests in a thread, until the context ends."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
