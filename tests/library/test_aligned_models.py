"""Two models' stores of one text, read token by token: what each model gives for the batch's tokens."""

import json
import pydoc_data.topics

import numpy as np
import pytest

from pipeline import Extractor
from pipeline.core.errors import StoreMismatch
from pipeline.store import open_aligned

TINY = "${assets:tiny-qwen2}"
# Of as many rows as a step has: the models differ in width, and blocks would differ in their rows.
OPTIONS = {"dtype": "float32", "model_dtype": "float32", "length": 64, "rows": 4, "shard_mib": 0.001, "progress": False}
KEYS = ["blocks.2.resid_post", "blocks.1.resid_post"]


@pytest.fixture(scope="module", params=[{}, {"positions": "every", "every": 4}], ids=["all", "every fourth"])
def extractors(request, tmp_path_factory) -> list[Extractor]:
    """The bundled model, and one with random weights that has its tokenizer and is narrower."""
    options = OPTIONS | request.param
    folder = tmp_path_factory.mktemp("model")
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 128, "vocab_size": 2048}
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
    other = Extractor(str(folder), layers=[1], tokenizer=TINY, init="random", **options)
    return [Extractor(TINY, layers=[2], **options), other]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return [text[200:600] for _, text in sorted(pydoc_data.topics.topics.items())[:20]]


def test_a_batch_has_what_each_model_gives_for_its_tokens(extractors, texts, tmp_path):
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
    with pytest.raises(StoreMismatch, match=r"block \d+ of stream 0, row \d+, position \d+: tokens is \d+ in "):
        open_aligned([paths[0], changed])
