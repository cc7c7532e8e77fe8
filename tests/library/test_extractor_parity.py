"""An Extractor's results compared with what hooks see in transformers, in float32."""

import numpy as np
import pytest

from pipeline import Extractor
from pipeline.config.composing import PACKAGE
from tests.models.hf_reference import VOCAB_SIZE, reference_activations, save_random, transformers

TINY = str(PACKAGE / "assets" / "tiny-qwen2")
SITES = ["embed", "resid_pre", "q", "attn_z", "resid_mid", "mlp_post", "resid_post", "final_norm"]


@pytest.mark.parametrize("family", ["bundled", "gpt2", "gemma2"])
def test_every_layer_has_the_values_of_transformers(family, tmp_path):
    """The extractor packs documents; transformers gets one at a time."""
    if family == "bundled":
        model, path = transformers.AutoModelForCausalLM.from_pretrained(TINY, dtype="float32").eval(), TINY
    else:
        model, path = save_random(family, tmp_path), str(tmp_path)
    sites = {"layers": "all", "sites": SITES, "tokenizer": TINY, "model_dtype": "float32", "dtype": "float32"}
    extractor = Extractor(path, **sites, rows=2, length=64, progress=False)
    generator = np.random.default_rng(0)
    documents = [generator.integers(0, VOCAB_SIZE, size) for size in (1, 5, 17, 40, 64)]
    for tokens, result in zip(documents, extractor(documents), strict=True):
        reference = reference_activations(model, tokens[None])
        for key in extractor.plan.step.keys:
            expected = reference[key][0]
            error = np.abs(result.activations[key.name] - expected).max() / np.abs(expected).max()
            assert error < 2e-5, (len(tokens), key.name)  # after up to four layers
