"""A top-k SAE trained on activations that are never stored, stopped in the middle, and resumed: an example of `Stream`.

    pip install flax optax
    python scripts/examples/train_sae_on_stream.py [--steps 200]

Training on a stream needs a model, data and a shuffle buffer in memory, but no disk. To continue after a crash, it
needs its parameters and `batches.state()`, a few numbers. Here, training stops halfway, saves both, and a new reader
continues: it ends with the same parameters, bit for bit, as training that never stopped. The last line is the share of
the activations' variance that the SAE explains, on batches that it was not trained on.

By default, uses the bundled model and Python's language reference, and takes seconds. Shapes: B tokens, D features, F
latents.
"""

import argparse
import json
import pydoc_data.topics
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pyarrow as pa
import pyarrow.parquet as pq
from flax import nnx

from pipeline import Stream

TINY = "${assets:tiny-qwen2}"  # the bundled model: six layers, trained on Python's documentation
EXPANSION, ACTIVE = 4, 16
LEARNING_RATE = 4e-3
BATCH, BUFFER = 256, 8192  # tokens
HELD_OUT = 20  # batches


class SAE(nnx.Module):
    """x [B, D] -> its reconstruction from the ACTIVE largest of F latents."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        encoder = jax.random.normal(rngs.params(), (width, EXPANSION * width)) / jnp.sqrt(width)
        self.encoder, self.decoder = nnx.Param(encoder), nnx.Param(encoder.T)
        self.bias = nnx.Param(jnp.zeros(width))

    def __call__(self, x: jax.Array) -> jax.Array:
        latents = nnx.relu((x - self.bias) @ self.encoder)
        least = jax.lax.top_k(latents, ACTIVE)[0][:, -1:]
        return jnp.where(latents >= least, latents, 0) @ self.decoder + self.bias


class Training(nnx.Module):
    """The state of training, except its position in the data."""

    def __init__(self, width: int) -> None:
        self.sae = SAE(width, nnx.Rngs(0))
        self.optimizer = nnx.Optimizer(self.sae, optax.adam(LEARNING_RATE), wrt=nnx.Param)


def mean_squared_error(sae: SAE, x: jax.Array) -> jax.Array:
    return jnp.square(sae(x) - x).mean()


@nnx.jit
def step(training: Training, x: jax.Array) -> jax.Array:
    loss, gradients = nnx.value_and_grad(mean_squared_error)(training.sae, x)
    training.optimizer.update(training.sae, gradients)
    return loss


def train(batches, training: Training, first: int, last: int) -> Training:
    """Runs steps `first` to `last` - 1."""
    for count in range(first, last):
        loss = step(training, next(batches).activations)
        if count % 50 == 0:
            print(f"step {count:4} loss {loss:.4f}")
    return training


def arrays(training: Training) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(training))]


def save(folder: Path, training: Training, batches) -> None:
    np.savez(folder / "training.npz", *arrays(training))
    (folder / "stream.json").write_text(json.dumps(batches.state()))


def load(folder: Path, width: int) -> tuple[Training, dict]:
    training = Training(width)
    saved = list(np.load(folder / "training.npz").values())
    nnx.update(training, jax.tree.unflatten(jax.tree.structure(nnx.state(training)), map(jnp.asarray, saved)))
    return training, json.loads((folder / "stream.json").read_text())


def write_text(folder: Path) -> str:
    """Python's language reference as a parquet file with a column `text`."""
    topics = sorted(pydoc_data.topics.topics.items())
    table = pa.table({"id": [name for name, _ in topics], "text": [text for _, text in topics]})
    pq.write_table(table, folder / "text.parquet", row_group_size=10)
    return str(folder)


def main(steps: int) -> float:
    """The share of the variance that the SAE explains."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stream = Stream(TINY, layers=[3], data=write_text(folder), model_dtype="float32", progress=False)
        options = {"shuffle_buffer_tokens": BUFFER, "seed": 0, "framework": "jax", "dtype": "float32"}
        options["normalisation"] = stream.normalisation(num_tokens=8192)  # predicting the mean then gives a loss of 1
        width = len(options["normalisation"]["blocks.3.resid_post"].mean)

        batches = stream.batches(BATCH, **options)
        whole = train(batches, Training(width), 0, steps)

        stopped = stream.batches(BATCH, **options)
        save(folder, train(stopped, Training(width), 0, steps // 2), stopped)
        stopped.close()
        training, state = load(folder, width)  # as a new process would
        resumed = train(stream.batches(BATCH, **options, state=state), training, steps // 2, steps)
        for expected, got in zip(arrays(whole), arrays(resumed), strict=True):
            assert expected.tobytes() == got.tobytes()
        print(f"stopped after {steps // 2} steps and resumed from {len(json.dumps(state))} bytes: the same parameters")

        held_out = [next(batches).activations for _ in range(HELD_OUT)]
        held_out_loss = np.mean([mean_squared_error(whole.sae, x) for x in held_out])
        explained = 1 - float(held_out_loss / np.mean(np.square(held_out)))
    assert explained > 0.65, explained
    print(f"the SAE explains {explained:.3f} of the variance of {HELD_OUT * BATCH} tokens that it was not trained on")
    return explained


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    main(parser.parse_args().steps)
