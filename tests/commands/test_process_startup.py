"""Signals before a job installs its handlers, closed standard streams, and imports, in separate processes."""

import importlib.metadata
import json
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import cycle

import jax
import psutil
import pytest

from pipeline.cluster import devices, processes
from pipeline.config.schema import DistributedConfig, RunOptions
from pipeline.core.errors import ConfigError, PipelineError
from pipeline.library.extractor import Extractor
from tests.jobs import ROOT, command, free_port, has_loaded, run_program, wait_until, write_text

pytestmark = pytest.mark.heavy
COMMANDS = ["run", "plan", "verify", "finalize", "inspect", "export", "delete"]
# The process sends itself a signal before its first import outside this package and the standard library.
SIGNAL_AT_FIRST_IMPORT = """
import os, runpy, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in {*sys.stdlib_module_names, "pipeline"}:
            os.kill(os.getpid(), int(sys.argv[2]))

sys.meta_path.insert(0, Finder())
runpy.run_module(sys.argv[1], run_name="__main__")
"""
# Runs commands one after the other, each with new standard streams, as Python makes them. The process has none.
COMMANDS_WITHOUT_STREAMS = """
import json, os, runpy, sys
from pathlib import Path

def without_reader():
    reader, writer = os.pipe()
    os.close(reader)
    return open(writer, "w", buffering=1)

codes = {}
folder = Path(sys.argv[1])
commands = json.loads((folder / "commands.json").read_text())
kinds = {"closed": lambda: None, "without readers": without_reader, "full": lambda: open("/dev/full", "w", buffering=1)}
calls = [(*command, streams) for command in commands for streams in ("closed", "without readers")]
calls += [(*command, "full") for command in commands if command[0] in ("run", "verify")]
for name, arguments, streams in calls:
    sys.argv = ["", *(argument.replace("STREAMS", streams) for argument in arguments)]
    sys.stdout, sys.stderr, code = kinds[streams](), kinds[streams](), 0
    try:
        runpy.run_module(f"pipeline.{name}", run_name="__main__")
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) else repr(error)
    codes[f"{name}, {streams}"] = code
(folder / "codes.json").write_text(json.dumps(codes))
"""


@pytest.fixture(scope="module")
def overrides(tmp_path_factory, compilation_cache) -> list[str]:
    text = write_text(tmp_path_factory.mktemp("text"), files=1, documents=20)
    sizes = ["batch.rows=4", "batch.length=64", "run.max_tokens=1000"]
    return [f"data.path={text}", *sizes, "capture.layers=[1]", compilation_cache]


def signalled(number: signal.Signals, when: Callable[[int], bool], *arguments: str) -> subprocess.CompletedProcess:
    """Runs the job and sends it a signal once `when` is true for its process id."""
    process = subprocess.Popen(
        command(*arguments), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    wait_until(lambda: when(process.pid), process, "the moment to send the signal")
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    return subprocess.CompletedProcess(process.args, process.returncode, output)


def assert_interrupted(result: subprocess.CompletedProcess, number: signal.Signals) -> None:
    assert result.returncode == 42, result.stdout
    assert f"stopped by {number.name}" in result.stdout
    assert "Run the same command again" in result.stdout
    assert "Traceback" not in result.stdout


def test_a_signal_during_imports_is_an_interruption(overrides, tmp_path):
    place = f"store.path={tmp_path / 'store'}"
    result = signalled(signal.SIGINT, lambda pid: has_loaded(pid, "jaxlib"), *overrides, place)
    assert_interrupted(result, signal.SIGINT)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("name", "number"), [*zip([*COMMANDS, "push"], cycle([signal.SIGTERM, signal.SIGINT]), strict=False)]
)
def test_every_command_handles_signals_before_other_imports(name, number):
    arguments = ["-c", SIGNAL_AT_FIRST_IMPORT, f"pipeline.{name}", str(int(number))]
    result = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert_interrupted(result, number)


