"""Claims on streams: each has one owner at a time, even if owners die, sleep or cannot reach the store."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager

import pytest

from pipeline.core.errors import StoreInvalid
from pipeline.store.io.storage import Storage
from pipeline.store.write.claims import COMPLETION, Claims, claim_key, delete_claims, held_claims, read_claims
from tests.forking import Forked
from tests.store.emulators import new_bucket

LEASE_S = 2.0  # on a busy machine a thread may have to wait for half a second
LONG_LEASE_S = 600.0  # nothing is renewed during a test
SHORT_LEASE_S = 0.06  # with the fixture `clock`: renewals are frequent, and leases end only when a test says so


@contextmanager
def claims(path, lease_s=LEASE_S):
    with closing(Claims(path, lease_s)) as opened:
        yield opened


def claim(who: Claims, stream: int) -> bool:
    return any(who.claim(vacancy) for vacancy in who.vacancies([stream]))


def wait_until(condition, timeout_s=60.0) -> None:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s
        time.sleep(0.005)


def wait_for_renewal(path: str, stream: int) -> None:
    """Waits for two writes of the claim by its owner: the second renewal began after this call."""

    def number() -> int:
        return json.loads(Storage.open(path).read(claim_key(stream)))["number"]

    first = number()
    wait_until(lambda: number() >= first + 2)


class Clock:
    """Replaces the module `time` for this process's claims."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("pipeline.store.write.claims.time", clock)
    return clock


def test_a_claimed_stream_cannot_be_claimed_until_it_is_released(store_path):
    with claims(store_path) as a, claims(store_path) as b:
        assert claim(a, 3)
        assert not claim(a, 3)
        assert not claim(b, 3)
        assert claim(b, 4)
        assert (a.holds(3), a.holds(4), b.holds(3), b.holds(4)) == (True, False, False, True)
        a.release(3)
        assert not a.holds(3)
        assert claim(b, 3)
        assert b.holds(3)


def test_a_claim_is_kept_for_longer_than_its_lease(tmp_path, clock):
    with claims(str(tmp_path), SHORT_LEASE_S) as a, claims(str(tmp_path), SHORT_LEASE_S) as b:
        assert claim(a, 0)
        for _ in range(6):
            assert not b.vacancies([0])
            clock.now += 0.45 * SHORT_LEASE_S
            wait_for_renewal(str(tmp_path), 0)
            assert a.holds(0)
        assert not b.vacancies([0])


