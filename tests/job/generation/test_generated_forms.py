"""Jobs that write several documents for each prompt, keep what they compute while decoding, and grade answers."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from pipeline.config import composing
from pipeline.core.errors import CheckpointError, ConfigError, InputError
from pipeline.store import ActivationStore
from pipeline.store.check.verifying import verify_store
from tests.jobs import (
    GENERATING_JOB,
    num_groups,
    run_here,
    write_text,
)

pytestmark = pytest.mark.heavy
ASSETS = composing.PACKAGE / "assets" / "tiny-qwen2"


@pytest.fixture(scope="module")
def overrides(tmp_path_factory, compilation_cache) -> list[str]:
    text = write_text(tmp_path_factory.mktemp("text"), files=4, documents=6, max_characters=150)
    return [*GENERATING_JOB, f"data.path={text}", compilation_cache]


def test_beams_are_documents_with_scores(overrides, tmp_path):
    options = [*overrides, "data.temperature=0", "data.seed=0", "data.beams=2", "data.group=5", "data.max_new_tokens=8"]
    path = tmp_path / "store"
    run_here(*options, f"store.path={path}", "run.max_tokens=400")
    num_begun = num_groups(path)
    run_here(*options, f"store.path={path}")
    assert 0 < num_begun < num_groups(path)
    assert verify_store(str(path)) == []
    scores: dict[str, list[float]] = {}
    rows = {row["document"]: row for row in ActivationStore.open(path).documents().to_pylist()}
    for _, row in sorted(rows.items()):
        prompt, _, beam = row["id"].rpartition("/")
        assert row["sample"] == int(beam) == len(scores.setdefault(prompt, []))
        scores[prompt].append(row["score"])
    assert len(scores) > 10
    assert all(len(each) == 2 and 0 > each[0] >= each[1] for each in scores.values())
    refused = {
        "data.rows=5": r"data\.rows = 5 is 5 on each device, expected a multiple of data\.beams = 2",
        "data.stop=[x]": r"data\.beams = 2 with data\.stop",
        "capture.when=decode": r"data\.beams = 2 with capture\.when=decode",
        "data.temperature=1": r"data\.beams is 2, but has an effect only with data\.temperature=0",
    }
    for option, message in refused.items():
        with pytest.raises(ConfigError, match=message):
            run_here(*options, "store.path=/nowhere", option)


def test_activations_kept_while_decoding_equal_those_of_the_documents(overrides, tmp_path):
    """Some documents have two windows. A job resumes with the activations that it kept."""
    float32 = [*overrides, "capture.dtype=float32", "batch.rows=2", "batch.length=96"]
    run_here(*float32, f"store.path={tmp_path / 'document'}")
    kept = tmp_path / "kept"
    keeping = [*float32, "capture.when=decode", "data.speculate=2"]
    run_here(*keeping, f"store.path={kept}", "run.max_tokens=700")
    assert num_groups(kept) > 0  # with documents for later blocks
    run_here(*keeping, f"store.path={kept}")
    assert 0 < num_groups(kept) <= 3  # the streams' last groups, which have documents for no block
    assert verify_store(str(kept)) == []
    expected, found = ActivationStore.open(tmp_path / "document"), ActivationStore.open(kept)
    np.testing.assert_array_equal(found.read_tokens(found.rows).tokens, expected.read_tokens(expected.rows).tokens)
    windows = expected.read_tokens(expected.rows).documents
    first = (expected.documents().group_by("document").aggregate([("n_tokens", "max")])).to_pylist()
    whole = [row["document"] for row in first if row["n_tokens_max"] <= 96]  # later windows do not see the first
    assert len(whole) > 5
    slots = np.isin(windows, whole)
    for layer in (1, 3):
        left, right = (each.read(f"blocks.{layer}.resid_post", each.rows)[slots] for each in (found, expected))
        np.testing.assert_allclose(left, right, atol=1e-4, rtol=1e-4)
        assert found.statistics(f"blocks.{layer}.resid_post").count == found.num_tokens


ARC = {"train": [{"input": [[1, 1]], "output": [[2, 2]]}] * 3, "test": [{"input": [[1, 1]], "output": [[2, 2]]}]}


def arc_overrides(path: Path, store: Path) -> list[str]:
    """All jobs with these have the same steps, small enough for the compilation cache."""
    settings = ["capture.layers=[4]", "batch.length=256", "data.prompt_length=160", "data.max_new_tokens=48"]
    settings += ["batch.rows=1", "data.rows=4"]
    return ["data=generate", f"data.path={path}", f"store.path={store}", *settings]


def run_arc(folder: Path, *overrides: str, task: dict = ARC) -> None:
    """Runs a job on one task into the store `folder`/store."""
    (folder / "a.json").write_text(json.dumps(task))
    run_here(*arc_overrides(folder / "a.json", folder / "store"), *overrides)


def test_arc_answers_are_graded(tmp_path, compilation_cache):
    """The bundled model repeats what it has seen three times. One task has no solution."""
    unsolved = ARC | {"test": [{"input": [[1, 1]]}]}
    for name, task in {"a": ARC, "b": unsolved}.items():
        (tmp_path / "tasks").mkdir(exist_ok=True)
        (tmp_path / "tasks" / f"{name}.json").write_text(json.dumps(task))
    run_here(*arc_overrides(tmp_path / "tasks", tmp_path / "store"), compilation_cache)
    store = ActivationStore.open(tmp_path / "store")
    rows = {row["task"]: row for row in store.documents().to_pylist()}
    assert rows["a"]["predicted_grid"] == rows["b"]["predicted_grid"]
    assert rows["a"]["predicted_grid"] is not None
    assert rows["a"]["correct"] == (rows["a"]["predicted_grid"] == "22")
    assert rows["b"]["correct"] is None


def test_answers_to_real_arc_tasks_are_graded(shared, tmp_path, compilation_cache):
    """The tasks have very different lengths. Long prompts are cut to data.prompt_length."""
    (tmp_path / "tasks").mkdir()
    for file in sorted((shared / "data" / "arc_agi" / "training").glob("*.json"))[:12]:
        (tmp_path / "tasks" / file.name).symlink_to(file)
    run_here(*arc_overrides(tmp_path / "tasks", tmp_path / "store"), "data.long_prompts=cut", compilation_cache)
    assert verify_store(str(tmp_path / "store")) == []
    rows = ActivationStore.open(tmp_path / "store").documents().to_pylist()
    assert len({row["task"] for row in rows}) == 12
    assert all(isinstance(row["correct"], bool) for row in rows)
    assert any(row["n_prompt_cut"] for row in rows)
    assert all(row["n_prompt"] == 160 for row in rows if row["n_prompt_cut"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.prompt_length=1000", "data.prompt_length.* = 1000 \\+ 48 exceeds the model's 1024 positions"),
        (
            "data.temperature=1 data.samples=5",
            r"data\.rows = 4 is 4 on each device, expected at least data\.samples = 5",
        ),
        ("data.stop=['']", r"data\.stop.*non-empty"),
        (r'data.stop=["\n\n"]', r"data\.stop.*with line breaks for \\n"),
        ("data.end_tokens=[two words]", "data.end_tokens='two words' is . tokens"),
        ("data.prompts.on_error=skip", "data.prompts.on_error is skip, but data.on_error is fail"),
        ("data.prompts.include_solution=true", "prompts must not contain answers"),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path, override, message):
    with pytest.raises(ConfigError, match=message):
        run_arc(tmp_path, *re.split(" (?=data)", override))
    assert not (tmp_path / "store").exists()


def test_a_prompt_that_is_too_long_is_refused(tmp_path, compilation_cache):
    with pytest.raises(InputError, match="tasks-000000 row 0 .id a#0.: the prompt has .*, more than data"):
        run_arc(tmp_path, compilation_cache, task=ARC | {"train": ARC["train"] * 10})


def test_columns_with_the_names_of_generated_ones_are_refused(tmp_path):
    column = "finish_reason"
    (tmp_path / "rows.json").write_text(json.dumps({"text": "a", column: "b"}))
    source = ["data@data.prompts=hf", "data.path=json", f"data.prompts.data_files={tmp_path / 'rows.json'}"]
    with pytest.raises(ConfigError, match=f"the prompts have a column {column}, which data=generate writes"):
        run_here(*arc_overrides("json", tmp_path / "store"), *source, f"data.prompts.info_columns=[{column}]")
    assert not (tmp_path / "store").exists()


def test_a_checkpoint_without_its_head_is_refused_before_a_store_is_created(tmp_path):
    shutil.copytree(ASSETS, tmp_path / "model")
    config = json.loads((ASSETS / "config.json").read_text()) | {"tie_word_embeddings": False}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="lm_head.weight is missing"):
        run_arc(tmp_path, f"model.path={tmp_path / 'model'}")
    assert not (tmp_path / "store").exists()
