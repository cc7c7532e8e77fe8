"""Jobs of several JAX processes, which launch/local.py starts and gloo connects."""

import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config import composing
from pipeline.core.errors import ConfigError
from pipeline.job.running import join_and_run
from pipeline.store.check.verifying import verify_store
from tests.hub import Hub, contents
from tests.jobs import (
    ROOT,
    SMALL_JOB,
    assert_same_store,
    children,
    commits_held,
    committed,
    free_port,
    has_loaded,
    killed_after,
    local_processes,
    objects,
    read_until,
    rest_of_output,
    run_here,
    run_processes,
    start,
    wait_for_blocks,
    wait_until,
    write_text,
)

pytestmark = pytest.mark.heavy
TINY = composing.PACKAGE / "assets" / "tiny-qwen2"
HELD = (0, 4)  # a block of the first process, committed after about seven others
EXIT_S = 30  # all processes end within this time after one has failed


def test_sigterm_to_one_process_stops_all_and_one_process_resumes(small_job, small_store, tmp_path):
    store = tmp_path / "store"
    launched = local_processes(2, 1, *small_job, f"store.path={store}")
    with commits_held(store, [HELD], *small_job) as release, launched as launcher:
        wait_for_blocks(launcher, store, 5)
        children(launcher)[1].send_signal(signal.SIGTERM)
        with killed_after(EXIT_S, launcher):
            read_until("SIGTERM caught", launcher)  # JAX asks once a second, and the job takes less
        release()
        output = rest_of_output(launcher, EXIT_S)
    assert launcher.returncode == 42, output
    for process in (0, 1):
        assert f"process {process} of 2" in output
    assert output.count("Interrupted: stopped by SIGTERM") == 2
    assert 5 <= committed(store) < committed(small_store)
    run_here(*small_job, f"store.path={store}")
    assert_same_store(store, small_store)


def test_a_killed_process_ends_the_others_and_the_next_start_resumes(small_job, small_store, tmp_path):
    """The first process is the coordinator of the others."""
    store = tmp_path / "store"
    launched = local_processes(2, 1, *small_job, f"store.path={store}")
    with commits_held(store, [HELD], *small_job) as release, launched as launcher:
        wait_for_blocks(launcher, store, 3)
        children(launcher)[0].kill()
        release()
        output, _ = launcher.communicate(timeout=EXIT_S)
    assert launcher.returncode == 1, output
    assert "[0] ended with SIGKILL" in output
    assert committed(store) < committed(small_store)
    run_here(*small_job, f"store.path={store}")
    assert_same_store(store, small_store)


def test_sigterm_before_a_process_has_joined_ends_the_others(small_job, tmp_path):
    """Otherwise they would wait for distributed.join_timeout_s."""
    launched = local_processes(2, 1, *small_job, f"store.path={tmp_path / 'store'}")
    with launched as launcher:
        wait_until(lambda: len(children(launcher)) == 2, launcher, "two processes")
        first = children(launcher)[0]
        wait_until(lambda: has_loaded(first.pid, "numpy"), launcher, "the imports")
        first.send_signal(signal.SIGTERM)
        output, _ = launcher.communicate(timeout=EXIT_S)
    assert launcher.returncode == 42, output
    assert output.count("Interrupted: stopped by SIGTERM") == 2


def test_an_error_in_one_process_ends_all_with_its_exit_code_and_its_message(small_job, tmp_path):
    """Stream 1, the second process's, has a row without text in the middle of its file."""
    text = write_text(tmp_path / "text", files=3, documents=60)
    table = pq.read_table(text / "001.parquet").to_pydict()
    table["text"][40] = None
    pq.write_table(pa.table(table), text / "001.parquet", row_group_size=16)
    store = tmp_path / "store"
    with local_processes(2, 1, *small_job, f"data.path={text}", f"store.path={store}") as launcher:
        with killed_after(120, launcher):
            lines = read_until("InputError", launcher)
        lines += rest_of_output(launcher, EXIT_S).splitlines()
        assert launcher.returncode == 2, lines
    errors = [line for line in lines if "InputError" in line]
    assert len(errors) == 1
    assert "process 1 of 2" in errors[0]
    assert "001.parquet" in errors[0]
    assert committed(store) > 0


