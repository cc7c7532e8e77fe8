"""A top-k crosscoder on all layers of one site, in JAX: an example of reading aligned activations, not a trainer.

    python scripts/examples/train_crosscoder_jax.py build/demo/stores/text [--site resid_post] [--steps 200]

Shapes: B tokens, K layers, D features of an activation, F latents.
"""

import argparse
from functools import partial

import jax
import jax.numpy as jnp

from pipeline.store import ActivationStore

EXPANSION, ACTIVE = 4, 16
LEARNING_RATE, MOMENTS, EPSILON = 1e-3, (0.9, 0.999), 1e-8

Params = dict[str, jax.Array]


def init(key: jax.Array, num_layers: int, width: int) -> Params:
    encoder = jax.random.normal(key, (num_layers, width, EXPANSION * width)) / jnp.sqrt(num_layers * width)
    return {"encoder": encoder, "decoder": encoder.transpose(2, 0, 1), "bias": jnp.zeros((num_layers, width))}


def loss_of(params: Params, x: jax.Array) -> jax.Array:
    """Mean squared error; one set of latents reads and writes every layer (Lindsey et al. 2024)."""
    latents = jax.nn.relu(jnp.einsum("BKD,KDF->BF", x - params["bias"], params["encoder"]))
    least = jax.lax.top_k(latents, ACTIVE)[0][:, -1:]
    sparse = jnp.where(latents >= least, latents, 0)
    return jnp.square(jnp.einsum("BF,FKD->BKD", sparse, params["decoder"]) + params["bias"] - x).mean()


@partial(jax.jit, donate_argnums=(0, 1))
def step(params: Params, moments: tuple[Params, Params], x: jax.Array, count: int) -> tuple:
    """One step of Adam."""
    loss, grads = jax.value_and_grad(loss_of)(params, x.astype(jnp.float32))
    first = jax.tree.map(lambda m, g: MOMENTS[0] * m + (1 - MOMENTS[0]) * g, moments[0], grads)
    second = jax.tree.map(lambda v, g: MOMENTS[1] * v + (1 - MOMENTS[1]) * g**2, moments[1], grads)
    unbias = [1 - decay**count for decay in MOMENTS]
    params = jax.tree.map(
        lambda p, m, v: p - LEARNING_RATE * m / unbias[0] / (jnp.sqrt(v / unbias[1]) + EPSILON), params, first, second
    )
    return params, (first, second), loss


def train(path: str, site: str, steps: int, batch_size: int = 1024) -> list[float]:
    """The mean squared error of each step; activations are normalised, so that predicting nothing gives 1."""
    store = ActivationStore.open(path)
    keys = [(layer, site) for layer in store.layers]
    batches = store.batches(
        keys,
        batch_size,
        shuffle=True,
        seed=0,
        epochs=None,
        stack=True,
        normalisation=store.normalisation(keys),
        dtype="bfloat16",
        framework="jax",
    )
    width = store.arrays[f"blocks.{store.layers[0]}.{site}"].shape[2]
    params = init(jax.random.key(0), len(keys), width)
    moments = jax.tree.map(jnp.zeros_like, (params, params))
    losses = []
    for count, batch in zip(range(1, steps + 1), batches, strict=False):
        params, moments, loss = step(params, moments, batch.activations, count)
        losses.append(float(loss))
    batches.close()
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store")
    parser.add_argument("--site", default="resid_post")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    losses = train(options.store, options.site, options.steps)
    for index in [*range(0, options.steps, max(1, options.steps // 10)), options.steps - 1]:
        print(f"step {index:5} loss {losses[index]:.4f}")


if __name__ == "__main__":
    main()
