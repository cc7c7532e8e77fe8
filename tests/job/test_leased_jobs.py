"""Jobs that share a store, join late, die and fall asleep make the same store as one undisturbed job."""

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from pipeline.store.write.leases import Leases
from tests.jobs import (
    assert_same_store,
    commits_held,
    committed,
    free_port,
    killed_after,
    local_processes,
    read_until,
    start,
    wait_for_blocks,
    wait_until,
)

pytestmark = pytest.mark.heavy
LEASE_S = 3
HELD = [(stream, 3) for stream in range(3)]  # a process that has leased a stream commits three blocks of it


@contextmanager
def jobs(count: int, *overrides: str) -> Iterator[list[subprocess.Popen]]:
    started = [start(*overrides) for _ in range(count)]
    try:
        yield started
    finally:
        for job in started:
            job.kill()
            job.wait()


def owners(store: Path) -> set[int]:
    """The ids of the processes that hold a stream."""
    found = set()
    for file in store.glob("_jobs/lease-*.json"):
        with suppress(FileNotFoundError):  # released between glob and read
            found.add(json.loads(file.read_text())["pid"])
    return found


def wait_for_owners(store: Path, count: int, *launched: subprocess.Popen) -> None:
    for process in launched:
        wait_until(lambda: len(owners(store)) >= count, process, f"{count} owners of streams", poll_s=0.02)
        assert process.poll() is None


def finish(job: subprocess.Popen) -> str:
    output, _ = job.communicate(timeout=120)
    assert job.returncode == 0, output
    return output


@pytest.mark.parametrize("is_on_this_host", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_jobs_that_die_and_join_late_make_the_same_store(small_job, small_store, tmp_path, is_on_this_host):
    """The later job has two processes. Each leases streams, and one without a stream dispatches padding."""
    store = tmp_path / "store"
    overrides = [*small_job, f"store.path={store}", *([] if is_on_this_host else [f"run.lease_s={LEASE_S}"])]
    with commits_held(store, HELD, *overrides) as release, jobs(1, *overrides) as [victim]:
        wait_for_blocks(victim, store, 3)
        with local_processes(2, 1, *overrides) as pair:
            wait_for_owners(store, 3, pair)
            victim.kill()
            victim.wait()
            for file in [] if is_on_this_host else store.glob("_jobs/lease-*"):
                lease = json.loads(file.read_text())
                if lease["pid"] == victim.pid:
                    file.write_text(json.dumps(lease | {"pid_space": "another host's"}))
            records = {file: file.stat() for file in store.glob("_commits/*/*.json")}  # not those being written
            assert 0 < len(records) < committed(small_store)
            release()
            output = finish(pair)
    assert "taking over " in output
    for file, before in records.items():
        assert (file.stat().st_ino, file.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns), "written again"
    assert not list(store.glob("_jobs/lease-*"))
    assert_same_store(store, small_store)


def test_a_job_that_slept_while_its_stream_was_taken_over_drops_its_blocks(small_job, small_store, tmp_path):
    store = tmp_path / "store"
    overrides = [*small_job, f"store.path={store}", f"run.lease_s={LEASE_S}"]
    with commits_held(store, HELD, *overrides) as release, jobs(1, *overrides) as [sleeper]:
        wait_for_owners(store, 1, sleeper)
        wait_for_blocks(sleeper, store, 3)
        sleeper.send_signal(signal.SIGSTOP)
        release()
        with jobs(1, *overrides) as [other]:
            wait_until(lambda: sleeper.pid not in owners(store), other, "the sleeper's stream taken over")
            assert sleeper.pid not in owners(store)
            sleeper.send_signal(signal.SIGCONT)
            assert "its uncommitted blocks are discarded" in finish(sleeper)
            finish(other)
    assert_same_store(store, small_store)


def test_sigterm_ends_a_job_of_one_process_that_waits_for_a_stream(small_job, small_store, tmp_path):
    """As on a single TPU host. JAX's handler would act on SIGTERM at the next step, which never comes. Before, the job
    waits for its own last block, so long that it would have said that it waits for others."""
    store = tmp_path / "store"
    num_blocks = len(list(small_store.glob("_commits/stream-00000/*")))
    alone = ["distributed.num_processes=1", "distributed.process_id=0", "run.lease_s=12", f"store.path={store}"]
    alone.append(f"distributed.coordinator=localhost:{free_port()}")
    with commits_held(store, [(0, num_blocks - 1)], *small_job) as release, closing(Leases(store, lease_s=12)) as other:
        assert all(map(other.take, other.vacant((1, 2))))
        with jobs(1, *small_job, *alone) as [job], killed_after(120, job):
            wait_for_blocks(job, store, num_blocks - 1)
            time.sleep(3)
            release()
            read_until("other processes hold all streams", job)
            assert committed(store) == num_blocks
            job.send_signal(signal.SIGTERM)
            output, _ = job.communicate(timeout=60)
    assert job.returncode == 42, output
