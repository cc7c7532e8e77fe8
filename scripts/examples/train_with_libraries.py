"""SAELens, dictionary_learning and sparsify each train a top-k SAE on activations that are computed at the same time.

    make test-saes      # the libraries and this package, in .venv-saes
    .venv-saes/bin/python scripts/examples/train_with_libraries.py [--steps 300]

Each library's trainer gets an iterator of tensors [n, D], from several sources:

* stream: a `Stream`
* store: `batches` of the store that the stream has filled
* cached: SAELens' loader, on the output of `pipeline.export`

Prints the loss of the first and last steps, as the library computes it.

By default, uses the bundled model on Python's language reference, layer 3. Shapes: n tokens of a batch, D features.
"""

import argparse
import itertools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from dictionary_learning.trainers.top_k import AutoEncoderTopK, TopKTrainer
from dictionary_learning.training import trainSAE
from sae_lens import TopKTrainingSAE, TopKTrainingSAEConfig
from sae_lens.config import SAETrainerConfig
from sae_lens.training.activations_store import ActivationsStore
from sae_lens.training.sae_trainer import SAETrainer
from sparsify import SparseCoderConfig, TrainConfig, Trainer
from train_sae_on_stream import TINY, write_text

from pipeline import Stream
from pipeline.export import main as export
from pipeline.store import ActivationStore

KEY, WIDTH = "blocks.3.resid_post", 128
BATCH, BUFFER = 256, 16384  # tokens
EXPANSION, ACTIVE, LEARNING_RATE = 4, 16, 1e-3

Data = Iterator[torch.Tensor]


def sae_lens(data: Data, steps: int, folder: Path) -> list[float]:
    """The loss of each step."""
    losses = []

    class Recorded(SAETrainer):
        def step(self, batch):
            output = super().step(batch)
            losses.append(output.losses["mse_loss"].item())
            return output

    sae = TopKTrainingSAE(TopKTrainingSAEConfig(d_in=WIDTH, d_sae=EXPANSION * WIDTH, k=ACTIVE, device="cpu"))
    config = SAETrainerConfig(steps * BATCH, BATCH, lr=LEARNING_RATE, lr_end=LEARNING_RATE / 10)
    Recorded(config, sae, data).fit()
    return losses


def dictionary_learning(data: Data, steps: int, folder: Path) -> list[float]:
    losses = []

    class Recorded(TopKTrainer):
        def update(self, step, x):
            losses.append(super().update(step, x))

    config = {"trainer": Recorded, "dict_class": AutoEncoderTopK, "activation_dim": WIDTH, "k": ACTIVE}
    config |= {"steps": steps, "dict_size": EXPANSION * WIDTH, "lr": LEARNING_RATE, "warmup_steps": 10, "seed": 0}
    config |= {"layer": 3, "lm_name": "bundled", "device": "cpu"}
    trainSAE(data, [config], steps, device="cpu")
    return losses


class Replayed(torch.nn.Module):
    """Replaces the model that sparsify's trainer hooks. The outputs of its module `activations` are batches of
    `data`."""

    device = torch.device("cpu")
    dummy_inputs = {"input_ids": torch.zeros(1, 1)}  # noqa: RUF012  for the trainer to determine the width

    def __init__(self, data: Data) -> None:
        super().__init__()
        self.activations = torch.nn.Identity()
        self._data = data

    @property
    def base_model(self) -> torch.nn.Module:
        return self

    def forward(self, input_ids: torch.Tensor) -> None:
        is_dummy = input_ids.numel() == 1
        self.activations(torch.zeros(1, 1, WIDTH) if is_dummy else next(self._data)[None])


def sparsify(data: Data, steps: int, folder: Path) -> list[float]:
    losses = []
    coder = SparseCoderConfig(expansion_factor=EXPANSION, k=ACTIVE)
    config = TrainConfig(coder, batch_size=1, hookpoints=["activations"], optimizer="adam", lr=LEARNING_RATE)
    config.lr_warmup_steps, config.log_to_wandb, config.save_dir = 10, False, str(folder)
    rows = [{"input_ids": torch.ones(BATCH)}] * steps  # placeholders that the trainer does not mask
    trainer = Trainer(config, rows, Replayed(data))
    trainer.saes["activations"].register_forward_hook(lambda *called: losses.append(called[-1].fvu.item()))
    trainer.fit()
    return losses


def cached(store: ActivationStore, folder: Path, steps: int) -> ActivationsStore:
    """SAELens' loader, reading the store's activations after export to its format."""
    if not folder.exists():
        assert export([f"store.path={store.path}", f"export.path={folder}", f"export.arrays={KEY}"]) == 0
    return ActivationsStore(
        model=None,
        dataset=None,
        streaming=False,
        hook_name="blocks.3.hook_resid_post",
        hook_head_index=None,
        context_size=store.length,
        d_in=WIDTH,
        n_batches_in_buffer=16,
        total_training_tokens=steps * BATCH,
        store_batch_size_prompts=4,
        train_batch_size_tokens=BATCH,
        prepend_bos=False,
        normalize_activations="none",
        device=torch.device("cpu"),
        dtype="float32",
        cached_activations_path=str(folder),
    )


TRAINERS: tuple[Callable[[Data, int, Path], list[float]], ...] = (sae_lens, dictionary_learning, sparsify)


def main(steps: int) -> None:
    torch.set_num_threads(1)  # steps are small, so more threads would mostly wait for each other
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text").mkdir()
        stream = Stream(TINY, layers=[3], data=write_text(folder / "text"), model_dtype="float32", progress=False)
        options = {"seed": 0, "framework": "torch", "normalisation": stream.normalisation()}  # float32
        with_store = stream.batches(BATCH, KEY, store=folder / "store")
        num_tokens = sum(len(batch.tokens) for batch in with_store)
        assert num_tokens > steps * BATCH, num_tokens
        store = ActivationStore.open(folder / "store")
        data: dict[str, Callable[[], Data]] = {
            "stream": lambda: (
                batch.activations for batch in stream.batches(BATCH, KEY, shuffle_buffer_tokens=BUFFER, **options)
            ),
            "store": lambda: (batch.activations for batch in store.batches(KEY, BATCH, shuffle=True, **options)),
            "cached": lambda: iter(cached(store, folder / "cached", steps)),
        }
        for trainer, source in itertools.product(TRAINERS, data):
            if source == "cached" and trainer is not sae_lens:
                continue
            torch.manual_seed(0)
            losses = trainer(data[source](), steps, folder / "checkpoints")
            first, last = np.mean(losses[:5]), np.mean(losses[-20:])
            assert steps <= len(losses) <= steps + 1, len(losses)
            assert last < 0.7 * first, (first, last)
            print(f"{trainer.__name__:20} {source:7} loss {first:.3f} to {last:.3f}, {steps} steps", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    main(parser.parse_args().steps)
