"""A job that is killed at any moment and restarted makes the store of an uninterrupted job."""

import random
import signal
import time

import pytest

from pipeline.core.errors import StoreMismatch
from pipeline.store import ActivationStore
from pipeline.store.format.commits import commit_key
from tests.jobs import (
    SMALL_JOB,
    assert_same_store,
    commits_held,
    committed,
    has_loaded,
    objects,
    run_and_signal,
    run_here,
    start,
    wait_for_blocks,
    wait_until,
    write_text,
)

NUM_BLOCKS = 43
LAST = (0, 19)


@pytest.fixture(scope="module")
def overrides(tmp_path_factory, compilation_cache):
    text = write_text(tmp_path_factory.mktemp("text"), files=4, documents=20)
    return [
        f"data.path={text}",
        "data.num_streams=3",
        *SMALL_JOB,
        compilation_cache,
    ]


@pytest.fixture(scope="module")
def reference(overrides, tmp_path_factory):
    path = tmp_path_factory.mktemp("reference") / "store"
    run_here(*overrides, f"store.path={path}")
    assert committed(path) == NUM_BLOCKS
    assert (path / commit_key(*LAST)).exists()
    return path


def kill_at_random_moments(overrides, path, kills: int, seed: int) -> None:
    """Repeatedly starts the job and kills it, during its start or shortly after its next blocks."""
    rng = random.Random(seed)
    for _ in range(kills):
        during_start = rng.randrange(4) == 0
        process = start(*overrides, f"store.path={path}", is_forked=not during_start)
        if during_start:
            library = rng.choice(["numpy", "jaxlib", "tensorstore"])
            wait_until(lambda pid=process.pid, library=library: has_loaded(pid, library), process, f"import {library}")
        else:
            wait_for_blocks(process, path, min(committed(path) + rng.choice([1, 1, 2]), NUM_BLOCKS - 1))
            time.sleep(rng.uniform(0, 0.05))
        process.kill()
        output, _ = process.communicate()
        assert process.returncode == -signal.SIGKILL, output


def assert_finishes_like(reference, overrides, path):
    run_here(*overrides, f"store.path={path}")
    assert_same_store(path, reference)


def test_kills_at_random_moments_leave_the_same_store(overrides, reference, tmp_path):
    with commits_held(tmp_path / "store", [LAST], *overrides):  # so that no run completes the store
        kill_at_random_moments(overrides, tmp_path / "store", kills=2, seed=1)
    assert_finishes_like(reference, overrides, tmp_path / "store")


@pytest.mark.slow
def test_twenty_kills_at_random_moments_leave_the_same_store(overrides, tmp_path):
    """On a longer text, so that the job still runs at every kill."""
    text = write_text(tmp_path / "text", files=4, documents=900)
    overrides = [*overrides, f"data.path={text}"]
    run_here(*overrides, f"store.path={tmp_path / 'reference'}")
    kill_at_random_moments(overrides, tmp_path / "store", kills=20, seed=0)
    assert_finishes_like(tmp_path / "reference", overrides, tmp_path / "store")


def test_a_stop_signal_commits_complete_blocks_and_exits_42(overrides, reference, tmp_path):
    store, num_blocks = tmp_path / "store", 0
    for number in (signal.SIGTERM, signal.SIGINT):
        wanted = num_blocks + 3
        result = run_and_signal(number, store, wanted, (0, wanted), *overrides)
        assert result.returncode == 42, result.stdout
        assert f"stopped by {number.name}" in result.stdout
        assert "Run the same command again to resume" in result.stdout
        num_blocks = committed(store)
        assert wanted <= num_blocks < NUM_BLOCKS
    assert_finishes_like(reference, overrides, store)


def test_a_finished_store_is_left_alone(overrides, reference, caplog):
    before = objects(reference)
    with caplog.at_level("INFO", logger="pipeline"):
        run_here(*overrides, f"store.path={reference}", "run.max_tokens=100")
        assert "note  " not in caplog.text
        run_here(*overrides, f"store.path={reference}")
    assert any("nothing to do" in message for message in caplog.messages)
    assert objects(reference) == before
    subject, _, program = caplog.messages[-1].partition(" To read it: ")
    opened = {}
    exec(program, opened)
    assert subject == f"{reference} holds {opened['store'].num_tokens:,} tokens."


def test_the_refusal_of_another_configuration_names_every_key(overrides, reference):
    before = objects(reference)
    with pytest.raises(StoreMismatch) as caught:
        run_here(*overrides, f"store.path={reference}", "capture.layers=[2]", "batch.packing=pad")
    assert caught.value.exit_code == 2
    for part in ("batch.packing", "'pack'", "'pad'", "capture.arrays", "blocks.2.resid_post", "blocks.1.resid_post"):
        assert part in str(caught.value)
    assert objects(reference) == before


def test_a_longer_run_extends_a_finished_store(overrides, reference, tmp_path, caplog):
    caplog.set_level("INFO", logger="pipeline")
    store = f"store.path={tmp_path / 'store'}"
    run_here(*overrides, store, "run.max_tokens=1200")
    before = ActivationStore.open(tmp_path / "store")
    assert before.complete
    caplog.clear()
    run_here(*overrides, store)
    added = ActivationStore.open(tmp_path / "store").num_tokens - before.num_tokens
    assert f"{added:,} tokens in" in caplog.text  # nothing is computed again
    assert_same_store(tmp_path / "store", reference)


def test_a_stop_signal_is_obeyed_while_the_model_is_loaded_and_compiled(overrides, tmp_path):
    """Nothing is stored yet, and the exit code says that the job can be resumed."""
    process = start(*overrides, f"store.path={tmp_path / 'store'}")
    wait_until((tmp_path / "store/_data/manifest.json").exists, process, "the list of input files")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 42, output
    assert committed(tmp_path / "store") == 0
