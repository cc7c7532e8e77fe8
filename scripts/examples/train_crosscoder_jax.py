"""A top-k crosscoder: one set of latents that reads and reconstructs several arrays of activations for the same tokens.
An example of reading aligned activations, not a trainer.

    pip install flax optax
    python scripts/examples/train_crosscoder_jax.py STORE [STORE ...] [--site resid_post] [--steps 200]

With one store, the arrays are all layers of a site. With several stores of the same tokens (`+experiment=diff_models`
makes them), they are all layers of the site in each store: model diffing. At the end, it prints how much of each
array's variance the crosscoder explains, and how many latents have more than half of their decoder norm in it.

Shapes: B tokens, D_a features of array a, F latents.
"""

import argparse
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from pipeline.store import ActivationStore, open_aligned

EXPANSION, ACTIVE = 4, 16
LEARNING_RATE = 1e-3
MEASURED = 10  # batches, which may have been trained on, since the store is read repeatedly

Arrays = list[jax.Array]


class Crosscoder(nnx.Module):
    """[B, D_a] for each array -> its reconstruction, all from the same latents (Lindsey et al. 2024)."""

    def __init__(self, widths: list[int], rngs: nnx.Rngs) -> None:
        latents = EXPANSION * max(widths)
        encoders = [jax.random.normal(rngs.params(), (width, latents)) / jnp.sqrt(sum(widths)) for width in widths]
        self.encoders = nnx.List([nnx.Param(encoder) for encoder in encoders])
        self.decoders = nnx.List([nnx.Param(encoder.T) for encoder in encoders])
        self.biases = nnx.List([nnx.Param(jnp.zeros(width)) for width in widths])

    def __call__(self, arrays: Arrays) -> Arrays:
        encoded = [(x - bias) @ encoder for x, bias, encoder in zip(arrays, self.biases, self.encoders, strict=True)]
        latents = nnx.relu(sum(encoded))
        least = jax.lax.top_k(latents, ACTIVE)[0][:, -1:]
        sparse = jnp.where(latents >= least, latents, 0)
        return [sparse @ decoder + bias for decoder, bias in zip(self.decoders, self.biases, strict=True)]

    def decoder_norms(self) -> np.ndarray:
        """[F, arrays]: the share of each latent's decoder norm in each array."""
        norms = np.stack([np.linalg.norm(decoder[...], axis=1) for decoder in self.decoders], axis=1)
        return norms / norms.sum(axis=1, keepdims=True)


@nnx.jit
def errors(model: Crosscoder, arrays: Arrays) -> jax.Array:
    """The mean squared error of each array."""
    pairs = zip(arrays, model(arrays), strict=True)
    return jnp.stack([jnp.square(x - reconstruction).mean() for x, reconstruction in pairs])


@nnx.jit
def step(model: Crosscoder, optimizer: nnx.Optimizer, arrays: Arrays) -> jax.Array:
    loss, gradients = nnx.value_and_grad(lambda model: errors(model, arrays).mean())(model)
    optimizer.update(model, gradients)
    return loss


def activations(paths: list[str], site: str, batch_size: int) -> tuple[list[str], Iterator[Arrays]]:
    """The names of the arrays, and endless batches, normalised so that predicting the mean has an error of 1."""
    stores = [ActivationStore.open(path) for path in paths]
    keys = [[f"blocks.{layer}.{site}" for layer in store.layers] for store in stores]
    options = {"shuffle": True, "seed": 0, "epochs": None, "dtype": "float32", "framework": "jax"}
    scales = [store.normalisation(store_keys) for store, store_keys in zip(stores, keys, strict=True)]
    if len(stores) == 1:
        batches = stores[0].batches(keys[0], batch_size, normalisation=scales[0], **options)
        return list(scales[0]), (list(batch.activations.values()) for batch in batches)
    batches = open_aligned(stores).batches(keys, batch_size, normalisation=scales, **options)
    names = [f"{path}: {name}" for path, store_scales in zip(paths, scales, strict=True) for name in store_scales]
    return names, ([x for by_name in batch.activations for x in by_name.values()] for batch in batches)


def train(paths: list[str], site: str, steps: int, batch_size: int = 1024) -> tuple[list[float], dict[str, float]]:
    """The mean squared error of each step, and the share of each array's variance that is explained at the end."""
    names, batches = activations(paths, site, batch_size)
    model = Crosscoder([x.shape[1] for x in next(batches)], nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(LEARNING_RATE), wrt=nnx.Param)
    losses = [float(step(model, optimizer, next(batches))) for _ in range(steps)]
    measured = np.mean([errors(model, next(batches)) for _ in range(MEASURED)], axis=0)
    counts = (model.decoder_norms() > 0.5).sum(axis=0)
    for name, error, count in zip(names, measured, counts, strict=True):
        print(f"{name}: {1 - error:.3f} of the variance explained; {count} latents write mostly to it")
    return losses, dict(zip(names, 1 - measured, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stores", nargs="+")
    parser.add_argument("--site", default="resid_post")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    losses, _ = train(options.stores, options.site, options.steps)
    for index in [*range(0, options.steps, max(1, options.steps // 10)), options.steps - 1]:
        print(f"step {index:5} loss {losses[index]:.4f}")


if __name__ == "__main__":
    main()