def test_every_command_runs_without_standard_streams_and_a_run_with_streams_to_a_full_disk(overrides, tmp_path):
    """In one process, since each command's imports take seconds."""
    store = f"store.path={tmp_path}/STREAMS"
    arguments = {
        "run": [*overrides, store],
        "plan": [*overrides, store],
        "verify": [store],
        "finalize": [store],
        "inspect": [store, f"inspect.html={tmp_path}/STREAMS.html"],
        "export": [store, f"export.path={tmp_path}/STREAMS.arrow"],
        "delete": [store, "confirm=true"],
    }
    (tmp_path / "commands.json").write_text(json.dumps([(name, arguments[name]) for name in COMMANDS]))
    program = shlex.join([sys.executable, "-c", COMMANDS_WITHOUT_STREAMS, str(tmp_path)])
    assert subprocess.run(["sh", "-c", f"{program} <&- >&- 2>&-"], cwd=ROOT, timeout=300).returncode == 0
    codes = json.loads((tmp_path / "codes.json").read_text())
    assert codes.pop("verify, full") == "Standard output cannot be written: No space left on device."
    assert len(codes) == 2 * len(COMMANDS) + 1  # a run's result is not what it prints
    assert {name: code for name, code in codes.items() if code != 0} == {}
    left = {file.name for file in tmp_path.iterdir()}
    assert left >= {"closed.html", "closed.arrow", "without readers.html", "without readers.arrow"}
    assert not left & {"closed", "without readers"}


def test_a_signal_is_handled_while_other_processes_are_awaited(overrides, tmp_path):
    """JAX waits outside Python, for as long as distributed.join_timeout_s."""
    port = free_port()

    def listens(_pid: int) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("localhost", port)) == 0

    place = [f"distributed.coordinator=localhost:{port}", "distributed.num_processes=2", "distributed.process_id=0"]
    result = signalled(signal.SIGTERM, listens, *overrides, *place, f"store.path={tmp_path / 'store'}")
    assert_interrupted(result, signal.SIGTERM)


