"""Trains a top-k sparse autoencoder on a store's activations, in PyTorch: an example of reading, not a trainer.

pip install torch
python scripts/examples/train_sae_torch.py build/demo/stores/text blocks.2.resid_post [--steps 200] [--save build/sae]

A run encodes activations with the saved one: 'capture.encode={blocks.2.resid_post: build/sae}'.
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from pipeline.store import ActivationStore

EXPANSION, K = 4, 16


class SparseAutoencoder(nn.Module):
    """x -> decoder(top-k of relu(encoder(x))): Gao et al. 2024."""

    def __init__(self, width: int, num_latents: int) -> None:
        super().__init__()
        self.encoder = nn.Linear(width, num_latents)
        self.decoder = nn.Linear(num_latents, width)
        self.decoder.weight.data = self.encoder.weight.data.T.clone()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values, latents = self.encoder(x).relu().topk(K, dim=-1)
        sparse = torch.zeros(*x.shape[:-1], self.encoder.out_features).scatter(-1, latents, values)
        return self.decoder(sparse)


def train(
    store: ActivationStore, key: str, steps: int, batch_size: int = 1024
) -> tuple[SparseAutoencoder, list[float]]:
    """Also the mean squared error of each step. Activations are normalised so that predicting the mean has an error
    of 1."""
    torch.manual_seed(0)
    options = {"shuffle": True, "seed": 0, "epochs": None, "framework": "torch"}
    batches = store.batches(key, batch_size, normalisation=store.normalisation(key), **options)
    width = store.arrays[key].shape[2]
    autoencoder = SparseAutoencoder(width, EXPANSION * width)
    optimiser = torch.optim.Adam(autoencoder.parameters(), lr=1e-3)
    losses = []
    for _, batch in zip(range(steps), batches, strict=False):
        loss = (autoencoder(batch.activations) - batch.activations).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    batches.close()
    return autoencoder, losses


@torch.no_grad()
def save(autoencoder: SparseAutoencoder, store: ActivationStore, key: str, folder: Path) -> None:
    """Writes the SAE in SAELens' format, for activations as they are: the normalisation goes into the weights."""
    normalisation = store.normalisation(key)[key]
    mean, scale = torch.as_tensor(normalisation.mean), torch.as_tensor(normalisation.scale)
    encoder, decoder = autoencoder.encoder, autoencoder.decoder
    tensors = {
        "W_enc": encoder.weight.T * scale,
        "b_enc": encoder.bias - encoder.weight @ (mean * scale),
        "W_dec": decoder.weight.T / scale,
        "b_dec": decoder.bias / scale + mean,
    }
    d_in, d_sae = tensors["W_enc"].shape
    config = {"architecture": "topk", "d_in": d_in, "d_sae": d_sae, "k": K, "rescale_acts_by_decoder_norm": False}
    config |= {"dtype": "float32", "device": "cpu", "apply_b_dec_to_input": False, "normalize_activations": "none"}
    config |= {"reshape_activations": "none", "metadata": {}}
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "sae_weights.safetensors")
    (folder / "cfg.json").write_text(json.dumps(config))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store")
    parser.add_argument("key", help="an array, e.g. blocks.2.resid_post")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save", type=Path, help="folder for the SAE")
    options = parser.parse_args()
    store = ActivationStore.open(options.store)
    autoencoder, losses = train(store, options.key, options.steps)
    for step in [*range(0, options.steps, max(1, options.steps // 10)), options.steps - 1]:
        print(f"step {step:5} loss {losses[step]:.4f}")
    if options.save:
        save(autoencoder, store, options.key, options.save)


if __name__ == "__main__":
    main()
