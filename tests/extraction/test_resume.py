"""A job that is killed at any moment and started again ends in the store of a job that was never interrupted."""

import json
import random
import signal
import time

import pytest

from tests.jobs import assert_same_store, committed, objects, run, run_and_signal, start, write_text

MIN_BLOCKS = 30


@pytest.fixture(scope="module")
def overrides(tmp_path_factory):
    text = write_text(tmp_path_factory.mktemp("text"), files=4, documents=120)
    return [
        f"data.path={text}",
        "data.num_streams=3",
        "batch.rows=4",
        "batch.length=128",
        "capture.layers=[1,3]",
        "capture.sites=[resid_post,attn_out]",
        "store.shard_mib=0.25",
        "run.metrics_interval_s=0.2",
    ]


@pytest.fixture(scope="module")
def reference(overrides, tmp_path_factory):
    path = tmp_path_factory.mktemp("reference") / "store"
    result = run(*overrides, f"store.path={path}")
    assert result.returncode == 0, result.stderr
    assert committed(path) >= MIN_BLOCKS
    return path


def kill_at_random_moments(overrides, path, kills: int, seed: int) -> int:
    """Starts the job again and again and kills it: during its start, or a moment after its next blocks.

    Returns how many of the kills hit a running job.
    """
    rng = random.Random(seed)
    hits = 0
    for _ in range(kills):
        process = start(*overrides, f"store.path={path}")
        blocks, wanted = committed(path), rng.choice([0, 1, 1, 2])
        while wanted and committed(path) < blocks + wanted and process.poll() is None:
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.05) if wanted else rng.uniform(0, 6))
        process.kill()
        hits += process.wait() == -signal.SIGKILL
    return hits


def assert_finishes_like(reference, overrides, path):
    result = run(*overrides, f"store.path={path}")
    assert result.returncode == 0, result.stderr
    assert_same_store(path, reference)


def test_kills_at_random_moments_leave_the_same_store(overrides, reference, tmp_path):
    assert kill_at_random_moments(overrides, tmp_path / "store", kills=4, seed=0) >= 3
    assert_finishes_like(reference, overrides, tmp_path / "store")


@pytest.mark.slow
def test_twenty_kills_at_random_moments_leave_the_same_store(overrides, tmp_path):
    """On a longer text, so that twenty kills find the job running."""
    text = write_text(tmp_path / "text", files=4, documents=900)
    overrides = [*overrides, f"data.path={text}"]
    assert run(*overrides, f"store.path={tmp_path / 'reference'}").returncode == 0
    assert kill_at_random_moments(overrides, tmp_path / "store", kills=20, seed=1) == 20
    assert_finishes_like(tmp_path / "reference", overrides, tmp_path / "store")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_commits_what_is_complete_and_exits_42(overrides, reference, tmp_path, number):
    result = run_and_signal(number, tmp_path / "store", 3, *overrides)
    assert result.returncode == 42, result.stdout
    assert f"stopped by {number.name}" in result.stdout
    assert "Run the same command again to resume" in result.stdout
    assert 3 <= committed(tmp_path / "store") < committed(reference)
    assert_finishes_like(reference, overrides, tmp_path / "store")


def test_a_finished_store_is_left_alone(overrides, reference):
    before = objects(reference)
    result = run(*overrides, f"store.path={reference}")
    assert result.returncode == 0
    assert "nothing to do" in result.stderr
    assert objects(reference) == before


def test_another_configuration_is_refused_key_by_key(overrides, reference):
    before = objects(reference)
    result = run(*overrides, f"store.path={reference}", "capture.layers=[2]", "batch.packing=pad")
    assert result.returncode == 2
    for part in ("batch.packing", "'pack'", "'pad'", "capture.arrays", "blocks.2.resid_post", "blocks.1.resid_post"):
        assert part in result.stderr
    assert objects(reference) == before


def test_a_longer_run_extends_a_finished_store(overrides, reference, tmp_path):
    store = f"store.path={tmp_path / 'store'}"
    assert run(*overrides, store, "run.max_tokens=5000").returncode == 0
    state = json.loads((tmp_path / "store" / "zarr.json").read_text())["attributes"]["activation_store"]
    assert state["complete"]
    assert run(*overrides, store).returncode == 0
    extended, whole = objects(tmp_path / "store"), objects(reference)
    for stores in (extended, whole):
        stores.pop("zarr.json")  # holds run.max_tokens of the run that created the store
    assert extended == whole


def test_a_stop_signal_is_obeyed_while_the_model_is_loaded_and_compiled(overrides, tmp_path):
    """Long before the first block: nothing is stored, and the exit code says that it can be run again."""
    process = start(*overrides, f"store.path={tmp_path / 'store'}")
    while not (tmp_path / "store" / "zarr.json").exists() and process.poll() is None:
        time.sleep(0.002)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 42, output
    assert committed(tmp_path / "store") == 0