# As `srun --pty bash` in an allocation of two tasks, and Open MPI's and MPICH's mpirun -n 2, set them.
SALLOC = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"}
SRUN = SALLOC | {"SLURM_STEP_NODELIST": "localhost", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
OPEN_MPI_4 = OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": "1276903424.0;tcp://127.0.0.1:59335"}
MPICH = {"PMI_SIZE": "2", "PMI_RANK": "0"}
IN_NO_STEP = (SALLOC, SALLOC | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"})
JOIN = """
import json, logging, os, sys
import jax
from pipeline.cluster import processes
from pipeline.config.schema import DistributedConfig
from pipeline.core.errors import ConfigError
logging.basicConfig(level=logging.INFO, format="%(message)s")
for variables, number in json.loads(sys.argv[1]):
    os.environ |= variables
    try:
        processes.join.__wrapped__(DistributedConfig(num_processes=number, join_timeout_s=1))
        print("joined" if jax.distributed.is_initialized() else "alone")
    except ConfigError as error:
        print(error)
    for name in variables:
        del os.environ[name]
"""


@pytest.mark.parametrize(
    ("variables", "messages"),
    [
        (SRUN, ["Connecting to JAX distributed service on localhost:61447", "can reach process 0"]),
        (OPEN_MPI_4, ["To run this process of a Slurm step or MPI job without the others, set"]),
    ],
)
def test_processes_that_do_not_all_join_are_reported(variables, messages):
    """In an interactive shell a step's process has no others. JAX would abort it with a stack trace of C++."""
    result = run_program(JOIN, json.dumps([(variables, None)]), timeout_s=60)
    assert (result.returncode, result.stdout) == (1, "")
    for message in [*messages, "did not all join within 1 s"]:
        assert message in result.stderr


def test_a_process_of_a_step_can_run_alone_and_jobs_that_jax_does_not_detect_are_refused():
    alone = [(variables, 1) for variables in (SRUN, OPEN_MPI_4, MPICH)] + [
        (variables, None) for variables in IN_NO_STEP
    ]
    result = run_program(JOIN, json.dumps([*alone, (OPEN_MPI, None), (MPICH, None)]), timeout_s=60)
    assert result.returncode == 0, result.stderr
    *printed, open_mpi, mpich = result.stdout.splitlines()
    assert printed == ["alone"] * len(alone)
    assert open_mpi == mpich
    assert mpich.startswith("JAX does not detect this job of several processes. Set distributed.coordinator")


def test_an_extractor_in_a_step_does_not_wait(monkeypatch):
    for name, value in SRUN.items():
        monkeypatch.setenv(name, value)
    Extractor("${assets:tiny-qwen2}", layers=[1], progress=False)
    assert not jax.distributed.is_initialized()


def test_a_coordinators_port_in_use_is_reported():
    """JAX would end with a segmentation fault."""
    with socket.create_server(("localhost", 0)) as server:
        options = DistributedConfig(f"localhost:{server.getsockname()[1]}", num_processes=1, process_id=0)
        with pytest.raises(
            PipelineError, match="cannot be used on this machine: Address already in use. Stop the process"
        ):
            processes.join(options)


def test_processes_that_have_not_joined_are_reported(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)  # as on a slice whose cluster JAX does not detect
    with pytest.raises(ConfigError, match=r"belong to 2 processes, which have not joined. Set distributed.coordinator"):
        devices.topology(RunOptions())


@pytest.fixture
def jax_platforms() -> Iterator[None]:
    before = jax.config.jax_platforms
    yield
    jax.config.update("jax_platforms", before)


@pytest.mark.parametrize(
    ("platforms", "variables", "port", "size"),
    [
        ("tpu,cpu", {}, "8476", 0),
        ("tpu", {"TPU_PREMAPPED_BUFFER_SIZE": "4096"}, "8476", 4096),
        ("tpu", {"JAX_COORDINATOR_PORT": "9000"}, "9000", 0),
        ("cpu", {}, None, None),
    ],
)
def test_a_tpu_host_gets_its_port_and_a_large_transfer_buffer(
    platforms, variables, port, size, monkeypatch, jax_platforms
):
    """size: the buffer's bytes; 0: at most 16 GiB, or 1/8 of the memory."""
    monkeypatch.setattr("os.environ", variables)
    jax.config.update("jax_platforms", platforms)  # as JAX does on a TPU host
    devices.skip_absent_tpu()
    assert variables.get("JAX_COORDINATOR_PORT") == port
    given = variables.get("TPU_PREMAPPED_BUFFER_SIZE")
    if size == 0:
        assert int(given) % 4096 == 0
        assert 1 << 28 < int(given) <= min(16 << 30, psutil.virtual_memory().total / 8)
    else:
        assert given == (None if size is None else str(size))


@pytest.mark.slow
def test_a_signal_at_any_moment_of_the_start_is_an_interruption(overrides, tmp_path):
    """Forty moments from the first lines of the program to the first steps. If a signal is missed at one of them, a
    launcher takes the interruption for a failure."""
    rng = random.Random(0)
    text = write_text(tmp_path / "text", files=4, documents=400)
    for k in range(40):
        number = rng.choice([signal.SIGTERM, signal.SIGINT])
        moment = time.monotonic() + rng.uniform(0.1, 5)
        place = [f"store.path={tmp_path / str(k)}", f"data.path={text}", "run.max_tokens=null"]
        result = signalled(number, lambda _pid, moment=moment: time.monotonic() > moment, *overrides, *place)
        assert_interrupted(result, number)


# Device files, the environment, and the extra that the message names; None: the CPU may be used.
MACHINES = [
    ((), {}, None),
    (("null", "kvm", "vfio/vfio", "accel/accel0", "nvidia-caps/nvidia-cap1"), {}, None),  # no TPU: a laptop's
    (("accel0", "accel1"), {}, "tpu"),
    (("vfio/vfio", "vfio/0"), {}, "tpu"),
    (("nvidia0", "nvidiactl"), {}, "cuda"),
    (("nvidia7",), {}, "cuda"),
    (("nvidia0",), {"CUDA_VISIBLE_DEVICES": ""}, None),
    (("accel0",), {"CUDA_VISIBLE_DEVICES": ""}, "tpu"),
]
UNASKED_CPU = """
import json, os, sys
from pathlib import Path
import jax
from pipeline.cluster.devices import open_devices, require_accelerator, skip_absent_tpu
from pipeline.core.errors import ConfigError
if not skip_absent_tpu(Path(sys.argv[1])):
    jax.config.update("jax_platforms", "cpu")  # without libtpu
jax.devices()
for folder, environment in json.loads(sys.argv[2]):
    jax.config.update("jax_platforms", None)
    os.environ |= environment
    try:
        require_accelerator(Path(folder))
        print("cpu")
    except ConfigError as error:
        print(error)
    for name in environment:
        del os.environ[name]
    assert next(Path(folder).glob("[an]*[0-9]"), None) is None or not skip_absent_tpu(Path(folder))
    jax.config.update("jax_platforms", "cpu")  # as JAX_PLATFORMS=cpu
    require_accelerator(Path(folder))
"""


def test_an_accelerator_that_jax_does_not_find_is_not_replaced_by_the_cpu(tmp_path):
    cases = []
    for number, (files, environment, _) in enumerate(MACHINES):
        folder = tmp_path / str(number)
        folder.mkdir()
        for file in files:
            (folder / file).parent.mkdir(exist_ok=True)
            (folder / file).touch()
        cases.append((str(folder), environment))
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    command = [sys.executable, "-c", UNASKED_CPU, cases[0][0], json.dumps(cases)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for line, (_, _, extra) in zip(done.stdout.splitlines(), MACHINES, strict=True):
        assert (line == "cpu") if extra is None else (f"the extra `{extra}`" in line and "JAX_PLATFORMS=cpu" in line)


@pytest.mark.skipif(bool(importlib.metadata.entry_points(group="jax_plugins")), reason="JAX has a plugin")
def test_a_platform_without_its_plugin_is_a_configuration_error():
    code = "from pipeline.cluster.devices import require_accelerator\nrequire_accelerator()"
    environment = os.environ | {"JAX_PLATFORMS": "cuda"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert "ConfigError: JAX_PLATFORMS is 'cuda'" in done.stderr


CONTROL = "a\x1b[2Jb\x07\x9b31m\x7f\u202ec\rd\x00\udc80"


def test_printed_data_does_not_control_the_terminal():
    """Errors, logs and results are escaped; progress bars still move the cursor."""
    shown = r"a\x1b[2Jb\x07\x9b31m\x7f\u202ec\rd\x00\udc80"
    code = (
        "import logging, sys\nfrom pipeline.cluster.startup import prepare_process\nprepare_process()\n"
        "from pipeline.core.errors import InputError\n"
        f"text = {CONTROL!r}\nprint(text, InputError(text))\n"
        "logging.basicConfig(format='%(message)s')\nlogging.warning('%s', text)\n"
        "sys.stderr.write('\\rbar\\t|')\nsys.stderr.write('\\n\\x1b[A')\nprint(str(InputError(text)) == text)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True)
    assert done.stdout.decode() == f"{shown} {shown}\nFalse\n"
    assert done.stderr.decode() == f"{shown}\n\rbar\t|\n\x1b[A"


HEAVY = ("torch", "transformers", "datasets", "gcsfs", "flax", "scipy", "aiohttp", "matplotlib")
HEAVY += ("jax.experimental.pallas",)


def test_a_run_on_local_files_imports_no_unused_heavy_packages(tmp_path):
    """Nor many other modules besides those that every run needs."""
    overrides = [f"data.path={write_text(tmp_path / 'text', files=1, documents=5)}", f"store.path={tmp_path / 'store'}"]
    program = f"""
import sys
import jax, tensorstore, pyarrow.parquet, hydra, tokenizers
needed = len(sys.modules)
from pipeline.config import composing
from pipeline.job.running import run
run(composing.compose({[*overrides, "data=fineweb", "run.progress=false"]}))
print([name for name in {HEAVY} if name in sys.modules])
print(needed, len(sys.modules))"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    heavy, numbers = done.stdout.splitlines()[-2:]
    assert heavy == "[]"
    needed, all_modules = map(int, numbers.split())
    assert all_modules < 2 * needed
    assert (tmp_path / "store" / "zarr.json").exists()
