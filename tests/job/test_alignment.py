"""The job stores for a document what transformers computes for that document alone."""

from itertools import pairwise

import numpy as np
import pyarrow.parquet as pq
import pytest

from pipeline.config import composing
from pipeline.config.composing import PACKAGE
from pipeline.data.text.tokenizer import load_tokenizer
from pipeline.job.running import run
from pipeline.store import ActivationStore
from pipeline.store.check.verifying import verify_store
from tests.jobs import write_text
from tests.store.written_check import assert_well_written

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("cached_steps")]
LAYERS = (1, 4)


@pytest.fixture(scope="module")
def reference():
    """The bundled checkpoint in transformers, with hooks on the layers: {layer: [T, D] of the last call}."""
    model = transformers.AutoModelForCausalLM.from_pretrained(PACKAGE / "assets" / "tiny-qwen2", dtype=torch.float32)
    seen = {}
    for layer in LAYERS:

        def hook(module, arguments, output, layer=layer):
            seen[layer] = (output[0] if isinstance(output, tuple) else output).squeeze(0).numpy()

        model.model.layers[layer].register_forward_hook(hook)

    def activations(tokens):
        ids = torch.tensor(tokens[None].astype(np.int64))
        with torch.no_grad():
            logits = model(ids).logits[0, :-1]
        seen["loss"] = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none").numpy()
        return dict(seen)

    return activations


def test_stored_activations_equal_those_of_each_document_alone(reference, tmp_path):
    text = write_text(tmp_path / "text", files=2, documents=8, max_characters=1500)
    length = 256
    overrides = [f"data.path={text}", f"store.path={tmp_path / 'store'}", "capture.dtype=float32", "batch.rows=4"]
    overrides += [f"capture.layers={list(LAYERS)}", f"batch.length={length}"]
    run(composing.compose([*overrides, "store.shard_mib=1", "run.progress=false"]))
    store = ActivationStore.open(str(tmp_path / "store"))
    windows = 0
    for name in store.documents()["id"].unique().to_pylist():
        document = store.document(name)
        starts = [*np.flatnonzero(document.positions == 0), len(document.tokens)]
        for start, stop in pairwise(starts):  # the model sees one window at a time
            expected = reference(document.tokens[start:stop])
            for layer in LAYERS:
                stored = document.activations[f"blocks.{layer}.resid_post"][start:stop]
                np.testing.assert_allclose(stored, expected[layer], atol=1e-4, rtol=1e-4)
            windows += 1
    assert windows > 16
    rows = store.read_tokens(store.rows)
    assert (rows.segments.max(axis=1) > 1).any()


def test_overlapping_windows_store_every_token_once_with_its_context(reference, tmp_path):
    text = write_text(tmp_path / "text", files=2, documents=9, max_characters=1500)
    length, overlap, path = 64, 24, str(tmp_path / "store")
    overrides = [f"data.path={text}", f"store.path={path}", "capture.dtype=float32", "batch.rows=2"]
    overrides += [f"capture.layers={list(LAYERS)}", f"batch.length={length}", f"batch.overlap={overlap}"]
    run(composing.compose([*overrides, "capture.outputs=[loss]", "store.shard_mib=1", "run.progress=false"]))
    assert verify_store(path) == []
    assert_well_written(path)
    store = ActivationStore.open(path)
    tokenizer, num_tokens, num_later = load_tokenizer(str(PACKAGE / "assets" / "tiny-qwen2")), 0, 0
    for row in pq.read_table(text).to_pylist():
        document, ids = store.document(row["id"]), tokenizer.encode([row["text"]])[0]
        num_tokens += len(ids)
        np.testing.assert_array_equal(document.text, ids)
        every = np.arange(len(ids))
        begins = [0, *range(length, len(ids), length - overlap)]
        window = np.searchsorted(begins, every, side="right") - 1
        starts = np.maximum(np.array(begins)[window] - overlap, 0)  # where each token's context begins
        np.testing.assert_array_equal(document.positions, every - starts)
        np.testing.assert_array_equal(document.tokens, ids)
        for begin, end in pairwise([*begins, len(ids)]):
            start = max(begin - overlap, 0)
            expected = reference(ids[start:end])
            for layer in LAYERS:
                stored = document.activations[f"blocks.{layer}.resid_post"][begin:end]
                np.testing.assert_allclose(stored, expected[layer][begin - start :], atol=1e-4, rtol=1e-4)
            losses = np.append(expected["loss"], np.nan)[begin - start :]
            np.testing.assert_allclose(document.outputs["loss"][begin:end], losses, atol=1e-3, rtol=1e-3)
            num_later += begin > 0
    assert store.num_tokens == num_tokens
    assert num_later > 30
    batches = store.batches("blocks.1.resid_post", batch_size=100)
    read = [pair for b in batches for pair in zip(b.documents.tolist(), b.tokens.tolist(), strict=True)]
    assert len(read) == store.num_activations == store.statistics("blocks.1.resid_post").count
    assert min(read)[0] >= 0


def test_joined_rows_are_one_text_each(reference, tmp_path):
    """Attention, positions and the next token cross documents; the documents are still found in them."""
    text = write_text(tmp_path / "text", files=2, documents=12, max_characters=700)
    tokenizer = load_tokenizer(str(PACKAGE / "assets" / "tiny-qwen2"))
    overrides = [f"data.path={text}", f"store.path={tmp_path / 'store'}", "capture.dtype=float32", "batch.rows=4"]
    overrides += [f"capture.layers={list(LAYERS)}", "batch.length=128", "batch.packing=concat", "data.num_streams=2"]
    overrides += ["batch.windows=restart", 'data.prefix="<|endoftext|>"', 'batch.separator="<|im_end|>"']
    run(composing.compose([*overrides, "capture.outputs=[loss]", "store.rows_per_block=8", "run.progress=false"]))
    assert verify_store(str(tmp_path / "store")) == []
    store = ActivationStore.open(str(tmp_path / "store"))
    bos, separator = (tokenizer.token_id("", token) for token in ("<|endoftext|>", "<|im_end|>"))
    across = 0
    for row in store.rows.tolist():
        side = store.read_tokens([row])
        valid = side.segments[0] > 0
        tokens, documents = side.tokens[0][valid], side.documents[0][valid]
        assert tokens[0] == bos
        across += len(np.unique(documents)) > 1
        expected = reference(tokens)
        for layer in LAYERS:
            stored = store.read(f"blocks.{layer}.resid_post", [row])[0][valid]
            np.testing.assert_allclose(stored, expected[layer], atol=1e-4, rtol=1e-4)
        loss = store.read_outputs([row])["loss"][0][valid]
        np.testing.assert_allclose(loss[:-1], expected["loss"], atol=1e-3, rtol=1e-3)
        assert np.isnan(loss[-1])
    assert across > len(store.rows) // 2
    for row in pq.read_table(text).to_pylist():
        document = store.document(row["id"])
        own = tokenizer.encode([row["text"]], with_ends=False)[0]
        kept = ~np.isin(document.text, (bos, separator))
        np.testing.assert_array_equal(document.text[kept], own)
        assert document.positions[0] in (0, 1) or document.text[0] == separator
