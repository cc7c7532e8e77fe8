"""Leases on streams: each has one owner at a time, even if owners die, sleep or cannot reach the store."""

import json
import os
import subprocess
import sys
import threading
from contextlib import closing, contextmanager

import pytest

from pipeline.core.errors import StoreInvalid
from pipeline.store.format.keys import LEASES_PREFIX
from pipeline.store.io.storage import NO_OBJECT, Storage
from pipeline.store.write.leases import Leases, lease_key
from tests.jobs import ROOT, wait_until

pytestmark = pytest.mark.heavy
LEASE_S = 2.0  # on a busy machine a thread may have to wait for half a second
LONG_LEASE_S = 600.0  # nothing is renewed during a test
SHORT_LEASE_S = 0.06  # with the fixture `clock`: renewals are frequent, and leases end only when a test says so


@contextmanager
def leases(path, lease_s=LEASE_S):
    with closing(Leases(path, lease_s)) as opened:
        yield opened


def take(who: Leases, stream: int) -> bool:
    return any(who.take(vacant) for vacant in who.vacant([stream]))


def wait_for_renewal(path: str, stream: int) -> None:
    """Waits for two writes of the lease by its owner: the second renewal began after this call."""

    def number() -> int:
        return json.loads(Storage.open(path).read(lease_key(stream)))["number"]

    first = number()
    wait_until(lambda: number() >= first + 2, None, "a renewal")


class Clock:
    """Replaces the module `time` for this process's leases."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("pipeline.store.write.leases.time", clock)
    return clock


def test_a_leased_stream_cannot_be_leased_until_it_is_released(store_path):
    many = (0, 99_999, 100_000, 1_234_567)
    with leases(store_path, LONG_LEASE_S) as a:
        assert all(take(a, stream) for stream in many)
    with leases(store_path, LONG_LEASE_S) as a, leases(store_path, LONG_LEASE_S) as b:
        assert all(take(b, stream) for stream in many)
        assert take(a, 3)
        assert not take(a, 3)
        assert not take(b, 3)
        assert take(b, 4)
        assert (a.holds(3), a.holds(4), b.holds(3), b.holds(4)) == (True, False, False, True)
        a.release(3)
        assert not a.holds(3)
        assert take(b, 3)
        assert b.holds(3)
    assert Storage.open(store_path).list_keys(LEASES_PREFIX) == []


def test_a_lease_that_is_being_taken_at_the_end_is_released_too(tmp_path):
    for trial in range(5):
        with leases(str(tmp_path), LONG_LEASE_S) as a:
            streams = a.vacant(range(1000))
            taking = threading.Thread(target=lambda a=a, streams=streams: all(map(a.take, streams)))
            taking.start()
            wait_until(lambda a=a, trial=trial: a.holds(trial), None, "a lease")
        taking.join()
        assert not a.holds(999)
        assert Storage.open(str(tmp_path)).list_keys(LEASES_PREFIX) == []


def test_a_stream_stays_leased_for_longer_than_the_lease(tmp_path, clock):
    with leases(str(tmp_path), SHORT_LEASE_S) as a, leases(str(tmp_path), SHORT_LEASE_S) as b:
        assert take(a, 0)
        for _ in range(6):
            assert not b.vacant([0])
            clock.now += 0.9 * SHORT_LEASE_S
            wait_for_renewal(str(tmp_path), 0)
            assert a.holds(0)
        assert not b.vacant([0])


def test_only_one_of_many_processes_leases_a_stream(store_path):
    barrier = threading.Barrier(8)
    successes = []

    def contend(who: Leases):
        for stream in range(20):
            vacant = who.vacant([stream])
            barrier.wait(30)
            successes.extend((stream, who) for stream in vacant if who.take(stream))

    contenders = [Leases(store_path, lease_s=30) for _ in range(8)]
    threads = [threading.Thread(target=contend, args=(who,)) for who in contenders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(stream for stream, _ in successes) == list(range(20))
    for who in contenders:
        assert all(who.holds(stream) for stream, owner in successes if owner is who)
        who.close()


HOLDER = """
import sys, time
from pipeline.store.write.leases import Leases

leases = Leases(sys.argv[1], float(sys.argv[2]))
[stream] = leases.vacant([0])
print(leases.take(stream), flush=True)
while leases.holds(0):
    time.sleep(0.01)