def test_a_sweep_with_streams_of_very_different_lengths_makes_the_stores_of_single_jobs(compilation_cache, tmp_path):
    """The second process has only the second stream, which is empty; the third has none and dispatches padding."""
    text = tmp_path / "text"
    text.mkdir()
    for file, count in enumerate((100, 0, 1)):
        rows = {"text": [f"{k} words" for k in range(count)], "id": [f"{file}/{k}" for k in range(count)]}
        schema = pa.schema([("text", pa.string()), ("id", pa.string())])
        pq.write_table(pa.table(rows, schema=schema), text / f"{file}.parquet")
    job = [f"data.path={text}", "data.num_streams=2", *SMALL_JOB, "batch.rows=3", "store.rows_per_block=9"]
    job.append(compilation_cache)
    sweep = ["capture.layers=[0],[1]", f"store.path={tmp_path}/${{hydra:job.num}}"]
    result = run_processes(3, 1, "-m", *job, *sweep, f"hydra.sweep.dir={tmp_path}/logs")
    assert result.returncode == 0, result.stdout
    for number in range(2):
        run_here(*job, f"capture.layers=[{number}]", f"store.path={tmp_path}/single-{number}")
        assert_same_store(tmp_path / str(number), tmp_path / f"single-{number}")
    assert verify_store(str(tmp_path / "1")) == []
    before = objects(tmp_path / "1")
    run_here(*job, "capture.layers=[1]", f"store.path={tmp_path}/1")
    assert objects(tmp_path / "1") == before  # nothing is left to do


def test_processes_with_different_configurations_refuse_each_other(small_job, tmp_path):
    joined = [f"distributed.coordinator=localhost:{free_port()}", "distributed.num_processes=2"]
    job = [*small_job, *joined, f"store.path={tmp_path / 'store'}"]
    processes = [start(*job, f"run.max_tokens={1000 + i}", f"distributed.process_id={i}") for i in range(2)]
    for process in processes:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 2, output
        assert "the configuration or devices of processes [1] differ from those of process 0" in output


def test_a_directory_that_only_one_host_has_ends_every_process(tmp_path):
    """Each process runs in the folder of its host, which has the Hub's cache."""
    text, hosts = write_text(tmp_path / "text", files=2, documents=4), [tmp_path / "host0", tmp_path / "host1"]
    hosts[0].mkdir()
    shutil.copytree(TINY, hosts[1] / "owner" / "tiny")
    joined = [f"distributed.coordinator=localhost:{free_port()}", "distributed.num_processes=2"]
    job = [f"data.path={text}", "model.path=owner/tiny", f"store.path={tmp_path / 'store'}", *joined]
    with Hub().serving() as server:
        server.push("models/owner/tiny", contents(TINY))
        env = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ['PYTHONPATH']}", "HF_ENDPOINT": server.url}
        processes = [
            start(*job, f"distributed.process_id={number}", cwd=host, env=env | {"HF_HOME": f"{host}/hf"})
            for number, host in enumerate(hosts)
        ]
        for process in processes:
            output, _ = process.communicate(timeout=120)
            assert process.returncode == 2, output
            assert "model.path=owner/tiny is a local directory on some hosts of this job" in output


def test_all_processes_end_with_0_or_none_does(compilation_cache, tmp_path):
    """The second process fails to write its only block after the first has finished its steps."""
    joined = [f"distributed.coordinator=localhost:{free_port()}", "distributed.num_processes=2"]
    text = write_text(tmp_path / "text", files=2, documents=20)
    job = [
        f"data.path={text}",
        "data.num_streams=2",
        *SMALL_JOB,
        "store.rows_per_block=128",
        compilation_cache,
        *joined,
    ]
    processes = [start(*job, f"store.path={tmp_path / 'store'}", f"distributed.process_id={i}") for i in range(2)]
    resource.prlimit(processes[1].pid, resource.RLIMIT_FSIZE, (1 << 15, 1 << 15))
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [1, 1], outputs
    assert "StoreError" in outputs[1]
    assert committed(tmp_path / "store") == 1


