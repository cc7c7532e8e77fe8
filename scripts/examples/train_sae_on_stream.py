"""A top-k SAE trained on activations that are never stored, stopped in the middle, and resumed: an example of `Stream`.

    python scripts/examples/train_sae_on_stream.py [--steps 200]

A training on activations takes a model, data and a shuffle buffer in memory, but no disk. What it must keep to go on
after a crash is its parameters and `batches.state()`, a few numbers. Here a training is stopped halfway, what it keeps
is written and read again, and a new reader goes on: it ends with the parameters of a training that was never stopped,
bit for bit. The last line is the share of the activations' variance that the SAE explains, of batches it has not seen.

By default: the bundled model on Python's language reference, in seconds. Shapes: B tokens, D features, F latents.
"""

import argparse
import json
import pydoc_data.topics
import tempfile
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import Stream

TINY = "${assets:tiny-qwen2}"  # the bundled model: six layers, trained on Python's documentation
EXPANSION, ACTIVE = 4, 16
LEARNING_RATE, MOMENTS, EPSILON = 4e-3, (0.9, 0.999), 1e-8
BATCH, BUFFER = 256, 8192  # tokens
HELD_OUT = 20  # batches

Arrays = dict[str, jax.Array]


def init(width: int) -> dict[str, Arrays]:
    """Parameters, and the moments of Adam."""
    encoder = jax.random.normal(jax.random.key(0), (width, EXPANSION * width)) / jnp.sqrt(width)
    params = {"encoder": encoder, "decoder": encoder.T, "bias": jnp.zeros(width)}
    return {
        "params": params,
        "first": jax.tree.map(jnp.zeros_like, params),
        "second": jax.tree.map(jnp.zeros_like, params),
    }


def reconstruction(params: Arrays, x: jax.Array) -> jax.Array:
    latents = jax.nn.relu((x - params["bias"]) @ params["encoder"])
    least = jax.lax.top_k(latents, ACTIVE)[0][:, -1:]
    return jnp.where(latents >= least, latents, 0) @ params["decoder"] + params["bias"]


def loss_of(params: Arrays, x: jax.Array) -> jax.Array:
    return jnp.square(reconstruction(params, x) - x).mean()


@partial(jax.jit, donate_argnums=0)
def step(training: dict[str, Arrays], x: jax.Array, count: int) -> tuple[dict[str, Arrays], jax.Array]:
    """One step of Adam."""
    loss, grads = jax.value_and_grad(loss_of)(training["params"], x)
    first = jax.tree.map(lambda m, g: MOMENTS[0] * m + (1 - MOMENTS[0]) * g, training["first"], grads)
    second = jax.tree.map(lambda v, g: MOMENTS[1] * v + (1 - MOMENTS[1]) * g**2, training["second"], grads)
    unbias = [1 - decay**count for decay in MOMENTS]
    params = jax.tree.map(
        lambda p, m, v: p - LEARNING_RATE * m / unbias[0] / (jnp.sqrt(v / unbias[1]) + EPSILON),
        *(training["params"], first, second),
    )
    return {"params": params, "first": first, "second": second}, loss


def train(batches, training: dict[str, Arrays], first: int, last: int) -> dict[str, Arrays]:
    """Steps `first` to `last` - 1."""
    for count in range(first, last):
        training, loss = step(training, next(batches).activations, count + 1)
        if count % 50 == 0:
            print(f"step {count:4} loss {loss:.4f}")
    return training


def save(folder: Path, training: dict[str, Arrays], batches) -> None:
    """All that a training keeps."""
    np.savez(folder / "training.npz", *map(np.asarray, jax.tree.leaves(training)))
    (folder / "stream.json").write_text(json.dumps(batches.state()))


def load(folder: Path, width: int) -> tuple[dict[str, Arrays], dict]:
    leaves = [jnp.asarray(leaf) for leaf in np.load(folder / "training.npz").values()]
    state = json.loads((folder / "stream.json").read_text())
    return jax.tree.unflatten(jax.tree.structure(init(width)), leaves), state


def write_text(folder: Path) -> str:
    """Python's language reference as a parquet file with a column `text`."""
    topics = sorted(pydoc_data.topics.topics.items())
    pq.write_table(
        pa.table({"id": [name for name, _ in topics], "text": [text for _, text in topics]}), folder / "text.parquet"
    )
    return str(folder)


def main(steps: int) -> float:
    """The share of variance explained."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stream = Stream(TINY, layers=[3], data=write_text(folder), model_dtype="float32", progress=False)
        options = {"shuffle_buffer_tokens": BUFFER, "seed": 0, "framework": "jax", "dtype": "float32"}
        options["normalisation"] = stream.normalisation(num_tokens=8192)  # predicting the mean then gives a loss of 1
        width = len(options["normalisation"]["blocks.3.resid_post"].mean)

        batches = stream.batches(BATCH, **options)
        whole = train(batches, init(width), 0, steps)

        stopped = stream.batches(BATCH, **options)
        save(folder, train(stopped, init(width), 0, steps // 2), stopped)
        stopped.close()
        training, state = load(folder, width)  # as a new process would
        resumed = train(stream.batches(BATCH, **options, state=state), training, steps // 2, steps)
        for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(resumed), strict=True):
            assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
        print(f"stopped after {steps // 2} steps and resumed from {len(json.dumps(state))} bytes: the same parameters")
        print(
            f"seconds that the training waited: {batches.waits.consumer:.1f}, the devices: {batches.waits.devices:.1f}"
        )

        held_out = [next(batches).activations for _ in range(HELD_OUT)]
        explained = 1 - float(np.mean([loss_of(whole["params"], x) for x in held_out]) / np.mean(np.square(held_out)))
    assert explained > 0.65, explained
    print(f"the SAE explains {explained:.3f} of the variance of {HELD_OUT * BATCH} tokens that it has not seen")
    return explained


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    main(parser.parse_args().steps)
