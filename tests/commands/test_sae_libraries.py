"""Real trainings by the libraries that people train sparse autoencoders with, from a store.

Neither is among the test requirements; both are trained here wherever they are installed.
"""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from pipeline.export import main as export
from pipeline.store import ActivationStore

if not any(map(find_spec, ("sae_lens", "dictionary_learning"))):
    pytest.skip("neither sae-lens nor dictionary-learning is installed", allow_module_level=True)
torch = pytest.importorskip("torch")
STEPS, BATCH_SIZE = 300, 256
KEY = "blocks.2.resid_post"


@pytest.fixture
def store(real_store) -> ActivationStore:
    return ActivationStore.open(real_store)


def activations(store: ActivationStore):
    """What both take for data: an endless iterator of [n, d], here of unit variance."""
    batches = store.batches(
        KEY,
        BATCH_SIZE,
        shuffle=True,
        seed=0,
        epochs=None,
        normalisation=store.normalisation(KEY),
        framework="torch",
    )
    return (batch.activations for batch in batches)


def cached_activations(store: ActivationStore, path: Path):
    """SAELens' own loader on what pipeline.export makes of the store."""
    from sae_lens.training.activations_store import ActivationsStore

    assert export([f"store.path={store.path}", f"export.path={path}", f"export.arrays={KEY}"]) == 0
    return ActivationsStore(
        model=None,
        dataset=None,
        streaming=False,
        hook_name="blocks.2.hook_resid_post",
        hook_head_index=None,
        context_size=store.length,
        d_in=store.arrays[KEY].shape[2],
        n_batches_in_buffer=16,
        total_training_tokens=STEPS * BATCH_SIZE,
        store_batch_size_prompts=4,
        train_batch_size_tokens=BATCH_SIZE,
        prepend_bos=False,
        normalize_activations="none",
        device=torch.device("cpu"),
        dtype="float32",
        cached_activations_path=str(path),
    )


@pytest.mark.parametrize("data", ["batches", "cached activations"])
def test_saelens_trains_from_a_store(store, data, tmp_path):
    pytest.importorskip("sae_lens")
    from sae_lens import TopKTrainingSAE, TopKTrainingSAEConfig
    from sae_lens.config import SAETrainerConfig
    from sae_lens.training.sae_trainer import SAETrainer

    losses = []

    class Recorded(SAETrainer):
        def step(self, batch):
            output = super().step(batch)
            losses.append(output.losses["mse_loss"].item())
            return output

    torch.manual_seed(0)
    width = store.arrays[KEY].shape[2]
    sae = TopKTrainingSAE(TopKTrainingSAEConfig(d_in=width, d_sae=4 * width, k=16, device="cpu", dtype="float32"))
    config = SAETrainerConfig(STEPS * BATCH_SIZE, BATCH_SIZE, lr=1e-3, lr_end=1e-4)
    Recorded(config, sae, activations(store) if data == "batches" else cached_activations(store, tmp_path)).fit()
    assert len(losses) >= STEPS
    print(f"{data}: loss {np.mean(losses[:5]):.3f} to {np.mean(losses[-20:]):.3f}")
    assert np.mean(losses[-20:]) < 0.4 * np.mean(losses[:5])


def test_dictionary_learning_trains_from_a_store(store):
    pytest.importorskip("dictionary_learning")
    from dictionary_learning.trainers.top_k import AutoEncoderTopK, TopKTrainer
    from dictionary_learning.training import trainSAE

    losses = []

    class Recorded(TopKTrainer):
        def update(self, step, x):
            losses.append(super().update(step, x))

    width = store.arrays[KEY].shape[2]
    config = {
        "trainer": Recorded,
        "steps": STEPS,
        "activation_dim": width,
        "dict_size": 4 * width,
        "k": 16,
        "layer": 2,
        "lm_name": "bundled",
        "lr": 1e-3,
        "warmup_steps": 10,
        "dict_class": AutoEncoderTopK,
        "device": "cpu",
        "seed": 0,
    }
    trainSAE(activations(store), [config], STEPS, device="cpu")
    assert len(losses) == STEPS
    print(f"dictionary_learning: loss {np.mean(losses[:5]):.3f} to {np.mean(losses[-20:]):.3f}")
    assert np.mean(losses[-20:]) < 0.4 * np.mean(losses[:5])
