"""Jobs whose documents the model writes: interruptions, divisions and proposals do not change the store, which tells
prompts from completions."""

import json
import random
import signal
from collections import Counter
from pathlib import Path

import pytest

from pipeline.config.composing import PACKAGE
from pipeline.core.errors import StoreMismatch
from pipeline.data.text.tokenizer import load_tokenizer
from pipeline.store import ActivationStore, TokenFilter
from pipeline.store.check.verifying import verify_store
from pipeline.store.format.commits import read_commit_records
from pipeline.store.generated.documents import group_key
from pipeline.store.inspection.summary import store_facts
from tests.jobs import (
    GENERATING_JOB,
    assert_same_store,
    children,
    committed,
    create_store,
    killed_after,
    local_processes,
    num_groups,
    read_until,
    rest_of_output,
    run,
    run_here,
    wait_until,
    write_text,
    writes_held,
)
from tests.store.written_check import assert_well_written

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def overrides(tmp_path_factory, compilation_cache) -> list[str]:
    """Two documents for each prompt."""
    text = write_text(tmp_path_factory.mktemp("text"), files=4, documents=7, max_characters=150)
    return [*GENERATING_JOB, f"data.path={text}", "data.samples=2", "data.stop=[th,ing]", compilation_cache]


@pytest.fixture(scope="module")
def reference(overrides, tmp_path_factory) -> Path:
    """The store of an undisturbed job."""
    path = tmp_path_factory.mktemp("reference") / "store"
    run_here(*overrides, f"store.path={path}")
    return path


def test_documents_are_prompts_and_completions(reference):
    assert verify_store(str(reference)) == []
    assert_well_written(str(reference))
    store = ActivationStore.open(reference)
    columns = ["document", "id", "sample", "n_tokens", "n_prompt", "n_completion", "finish_reason"]
    rows = store.documents().group_by(columns).aggregate([]).to_pylist()
    records = list(read_commit_records(store.storage, [(block.stream, block.block) for block in store.blocks]))
    assert len(rows) == sum(record.next["ordinal"] for record in records if record.exhausted) > 50
    assert {row["finish_reason"] for row in rows} == {"stop", "length"}
    tokenizer, samples = load_tokenizer(str(PACKAGE / "assets" / "tiny-qwen2")), Counter()
    for row in rows:
        prompt, _, sample = row["id"].rpartition("/")
        assert row["sample"] == int(sample)
        samples[prompt] += 1 + 9 * row["sample"]
        assert row["n_tokens"] == row["n_prompt"] + row["n_completion"]
        completion = store.document(row["document"]).tokens[row["n_prompt"] :]
        whole, before = (tokenizer.decode(tokens) for tokens in (completion, completion[:-1]))
        has_stop = whole.endswith(".") or "th" in whole or "ing" in whole
        assert has_stop == (row["finish_reason"] == "stop")
        assert has_stop or row["n_completion"] == 16
        assert not any(stop in before for stop in ("th", "ing"))
    assert {*samples.values()} == {1 + 10}  # the samples 0 and 1
    reasons = {skip["reason"] for record in records for skip in record.skipped}
    assert {reason.partition(" has ")[0] for reason in reasons} == {"the prompt"}
    logs = [json.loads(file.read_text().splitlines()[-1]) for file in reference.glob("_jobs/*.jsonl")]
    (measured,) = (log for log in logs if "completions" in log)
    assert measured["prompts"] == len(samples)
    assert measured["completions"] == len(rows)
    assert measured["tokens"] == sum(row["n_completion"] for row in rows)
    assert 0 < measured["padding"] < 1


def test_the_reader_selects_prompts_or_completions(reference):
    store = ActivationStore.open(reference)
    rows = {row["document"]: row for row in store.documents().to_pylist()}
    whole = {number: store.document(number).tokens for number in rows}
    for part in ("prompt", "completion"):
        found: dict[int, list[int]] = {number: [] for number in rows}
        for batch in store.batches("blocks.1.resid_post", 64, token_filter=TokenFilter(part=part)):
            for number, token in zip(batch.documents.tolist(), batch.tokens.tolist(), strict=True):
                found[number].append(token)
        for number, row in rows.items():
            expected = whole[number][: row["n_prompt"]] if part == "prompt" else whole[number][row["n_prompt"] :]
            assert found[number] == expected.tolist()


def test_an_int8_cache_has_its_error_in_the_store_which_refuses_another_cache(overrides, reference, tmp_path):
    path = tmp_path / "store"
    int8 = [*overrides, f"store.path={path}", "data.cache_dtype=int8", "run.max_tokens=500"]
    run_here(*int8, "data.rows=3")
    store = ActivationStore.open(path)
    assert store.cache_error.keys() == {"blocks.1.resid_post", "blocks.3.resid_post", "final_norm"}
    assert all(0.0005 < e < 0.05 for error in store.cache_error.values() for e in error.values())
    assert str(store.cache_error["final_norm"]["relative_error"]) in store_facts(store)["int8 cache"]
    assert ActivationStore.open(reference).cache_error is None
    root = (path / "zarr.json").read_text()
    for change, message in (
        ("data.cache_dtype=same", "has 'int8', this run asks for 'same'"),
        ("data.samples=3", "has 2"),
    ):
        with pytest.raises(StoreMismatch, match=f"{change.partition('=')[0]}: the store {message}"):
            run_here(*int8, change)
    assert (path / "zarr.json").read_text() == root


def test_a_job_stopped_while_it_generates_makes_the_same_store(overrides, reference, tmp_path):
    """Two processes propose tokens, and one gets SIGTERM. A job without proposals finishes."""
    store = tmp_path / "store"
    job = [*overrides, "data.speculate=3", f"store.path={store}"]
    create_store(*job)
    held = [group_key(stream, 4) for stream in range(3)]
    with writes_held(store, held) as release, local_processes(2, 1, *job) as launcher:
        wait_until(lambda: num_groups(store) >= 7, launcher, "3 groups of a second stream")
        children(launcher)[1].send_signal(signal.SIGTERM)
        with killed_after(300, launcher):
            read_until("SIGTERM caught", launcher)
        release()
        output = rest_of_output(launcher, 60)
    assert launcher.returncode == 42, output
    assert output.count("Interrupted: stopped by SIGTERM while generating") == 2
    assert 7 <= num_groups(store) < num_groups(reference)
    run_here(*overrides, f"store.path={store}")
    assert_same_store(store, reference)


def test_a_budget_is_met_and_can_be_raised(overrides, reference, tmp_path):
    store = tmp_path / "store"
    run_here(*overrides, f"store.path={store}", "run.max_tokens=1500")
    opened = ActivationStore.open(store)
    assert opened.complete
    assert 1500 <= opened.num_tokens < 1500 + 3 * 4 * 64
    assert num_groups(store) < num_groups(reference) - 10
    run_here(*overrides, f"store.path={store}")
    assert_same_store(store, reference)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_five_kills_at_random_moments_leave_the_same_store(overrides, reference, tmp_path, processes):
    rng, store = random.Random(processes), tmp_path / "store"
    for _ in range(5):
        progress, wanted = num_groups(store) + committed(store), rng.randrange(1, 10)
        with local_processes(processes, 1, *overrides, f"store.path={store}") as launcher:
            aim = progress + wanted
            wait_until(
                lambda aim=aim: num_groups(store) + committed(store) >= aim, launcher, f"{aim} groups and blocks"
            )
            assert launcher.poll() is None
            for child in children(launcher):
                child.kill()
            launcher.communicate()
    result = run(*overrides, f"store.path={store}")
    assert result.returncode == 0, result.stderr
    assert_same_store(store, reference)
