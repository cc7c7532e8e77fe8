"""The bundled checkpoint and SAE are trained, and in formats that other libraries read."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from safetensors.numpy import load_file

from pipeline.core.sites import ActivationKey, Site
from pipeline.data.text.tokenizer import load_tokenizer
from pipeline.models.leaves import num_params
from pipeline.models.registry import open_model
from pipeline.models.sae.loading import open_sae
from pipeline.models.sae.spec import FeatureActivation
from pipeline.store import ActivationStore
from tests.models.sae_files import encode_dense

pytestmark = pytest.mark.heavy
ROOT = Path(__file__).parents[2]
MODEL = ROOT / "pipeline" / "assets" / "tiny-qwen2"
FINAL_NORM = ActivationKey(-1, Site.final_norm)
TEXT = """\
Return a list of the lines in the file, without the line endings. If the optional argument size is given, it must be
a positive integer, and lines are read until the total number of characters is at least size. When the end of the file
is reached, the method returns an empty list. If the file is closed, a ValueError is raised.
"""
CHAT = [{"role": "user", "content": "input:\n012"}, {"role": "assistant", "content": "output:\n210"}]


def test_transformers_reads_the_same_tokenizer():
    transformers = pytest.importorskip("transformers")
    theirs, ours = transformers.AutoTokenizer.from_pretrained(MODEL), load_tokenizer(str(MODEL))
    for text in (TEXT, "naïve 日本語 🙂", "x = 3.14  # half\n\n\n<|endoftext|>"):
        assert theirs(text)["input_ids"] == ours.encode([text])[0].tolist()
    assert theirs.eos_token == "<|endoftext|>"
    for generation in (False, True):
        expected = theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=generation)
        assert ours.chat().render(CHAT, add_generation_prompt=generation) == expected
        assert expected.startswith("<|im_start|>user\ninput:\n012<|im_end|>\n<|im_start|>assistant\n")


@pytest.fixture(scope="module")
def ids() -> np.ndarray:
    return load_tokenizer(str(MODEL)).encode([TEXT])[0][None]


def test_transformers_computes_the_same_logits(ids):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    theirs = transformers.Qwen2ForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = theirs(torch.tensor(ids, dtype=torch.long)).logits.numpy()
    model = open_model(str(MODEL))
    params = model.load((FINAL_NORM,), "float32", SingleDeviceSharding(jax.devices()[0]))
    positions = np.arange(ids.shape[1], dtype=np.int32)[None]
    hidden = model.apply(params, ids, np.ones_like(ids), positions, (FINAL_NORM,))[FINAL_NORM]
    logits = np.asarray(hidden) @ np.asarray(params["embed"]).T
    losses = torch.nn.functional.cross_entropy(torch.tensor(logits[0, :-1]), torch.tensor(ids[0, 1:], dtype=torch.long))
    assert float(losses) < 4.5  # nats; untrained, ln 2048 = 7.6
    np.testing.assert_allclose(logits, expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.slow  # a minute: reads the whole corpus, compiles the training step, computes all held-out losses
def test_the_training_script_writes_a_checkpoint_of_the_same_kind(tmp_path):
    pytest.importorskip("optax")
    arguments = [sys.executable, "-m", "scripts.train.train_demo_model", "--out", tmp_path, "--steps", "3"]
    subprocess.run(arguments, cwd=ROOT, check=True, capture_output=True, timeout=600)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in MODEL.iterdir()}
    for name in ("config.json", "tokenizer_config.json"):
        assert json.loads((tmp_path / name).read_text()) == json.loads((MODEL / name).read_text())
    models = [open_model(str(path)) for path in (MODEL, tmp_path)]
    assert num_params(models[0].leaves((FINAL_NORM,))) == num_params(models[1].leaves((FINAL_NORM,))) == 1_444_992


SAE = ROOT / "pipeline" / "assets" / "tiny-sae"
KEY = "blocks.4.resid_post"


def test_the_sae_belongs_to_the_demos_layer():
    sae = open_sae(str(SAE))
    assert (sae.spec.activation, sae.spec.d_in, sae.hook_name) == (
        FeatureActivation.topk,
        128,
        "blocks.4.hook_resid_post",
    )
    np.testing.assert_allclose(np.linalg.norm(sae.read("w_dec"), axis=1), 1, atol=1e-5)


def test_the_sae_explains_the_jobs_activations(encoded_store):
    store, tensors = ActivationStore.open(encoded_store), load_file(SAE / "sae_weights.safetensors")
    (batch,) = store.batches([KEY], store.num_tokens, features=True)
    x, features = batch.activations[KEY], batch.features[KEY]
    np.testing.assert_allclose(
        features.dense().astype(np.float32), encode_dense(open_sae(str(SAE)), x), rtol=0.01, atol=1e-3
    )
    error = x - features.dense().astype(np.float32) @ tensors["W_dec"] - tensors["b_dec"]
    explained = 1 - np.square(error).sum() / np.square(x - x.mean(axis=0)).sum()
    assert explained > 0.8
    assert store.feature_statistics(KEY).explained_variance == pytest.approx(explained, abs=1e-3)
    assert features.n_active.mean() == pytest.approx(16, abs=0.1)


@pytest.mark.slow  # a minute: stores the activations of the whole corpus, and compiles the training step
def test_the_training_script_writes_an_sae_of_the_same_kind(tmp_path):
    pytest.importorskip("optax")
    arguments = [sys.executable, "-m", "scripts.train.train_demo_sae", "--out", tmp_path, "--steps", "50"]
    subprocess.run(arguments, cwd=ROOT, check=True, capture_output=True, timeout=900)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in SAE.iterdir()}
    theirs, ours = (json.loads((folder / "cfg.json").read_text()) for folder in (SAE, tmp_path))
    assert {**theirs, "metadata": 0} == {**ours, "metadata": 0}
    assert theirs["metadata"].keys() == ours["metadata"].keys()
    assert 0.2 < ours["metadata"]["explained_variance"] < theirs["metadata"]["explained_variance"]
    assert open_sae(str(tmp_path)).shapes == open_sae(str(SAE)).shapes
