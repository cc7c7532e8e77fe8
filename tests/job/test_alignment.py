"""The job stores for a document what transformers computes for that document alone."""

from itertools import pairwise

import numpy as np
import pytest

from pipeline.config import composing
from pipeline.config.composing import PACKAGE
from pipeline.job.running import run
from pipeline.store import ActivationStore
from tests.jobs import write_text

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.heavy
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
        with torch.no_grad():
            model(torch.tensor(tokens[None].astype(np.int64)))
        return dict(seen)

    return activations


@pytest.mark.parametrize("packing", ["pack", "pad"])
def test_stored_activations_equal_those_of_each_document_alone(reference, tmp_path, packing):
    text = write_text(tmp_path / "text", files=2, documents=30, max_characters=1500)
    length = 256
    overrides = [f"data.path={text}", f"store.path={tmp_path / 'store'}", "capture.dtype=float32", "batch.rows=4"]
    overrides += [f"capture.layers={list(LAYERS)}", f"batch.length={length}", f"batch.packing={packing}"]
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
    assert windows > 60
    rows = store.read_tokens(store.rows)
    assert (rows.segments.max(axis=1) > 1).any() == (packing == "pack")
