"""The bundled SAE is trained, and in a format that other libraries read."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from pipeline.models.sae.loading import open_sae
from pipeline.models.sae.spec import FeatureActivation
from pipeline.store import ActivationStore
from tests.models.sae_files import encode_dense

pytestmark = pytest.mark.heavy
ROOT = Path(__file__).parents[2]
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