def test_a_process_id_without_a_coordinator_is_refused(small_job, tmp_path):
    config = composing.compose([*small_job, f"store.path={tmp_path / 'store'}", "distributed.process_id=0"])
    with pytest.raises(ConfigError, match="expected all three"):
        join_and_run(config)


def test_a_hanging_process_is_reported_and_the_job_gives_up(small_job, tmp_path):
    store = tmp_path / "store"
    job = [*small_job, f"store.path={store}", "run.stall_timeout_s=3", "distributed.heartbeat_timeout_s=300"]
    with commits_held(store, [HELD], *small_job) as release, local_processes(2, 1, *job) as launcher:
        wait_for_blocks(launcher, store, 3)
        first, second = children(launcher)
        second.suspend()
        release()
        first.wait(timeout=EXIT_S)
        second.kill()
        output, _ = launcher.communicate(timeout=EXIT_S)
    assert launcher.returncode == 1, output
    assert "[0] ended with exit code 1" in output
    assert re.search(r"no step has finished for [345] s", output), output  # it looks every 0.75 s
    assert "writer: results" in output
    assert "Exiting; run the same command again to resume." in output
    left = [json.loads(file.read_text())["pid"] for file in store.glob("_jobs/lease-*.json")]
    assert first.pid not in left


def disturb(launcher: subprocess.Popen, store: Path, rng: random.Random) -> str:
    """Kills one process or all, or sends SIGTERM to one, during the start or after some blocks. Returns the fault."""
    if wanted := rng.choice([0, 1, 2, 4]):
        wait_for_blocks(launcher, store, committed(store) + wanted)
    else:
        library = rng.choice(["numpy", "jaxlib", "tensorstore"])
        wait_until(lambda: any(has_loaded(child.pid, library) for child in children(launcher)), launcher, library)
    time.sleep(rng.uniform(0, 0.05))
    processes = children(launcher)
    fault = rng.choice(["kill one", "kill all", "terminate one"])
    victims = processes if fault == "kill all" else rng.sample(processes, min(1, len(processes)))
    for victim in victims:
        victim.send_signal(signal.SIGTERM if fault == "terminate one" else signal.SIGKILL)
    return fault


SETUPS = ((2, 2), (2, 1), (1, 2), (4, 1))  # processes, devices per process


def chaos(
    overrides: list[str],
    store: Path,
    num_blocks: int,
    rounds: int,
    seed: int,
    setups: Sequence[tuple[int, int]] = SETUPS,
) -> list[tuple[str, int, float]]:
    """Returns (fault, exit code, seconds from fault to end) for each round. A complete store has `num_blocks`."""
    rng = random.Random(seed)
    seen = []
    for _ in range(rounds):
        processes, devices = rng.choice(setups)
        launched = local_processes(processes, devices, *overrides, f"store.path={store}")
        with launched as launcher:
            fault = disturb(launcher, store, rng)
            began = time.monotonic()
            output, _ = launcher.communicate(timeout=90)
        seen.append((fault, launcher.returncode, time.monotonic() - began))
        assert launcher.returncode in (0, 1, 42), output
        assert launcher.returncode != 0 or committed(store) == num_blocks
    return seen


@pytest.mark.slow
def test_twenty_rounds_of_chaos(small_job, small_store, tmp_path):
    """Four stores of five rounds, so that most rounds disturb an unfinished run."""
    rounds = []
    for number in range(4):
        store = tmp_path / str(number)
        rounds += chaos(small_job, store, committed(small_store), rounds=5, seed=number)
        assert run_processes(2, 2, *small_job, f"store.path={store}").returncode == 0
        assert_same_store(store, small_store)
    for fault, code, seconds in rounds:
        print(f"{fault}: exit code {code} after {seconds:.1f} s")
    assert all(seconds < EXIT_S for *_, seconds in rounds)
    assert sum(code != 0 for _, code, _ in rounds) >= 15
