"""Workers that claim streams, join late, die and fall asleep make the same store as one undisturbed worker."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from pipeline.store.check.verifying import verify_store
from pipeline.store.write.claims import Claims
from tests.jobs import (
    SMALL_JOB,
    assert_same_store,
    children,
    commits_held,
    committed,
    free_port,
    killed_after,
    local_processes,
    read_until,
    run_here,
    start,
    wait_for_blocks,
    wait_until,
    write_text,
)

LEASE_S = 3
MIN_BLOCKS = 40
HELD = [(stream, 3) for stream in range(6)]  # a worker that has claimed a stream commits three blocks of it


@pytest.fixture(scope="module")
def overrides(tmp_path_factory, compilation_cache) -> list[str]:
    text = write_text(tmp_path_factory.mktemp("text"), files=6, documents=15)
    return [
        f"data.path={text}",
        *SMALL_JOB,
        "run.claim=true",
        f"run.lease_s={LEASE_S}",
        compilation_cache,
    ]


@pytest.fixture(scope="module")
def reference(overrides, tmp_path_factory) -> Path:
    """The store of one undisturbed worker, which claims one stream after the other."""
    path = tmp_path_factory.mktemp("reference") / "store"
    run_here(*overrides, f"store.path={path}")
    assert committed(path) >= MIN_BLOCKS
    assert len(list(path.glob("_commits/stream-*"))) == 6
    assert not list(path.glob("_claims/*"))
    assert verify_store(str(path)) == []
    return path


@contextmanager
def workers(count: int, *overrides: str) -> Iterator[list[subprocess.Popen]]:
    started = [start(*overrides) for _ in range(count)]
    try:
        yield started
    finally:
        for worker in started:
            worker.kill()
            worker.wait()


def owners(store: Path) -> set[int]:
    """The ids of the processes that hold a stream."""
    found = set()
    for file in store.glob("_claims/stream-*.json"):
        with suppress(FileNotFoundError):  # a finished store's claims are deleted, also between glob and read
            claim = json.loads(file.read_text())
            if claim["held"]:
                found.add(int(claim["owner"].split("-")[-2]))
    return found


def wait_for_owners(store: Path, count: int, *launched: subprocess.Popen) -> set[int]:
    for process in launched:
        wait_until(lambda: len(owners(store)) >= count, process, f"{count} owners of streams", poll_s=0.02)
        assert process.poll() is None
    return owners(store)


def hold_all_streams(store: Path) -> Claims:
    """Claims all streams. The workers wait until the result is closed."""
    holder = Claims(str(store), lease_s=60)
    for vacancy in holder.vacancies(range(6)):
        assert holder.claim(vacancy)
    return holder


def wait_until_compiling(worker: subprocess.Popen) -> None:
    with killed_after(120, worker):
        read_until("compiling the step", worker)


def stop_each_at_its_first_stream(store: Path, count: int, *launched: subprocess.Popen) -> None:
    """Stops each process as soon as it holds a stream, so that every process gets one.

    All continue once `count` processes have been stopped.
    """
    stopped: set[int] = set()

    def stop_owners() -> bool:
        for pid in owners(store) - stopped:
            os.kill(pid, signal.SIGSTOP)
            stopped.add(pid)
        return len(stopped) >= count

    try:
        for process in launched:
            wait_until(stop_owners, process, f"{count} processes with a stream")
            assert process.poll() is None
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)


def finish(worker: subprocess.Popen) -> str:
    output, _ = worker.communicate(timeout=120)
    assert worker.returncode == 0, output
    return output


def test_workers_that_die_and_join_late_make_the_same_store(overrides, reference, tmp_path):
    store = tmp_path / "store"
    overrides = [*overrides, f"store.path={store}"]
    with commits_held(store, HELD, *overrides) as release, workers(2, *overrides) as [victim, survivor]:
        wait_for_owners(store, 2, victim, survivor)
        wait_for_blocks(victim, store, 3)
        victim.kill()
        records = {file: file.stat() for file in store.glob("_commits/*/*.json")}  # not those being written
        assert 0 < len(records) < committed(reference)
        release()
        with workers(1, *overrides) as late:
            outputs = [finish(worker) for worker in (survivor, *late)]
    assert sum(output.count("taking over ") for output in outputs) >= 1
    for file, before in records.items():
        assert (file.stat().st_ino, file.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns), "written again"
    assert_same_store(store, reference)


def test_a_worker_that_slept_while_its_stream_was_taken_over_drops_its_blocks(overrides, reference, tmp_path):
    store = tmp_path / "store"
    overrides = [*overrides, f"store.path={store}"]
    with commits_held(store, HELD, *overrides) as release, workers(1, *overrides) as [sleeper]:
        wait_for_owners(store, 1, sleeper)
        wait_for_blocks(sleeper, store, 3)
        sleeper.send_signal(signal.SIGSTOP)
        release()
        with workers(1, *overrides) as [other]:
            wait_until(lambda: not owners(store) & {sleeper.pid}, other, "the sleeper's stream taken over")
            assert not owners(store) & {sleeper.pid}
            sleeper.send_signal(signal.SIGCONT)
            assert "its uncommitted blocks are discarded" in finish(sleeper)
            finish(other)
    assert_same_store(store, reference)


def test_sigterm_releases_the_claims_at_once(overrides, reference, tmp_path):
    store = tmp_path / "store"
    launched = workers(1, *overrides, f"store.path={store}", "run.lease_s=600")
    with commits_held(store, HELD, *overrides) as release, launched as [worker]:
        wait_for_owners(store, 1, worker)
        wait_for_blocks(worker, store, 3)
        worker.send_signal(signal.SIGTERM)
        release()
        output, _ = worker.communicate(timeout=60)
        assert worker.returncode == 42, output
    assert not owners(store)
    assert 3 <= committed(store) < committed(reference)
    run_here(*overrides, f"store.path={store}", "run.lease_s=600")
    assert_same_store(store, reference)


def test_workers_of_two_processes_and_of_one_share_a_store(overrides, reference, tmp_path):
    """Each process claims its own streams. A process without one dispatches padding with the other."""
    store = tmp_path / "store"
    overrides = [*overrides, f"store.path={store}"]
    with local_processes(2, 1, *overrides) as pair, workers(1, *overrides) as [single]:
        with closing(hold_all_streams(store)):
            wait_until_compiling(pair)
            wait_until_compiling(single)
        stop_each_at_its_first_stream(store, 3, pair, single)
        finish(single)
        finish(pair)
    assert_same_store(store, reference)


@pytest.mark.slow
def test_sigterm_to_one_process_ends_a_worker_that_waits_for_another_to_complete_the_store(
    overrides, reference, tmp_path
):
    """The store has all blocks, and the worker that completes it never ends."""
    store = tmp_path / "store"
    shutil.copytree(reference, store)
    with closing(Claims(str(store), lease_s=60)) as other:
        [vacancy] = other.vacancies([6])
        assert other.claim(vacancy)
        tried = store / "_claims_test"  # workers try conditional writes here before they claim
        tried.rmdir()
        with local_processes(2, 1, *overrides, f"store.path={store}") as pair:
            wait_until(tried.exists, pair, "a worker that is about to complete the store")
            assert pair.poll() is None
            children(pair)[1].send_signal(signal.SIGTERM)
            output, _ = pair.communicate(timeout=60)
        assert pair.returncode == 42, output
        assert output.count("Interrupted: stopped by SIGTERM") == 2


def test_sigterm_ends_a_worker_of_one_process_that_waits_for_a_stream(overrides, tmp_path):
    """As on a single TPU host. JAX's handler would act on SIGTERM at the next step, which never comes."""
    store = tmp_path / "store"
    holder = hold_all_streams(store)
    tried = store / "_claims_test"  # workers try conditional writes here before they claim
    tried.rmdir()
    alone = [
        f"distributed.coordinator=localhost:{free_port()}",
        "distributed.num_processes=1",
        "distributed.process_id=0",
    ]
    with workers(1, *overrides, f"store.path={store}", *alone) as [worker]:
        wait_until(tried.exists, worker, "a worker that is about to look for a stream")
        assert worker.poll() is None
        worker.send_signal(signal.SIGTERM)
        output, _ = worker.communicate(timeout=60)
    holder.close()
    assert worker.returncode == 42, output
    assert committed(store) == 0