def test_only_one_of_many_simultaneous_claims_succeeds(store_path):
    barrier = threading.Barrier(8)
    successes = []

    def contend(who: Claims):
        for stream in range(20):
            found = who.vacancies([stream])
            barrier.wait(30)
            successes.extend((stream, who.owner) for vacancy in found if who.claim(vacancy))

    contenders = [Claims(store_path, lease_s=30) for _ in range(8)]
    threads = [threading.Thread(target=contend, args=(who,)) for who in contenders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(stream for stream, _ in successes) == list(range(20))
    for who in contenders:
        assert all(who.holds(stream) for stream, owner in successes if owner == who.owner)
        who.close()


def test_closing_releases_everything(store_path):
    with claims(store_path, LONG_LEASE_S) as a:
        assert all(claim(a, stream) for stream in range(3))
    with claims(store_path, LONG_LEASE_S) as b:
        assert all(claim(b, stream) for stream in range(3))


HOLDER = """
import sys, time
from pipeline.store.write.claims import Claims

claims = Claims(sys.argv[1], float(sys.argv[2]))
[vacancy] = claims.vacancies([0])
print(claims.claim(vacancy), flush=True)
while claims.holds(0):
    time.sleep(0.01)
claims.release(0)
print("lost", flush=True)
"""


@contextmanager
def holder(path, lease_s=LEASE_S):
    """A process that holds stream 0 as long as it can."""
    command = [sys.executable, "-c", HOLDER, path, str(lease_s)]
    process = Forked(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "True\n"
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("own_lease_s", [LEASE_S, LONG_LEASE_S])
def test_the_claim_of_a_killed_process_expires_after_its_lease(tmp_path, own_lease_s, clock):
    path = str(tmp_path)
    with claims(path, own_lease_s) as a, holder(path, LONG_LEASE_S) as process:
        process.kill()
        process.wait()
        assert not claim(a, 0)
        clock.now = LONG_LEASE_S - 0.01
        assert not claim(a, 0)
        clock.now = LONG_LEASE_S
        assert claim(a, 0)
        assert a.holds(0)


def test_a_process_that_slept_too_long_notices_that_it_lost_its_claim(tmp_path, clock):
    path = str(tmp_path)

    def take_over() -> bool:
        clock.now += LEASE_S  # the process has its own clock
        return claim(a, 0)

    with claims(path, SHORT_LEASE_S) as a, holder(path) as process:
        process.send_signal(signal.SIGSTOP)
        wait_until(take_over)
        process.send_signal(signal.SIGCONT)
        assert process.stdout.readline() == "lost\n"
        wait_for_renewal(path, 0)
        assert a.holds(0)


def test_an_owner_that_cannot_renew_gives_up_before_others_may_claim(tmp_path, caplog, clock):
    with claims(str(tmp_path), SHORT_LEASE_S) as a:
        assert claim(a, 0)
        with a._leases[0].lock:  # not during a renewal
            os.rename(tmp_path / "_claims", tmp_path / "away")
            (tmp_path / "_claims").write_text("in the way")
        clock.now = 0.49 * SHORT_LEASE_S
        assert a.holds(0)
        wait_until(lambda: "cannot renew the claim on stream 0: " in caplog.text)
        clock.now = 0.5 * SHORT_LEASE_S
        assert not a.holds(0)
        os.remove(tmp_path / "_claims")
        os.rename(tmp_path / "away", tmp_path / "_claims")
        time.sleep(SHORT_LEASE_S)
        assert not a.holds(0), "what was lost stays lost, although the store is back"
        assert not a.vacancies([0])
        a.release(0)
        assert claim(a, 0), "nobody took it meanwhile"
    assert f"could not be renewed for {SHORT_LEASE_S / 2:g} s" in caplog.text


def test_deleting_claims_spares_those_renewed_since_they_were_read(store_path, clock):
    storage = Storage.open(store_path)
    with claims(store_path, lease_s=0.6) as a:
        assert claim(a, 0)
        before = read_claims(storage)
        wait_until(lambda: read_claims(storage) != before)
        delete_claims(storage, before)
        assert storage.list_keys("_claims/") == [claim_key(0)]
        wait_until(lambda: not delete_claims(storage, read_claims(storage)) and not storage.list_keys("_claims/"))
        wait_until(lambda: not a.holds(0))
    assert storage.list_keys("_claims/") == []


def test_finished_streams_are_marked_until_the_marks_are_deleted(store_path):
    storage = Storage.open(store_path)
    with claims(store_path) as a, claims(store_path) as b:
        assert all(claim(a, stream) for stream in range(4))
        for stream, target in enumerate((1000, 2000, "all")):
            a.finish(stream, target)
        assert [b.list_streams(target) for target in (1000, 1001, 2001, "all")] == [
            ({3}, finished) for finished in ({0, 1, 2}, {1, 2}, {2}, {2})
        ]
        assert not a.holds(0)
        assert held_claims(store_path) == {3: a.owner}
        a.release(3)
        before = read_claims(storage)
        assert claim(b, 3)
        delete_claims(storage, before)
        assert storage.list_keys("_claims/") == [claim_key(3)]


def test_marking_a_stream_that_another_took_over_keeps_its_claim(tmp_path):
    with claims(str(tmp_path), LONG_LEASE_S) as a, claims(str(tmp_path), LONG_LEASE_S) as b:
        assert claim(a, 0)
        Storage.open(tmp_path).write(claim_key(0), None)
        assert claim(b, 0)
        a.finish(0, "all")
        assert held_claims(str(tmp_path)) == {0: b.owner}
        assert b.list_streams("all") == ({0}, {0})


def test_the_claim_on_completion_is_deleted_only_by_its_owner(store_path):
    storage = Storage.open(store_path)
    with claims(store_path, LONG_LEASE_S) as a, claims(store_path, LONG_LEASE_S) as b:
        assert claim(a, COMPLETION)
        assert claim(a, 0)
        assert not claim(b, COMPLETION)
        assert b.list_streams("all") == ({0}, set())
        assert held_claims(store_path) == {0: a.owner, COMPLETION: a.owner}
        delete_claims(storage, read_claims(storage))
        assert held_claims(store_path) == {COMPLETION: a.owner}
        a.withdraw(COMPLETION)
        assert storage.list_keys("_claims/") == []


def test_a_claim_that_cannot_be_withdrawn_is_left_to_expire(tmp_path, caplog, clock):
    with claims(str(tmp_path), LONG_LEASE_S) as a, claims(str(tmp_path), LONG_LEASE_S) as b:
        assert claim(b, COMPLETION)
        (tmp_path / "_claims").rename(tmp_path / "away")
        (tmp_path / "_claims").write_text("a file in the way")
        b.withdraw(COMPLETION)
        assert "cannot release the claim on the completion of the store, which will expire" in caplog.text
        (tmp_path / "_claims").unlink()
        (tmp_path / "away").rename(tmp_path / "_claims")
        assert held_claims(str(tmp_path)) == {COMPLETION: b.owner}
        assert not claim(a, COMPLETION)
        clock.now = LONG_LEASE_S
        assert claim(a, COMPLETION)


def test_an_object_that_is_no_claim_is_reported(store_path):
    Storage.open(store_path).write(claim_key(2), b"{}")
    with (
        claims(store_path) as a,
        pytest.raises(StoreInvalid, match=r"stream-00002\.json is not a claim.*Delete"),
    ):
        a.vacancies([2])
    assert Storage.open(store_path).read(claim_key(2)) == b"{}"


def test_held_claims_have_the_numbers_of_their_streams(store_path):
    with claims(store_path) as a:
        for stream in (0, 99_999, 100_000, 1_234_567):
            assert claim(a, stream)
        Storage.open(store_path).write("_claims/stream-notes.json", b"mine")
        assert held_claims(store_path) == dict.fromkeys((0, 99_999, 100_000, 1_234_567), a.owner)
    assert held_claims(store_path) == {}


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"[" * 10**5, b"5", b"[]"),
        b'{"owner": 1, "held": true, "lease_s": 1, "number": 1}',
        b'{"owner": "a", "held": 1, "lease_s": 1, "number": 1}',
        b'{"owner": "a", "held": true, "lease_s": "1", "number": 1}',
        b'{"owner": "a", "held": true, "lease_s": NaN, "number": 1}',
        b'{"owner": "a", "held": true, "lease_s": 1}',
    ],
)
def test_damaged_claims_are_reported(tmp_path, text):
    Storage.open(tmp_path).write(claim_key(100_000), text)
    with pytest.raises(StoreInvalid, match=r"stream-100000\.json.*Delete it"):
        held_claims(str(tmp_path))
    with claims(str(tmp_path)) as a, pytest.raises(StoreInvalid, match=r"stream-100000\.json.*Delete it"):
        a.vacancies([100_000])


def test_claims_work_on_s3(s3, clock):
    path = f"{new_bucket('s3', s3.backend)}/store"
    with claims(path, SHORT_LEASE_S) as a, claims(path) as b:
        assert claim(a, 0)
        assert claim(b, 1)
        for _ in range(3):
            clock.now += 0.45 * SHORT_LEASE_S
            wait_for_renewal(path, 0)
        assert a.holds(0)
        assert not claim(b, 0)
        a.release(0)
        assert claim(b, 0)
    delete_claims(Storage.open(path), read_claims(Storage.open(path)))
    assert Storage.open(path).list_keys("_claims/") == []


def test_storage_that_ignores_conditions_on_writes_is_refused(gcs):
    """As the emulator does without the proxy. Google Cloud Storage honours them."""
    gcs.reset(conditions=False)
    path = f"{new_bucket('gs', gcs.backend)}/store"
    with pytest.raises(StoreInvalid, match=r"does not support conditional writes.*run\.worker_index"):
        Claims(path, LEASE_S)
    assert Storage.open(path).list_keys("_claims/") == []
