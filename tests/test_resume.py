"""A job that is killed at any moment and started again ends in the store of a job that was never interrupted."""

import json
import random
import signal

import pytest

from tests.jobs import assert_same_store, objects, run, run_and_signal, write_text

MIN_BLOCKS = 30


@pytest.fixture(scope="module")
def overrides(tmp_path_factory):
    text = write_text(tmp_path_factory.mktemp("text"), files=4, documents=60)
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
    assert len(list((path / "_commits").rglob("*.json"))) >= MIN_BLOCKS
    return path


def interrupted_run(overrides, path, kills: int, seed: int) -> list[int]:
    """Starts the job until it finishes; the first `kills` times it is killed at a random moment."""
    rng = random.Random(seed)
    codes = []
    for _ in range(kills):
        codes.append(run_and_signal(signal.SIGKILL, rng.uniform(1.0, 9.0), *overrides, f"store.path={path}").returncode)
    codes.append(run(*overrides, f"store.path={path}").returncode)
    return codes


def test_three_kills_leave_the_same_store(overrides, reference, tmp_path):
    codes = interrupted_run(overrides, tmp_path / "store", kills=3, seed=0)
    assert codes[-1] == 0
    assert_same_store(tmp_path / "store", reference)


@pytest.mark.slow
def test_twenty_kills_leave_the_same_store(overrides, reference, tmp_path):
    codes = interrupted_run([*overrides], tmp_path / "store", kills=20, seed=1)
    assert codes[-1] == 0
    assert codes.count(-signal.SIGKILL) >= 10, "most kills must hit a running job"
    assert_same_store(tmp_path / "store", reference)


def test_sigterm_commits_what_is_complete_and_exits_42(overrides, reference, tmp_path):
    for after_s in (6.0, 7.0, 8.0):
        result = run_and_signal(signal.SIGTERM, after_s, *overrides, f"store.path={tmp_path / 'store'}")
        if result.returncode == 42:
            break
    assert result.returncode == 42, result.stdout
    assert "Run the same command again to resume" in result.stdout
    assert run(*overrides, f"store.path={tmp_path / 'store'}").returncode == 0
    assert_same_store(tmp_path / "store", reference)


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