leases.release(0)
print("lost", flush=True)
"""


@contextmanager
def holder(path, lease_s=LEASE_S):
    """A process that holds stream 0 as long as it can."""
    command = [sys.executable, "-c", HOLDER, path, str(lease_s)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "True\n"
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("is_on_this_host", [False, True])
def test_a_killed_process_is_noticed_at_once_on_its_host_and_after_the_lease_on_others(
    tmp_path, clock, is_on_this_host
):
    path, file = str(tmp_path), tmp_path / lease_key(0)
    with leases(path, LONG_LEASE_S) as a, holder(path, LONG_LEASE_S) as process:
        assert not take(a, 0)
        if not is_on_this_host:
            file.write_text(json.dumps(json.loads(file.read_text()) | {"pid_space": "another host's"}))
        process.kill()
        process.wait()
        if not is_on_this_host:
            assert not take(a, 0)
            clock.now = LONG_LEASE_S - 0.01
            assert not take(a, 0)
            clock.now = LONG_LEASE_S
        assert take(a, 0)
        assert a.holds(0)


def test_a_process_that_could_not_renew_its_lease_keeps_it_unless_another_took_it(tmp_path, caplog, clock):
    with leases(str(tmp_path), SHORT_LEASE_S) as a, leases(str(tmp_path), LONG_LEASE_S) as b:
        assert take(a, 0)
        for is_taken in (False, True):
            with a._lock:  # not during a renewal
                os.rename(tmp_path / "_jobs", tmp_path / "away")
                (tmp_path / "_jobs").write_text("in the way")
            caplog.clear()
            wait_until(lambda: "cannot renew the lease on stream 0: " in caplog.text, None, "the warning")
            with a._lock:
                os.remove(tmp_path / "_jobs")
                os.rename(tmp_path / "away", tmp_path / "_jobs")
                if is_taken:
                    assert not b.vacant([0])
                    clock.now += LONG_LEASE_S
                    assert take(b, 0)
            if not is_taken:
                wait_for_renewal(str(tmp_path), 0)
                assert a.holds(0)
        wait_until(lambda: not a.holds(0), None, "the takeover")
        assert "stream 0 was taken over by another process" in caplog.text
        a.release(0)
        assert b.holds(0)
        assert Storage.open(str(tmp_path)).list_keys(LEASES_PREFIX) == [lease_key(0)]


def test_a_lease_that_cannot_be_released_expires(tmp_path, caplog, clock):
    with leases(str(tmp_path), LONG_LEASE_S) as a, leases(str(tmp_path), LONG_LEASE_S) as b:
        assert take(b, 0)
        (tmp_path / "_jobs").rename(tmp_path / "away")
        (tmp_path / "_jobs").write_text("a file in the way")
        b.release(0)
        assert "cannot release the lease on stream 0, which will expire" in caplog.text
        (tmp_path / "_jobs").unlink()
        (tmp_path / "away").rename(tmp_path / "_jobs")
        assert not take(a, 0)
        clock.now = LONG_LEASE_S
        assert take(a, 0)


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"[" * 10**5, b"\xff", b"[]", b"{}", b'{"pid_space": 1}', b'{"pid_space": null, "pid": 4000000}'),
        *(b'{"pid_space": "HERE", "pid": 1e99}', b'{"pid_space": "HERE", "pid": "1"}', b'{"pid_space": "HERE"}'),
    ],
)
def test_any_other_content_of_a_lease_expires(tmp_path, content, clock):
    with leases(str(tmp_path), LONG_LEASE_S) as a, leases(str(tmp_path), LONG_LEASE_S) as b:
        assert take(b, 0)
        here = json.loads((tmp_path / lease_key(0)).read_bytes())["pid_space"]
        Storage.open(tmp_path).write(lease_key(100_000), content.replace(b"HERE", here.encode()))
        assert not take(a, 100_000)
        clock.now = LONG_LEASE_S
        assert take(a, 100_000)


class Deaf(Storage):
    """Storage that ignores a condition of writes, as some servers do."""

    ignores_absent = False

    def put(self, key, *parts):
        return bool(self.write(key, b"".join(parts))) if self.ignores_absent else super().put(key, *parts)

    def write(self, key, value, generation=None):
        is_ignored = self.ignores_absent if generation == NO_OBJECT else not self.ignores_absent
        return super().write(key, value, None if is_ignored else generation)


@pytest.mark.parametrize("ignored", ["absent", "equal"])
def test_storage_that_ignores_conditions_is_refused(tmp_path, ignored, monkeypatch):
    """Unless the user says that no other process writes."""
    monkeypatch.setattr(Deaf, "ignores_absent", ignored == "absent")
    storage = Deaf.open(f"memory://{tmp_path}")
    with leases(storage, LONG_LEASE_S) as a:
        with pytest.raises(StoreInvalid, match=r"ignores the conditions of writes.*run\.exclusive=true"):
            take(a, 0)
        with closing(Leases(storage, LONG_LEASE_S, is_exclusive=True)) as b:
            assert take(b, 1)
            assert b.holds(1)
    assert storage.list_keys() == []
