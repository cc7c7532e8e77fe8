"""Two models' stores of one text, read together: a batch has both models' activations of its tokens."""

import json
import pydoc_data.topics
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from pipeline import Extractor, Stream
from pipeline.cli import main
from pipeline.config.composing import PACKAGE
from pipeline.config.schema import RunConfig
from pipeline.core.errors import StoreMismatch
from pipeline.job import running
from pipeline.store import open_aligned
from scripts.examples import train_crosscoder_jax
from tests.jobs import write_text

pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("cached_steps")]
TINY = "${assets:tiny-qwen2}"
# shard_mib makes blocks of one step: the models differ in width, and larger blocks would differ in rows.
OPTIONS = {"dtype": "float32", "model_dtype": "float32", "length": 64, "rows": 4, "shard_mib": 0.001, "progress": False}
KEYS = ["blocks.2.resid_post", "blocks.1.resid_post"]


def write_narrow_model(folder: Path, merges_left_out: int = 0) -> Path:
    """Writes a model narrower than the bundled one, with its tokenizer, without the first `merges_left_out` merges."""
    folder.mkdir()
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 128, "vocab_size": 2048}
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
    for file in (PACKAGE / "assets/tiny-qwen2").glob("*token*"):
        shutil.copy(file, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][merges_left_out:]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


@pytest.fixture(scope="module")
def extractors(tmp_path_factory) -> list[Extractor]:
    """The bundled model, and a narrower one with random weights and the same tokenizer, of every fourth token."""
    options = OPTIONS | {"positions": "every", "every": 4}
    folder = write_narrow_model(tmp_path_factory.mktemp("model") / "narrow")
    other = Extractor(str(folder), layers=[1], init="random", **options)
    return [Extractor(TINY, layers=[2], **options), other]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return [text[200:600] for _, text in sorted(pydoc_data.topics.topics.items())[:20]]


def test_a_batch_has_each_models_activations_of_its_tokens(extractors, texts, tmp_path):
    paths = [tmp_path / "tiny", tmp_path / "random"]
    for extractor, path in zip(extractors, paths, strict=True):
        extractor.save(path, texts)
    aligned = open_aligned(paths)
    results = [extractor(texts) for extractor in extractors]
    num_tokens = 0
    for batch in aligned.batches(KEYS, 100, shuffle=True, seed=0):
        num_tokens += len(batch.tokens)
        for key, activations, documents in zip(KEYS, batch.activations, results, strict=True):
            for activation, document, token in zip(activations, batch.documents, batch.tokens, strict=True):
                result = documents[document]
                is_token = result.tokens[result.positions] == token
                errors = np.abs(result.activations[key][is_token] - activation).max(axis=1)
                assert errors.min() < 1e-4
    assert num_tokens == sum(len(result.positions) for result in results[0])
    assert " the " in texts[0]  # one token, as " and " is
    changed = extractors[1].save(tmp_path / "changed", [texts[0].replace(" the ", " and ", 1), *texts[1:]])
    with pytest.raises(StoreMismatch, match=r"tokens of block \d+ of stream 0 differs between "):
        open_aligned([paths[0], changed])


def recipe(tmp_path: Path, *models: Path) -> list[str]:
    """Overrides that make +experiment=diff_models small."""
    text = write_text(tmp_path / "text", files=2, documents=12, max_characters=800)
    data = ["data=demo", f"data.path={text}", "data.num_streams=2", "run.max_tokens=3000", "run.progress=false"]
    model = ["model=tiny", "model.init=random", f"model.path={','.join(map(str, models))}"]
    return [*data, *model, "capture.layers=[1]", "batch.rows=4", "batch.length=64", "store.rows_per_block=8"]


def test_the_recipe_for_two_models_makes_aligned_stores(tmp_path, monkeypatch):
    models = [PACKAGE / "assets/tiny-qwen2", write_narrow_model(tmp_path / "narrow")]
    models.append(write_narrow_model(tmp_path / "other", merges_left_out=20))
    stores = tmp_path / "stores"
    monkeypatch.setenv("STORES", str(stores))
    monkeypatch.setattr(sys, "argv", ["run", "+experiment=diff_models", *recipe(tmp_path, *models)])
    jobs: list[RunConfig] = []
    main.main(jobs.append, "")
    for job in jobs:
        running.run(job)
    paths = [job.store.path for job in jobs]
    assert [store.arrays["blocks.1.resid_post"].shape[2] for store in open_aligned(paths[:2]).stores] == [128, 16]
    assert sum(len(batch.tokens) for batch in open_aligned(paths[:2]).batches(["blocks.1.resid_post"] * 2, 64)) >= 3000
    losses, explained = train_crosscoder_jax.train(paths[:2], "resid_post", 40, batch_size=128)
    assert [name.rpartition(": ")[0] for name in explained] == paths[:2]
    assert np.mean(losses[-5:]) < 0.7 * np.mean(losses[:5])
    with pytest.raises(StoreMismatch) as raised:
        open_aligned([paths[0], paths[2]])
    assert "block 0" in str(raised.value)
    assert "with the same tokenizer" in str(raised.value)


def test_two_streams_give_the_same_tokens_in_the_same_order(tmp_path):
    """Although the models differ in width. So comparing two models needs no store."""
    models = [PACKAGE / "assets/tiny-qwen2", write_narrow_model(tmp_path / "narrow")]
    streams = [Stream.from_config(recipe(tmp_path, model)) for model in models]
    readers = [stream.batches(50, shuffle_buffer_tokens=2048, seed=5) for stream in streams]
    num_tokens = 0
    for ours, theirs in zip(*readers, strict=True):
        assert (ours.activations.shape[1], theirs.activations.shape[1]) == (128, 16)
        for name in ("tokens", "segments", "positions", "documents"):
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
        num_tokens += len(ours.tokens)
    assert num_tokens >= 3000
