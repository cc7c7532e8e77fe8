"""A job that is killed at any moment and restarted makes the store of an uninterrupted job."""

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest

from pipeline.core.errors import Interrupted, StoreMismatch
from pipeline.store import ActivationStore
from tests.jobs import (
    assert_same_store,
    commits_held,
    committed,
    has_loaded,
    objects,
    run_here,
    start,
    wait_for_blocks,
    wait_until,
    write_text,
)

pytestmark = pytest.mark.heavy
NUM_BLOCKS = 43


def kill_at_random_moments(path: Path, kills: int, seed: int, *overrides: str) -> None:
    """Repeatedly starts the job and kills it, during its start or shortly after its next blocks."""
    rng = random.Random(seed)
    for _ in range(kills):
        during_start = rng.randrange(4) == 0
        process = start(*overrides, f"store.path={path}")
        if during_start:
            library = rng.choice(["numpy", "jaxlib", "tensorstore"])
            wait_until(lambda pid=process.pid, library=library: has_loaded(pid, library), process, f"import {library}")
        else:
            wait_for_blocks(process, path, min(committed(path) + rng.choice([1, 1, 2]), NUM_BLOCKS - 1))
            time.sleep(rng.uniform(0, 0.05))
        process.kill()
        output, _ = process.communicate()
        assert process.returncode == -signal.SIGKILL, output


@pytest.mark.slow
def test_twenty_kills_at_random_moments_leave_the_same_store(small_job, tmp_path):
    """On a longer text, so that the job still runs at every kill."""
    job = [*small_job, f"data.path={write_text(tmp_path / 'text', files=4, documents=900)}"]
    run_here(*job, f"store.path={tmp_path / 'reference'}")
    kill_at_random_moments(tmp_path / "store", 20, 0, *job)
    run_here(*job, f"store.path={tmp_path / 'store'}")
    assert_same_store(tmp_path / "store", tmp_path / "reference")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_commits_complete_blocks_and_exits_42(number, small_job, small_store, tmp_path):
    """And releases the leases, so that the next run need not wait for them."""
    store, job = tmp_path / "store", [*small_job, "run.lease_s=600"]
    with commits_held(store, [(0, 3)], *job) as release:

        def stop() -> None:
            wait_until(lambda: committed(store) >= 3, None, "three blocks")
            os.kill(os.getpid(), number)
            release()

        before = signal.signal(number, lambda *_: None)  # the tests go on if the job does not handle it
        thread = threading.Thread(target=stop)
        thread.start()
        try:
            with pytest.raises(Interrupted, match=rf"stopped by {number.name}.*Run the same command again") as caught:
                run_here(*job, f"store.path={store}")
        finally:
            thread.join()
            signal.signal(number, before)
    assert caught.value.exit_code == 42
    assert not list(store.glob("_jobs/lease-*.json"))
    assert 3 <= committed(store) < NUM_BLOCKS == committed(small_store)
    run_here(*job, f"store.path={store}")
    assert_same_store(store, small_store)


def test_a_finished_store_is_left_alone(small_job, small_store, caplog):
    before = objects(small_store)
    with caplog.at_level("INFO", logger="pipeline"):
        run_here(*small_job, f"store.path={small_store}", "run.max_tokens=100")
        assert "note  " not in caplog.text
        run_here(*small_job, f"store.path={small_store}")
    assert any("nothing to do" in message for message in caplog.messages)
    assert objects(small_store) == before
    subject, _, program = caplog.messages[-1].partition(" To read it: ")
    opened = {}
    exec(program, opened)
    assert subject == f"{small_store} holds {opened['store'].num_tokens:,} tokens."


def test_the_refusal_of_another_configuration_names_every_key(small_job, small_store):
    before = objects(small_store)
    with pytest.raises(StoreMismatch) as caught:
        run_here(*small_job, f"store.path={small_store}", "capture.layers=[2]", "batch.packing=pad")
    assert caught.value.exit_code == 2
    for part in ("batch.packing", "'pack'", "'pad'", "capture.arrays", "blocks.2.resid_post", "blocks.1.resid_post"):
        assert part in str(caught.value)
    assert objects(small_store) == before


def test_a_longer_run_extends_a_finished_store(small_job, small_store, tmp_path, caplog):
    caplog.set_level("INFO", logger="pipeline")
    store = f"store.path={tmp_path / 'store'}"
    run_here(*small_job, store, "run.max_tokens=1200")
    before = ActivationStore.open(tmp_path / "store")
    assert before.complete
    caplog.clear()
    run_here(*small_job, store, "run.max_tokens=1000000")
    added = ActivationStore.open(tmp_path / "store").num_tokens - before.num_tokens
    assert f"{added:,} tokens in" in caplog.text  # nothing is computed again
    caplog.clear()
    run_here(*small_job, store)  # it only raises the target
    assert "nothing to do" in caplog.text
    assert_same_store(tmp_path / "store", small_store)


def test_a_stop_signal_is_obeyed_while_the_model_is_loaded_and_compiled(small_job, tmp_path):
    """Nothing is stored yet, and the exit code says that the job can be resumed."""
    process = start(*small_job, f"store.path={tmp_path / 'store'}")
    wait_until((tmp_path / "store/_jobs/manifest.json").exists, process, "the list of input files")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 42, output
    assert committed(tmp_path / "store") == 0
