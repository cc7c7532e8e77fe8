"""Trains the bundled SAE: a top-k SAE on the bundled model's activations, on two CPU cores in minutes.

    python -m scripts.train.train_demo_sae --out pipeline/assets/tiny-sae [--steps 2500]

The main job stores the activations of the demo's text, and the store's reader returns them normalised, in random order.
The documents held out from the model are held out here, too. The output is in SAELens' format (cfg.json and
sae_weights.safetensors), with the normalisation folded into the weights. The main job then encodes the held-out
documents with it; the figures in cfg.json's metadata and README.md come from that store.

Letters: n tokens, D width of an activation, F features.
"""

import argparse
import json
import platform
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int32
from safetensors.numpy import save

from pipeline.config.composing import compose
from pipeline.core.sites import ActivationKey, Site
from pipeline.job import running
from pipeline.store import ActivationStore
from pipeline.store.format.statistics import Normalisation
from scripts.demo.make_demo_text import documents, write_shards
from scripts.train.train_demo_model import is_held_out

SEED = 0
KEY = ActivationKey(4, Site.resid_post)
WIDTH, K = 768, 16
BATCH_TOKENS = 1024
PEAK_RATE = 3e-3
# A feature is dead if it has not fired for DEAD_TOKENS tokens. The DEAD_K largest dead features are trained to
# reconstruct the residual error.
DEAD_TOKENS, DEAD_K, DEAD_WEIGHT = 100_000, 32, 1 / 32
REPORTED_STEPS = 250

README = """# tiny-sae

A toy for examples and tests: a top-k sparse autoencoder of the residual stream after layer {layer} of tiny-qwen2
({array}), in SAELens' format, trained by `scripts/train/train_demo_sae.py` (`make train-demo-sae`) on Python's
own documentation.
"""


class Weights(NamedTuple):
    """x -> top-k of relu((x - b_dec) w_enc + b_enc), times w_dec, plus b_dec. The rows of w_dec have norm 1."""

    w_enc: Float[Array, "D F"]
    b_enc: Float[Array, " F"]
    w_dec: Float[Array, "F D"]
    b_dec: Float[Array, " D"]


def make_store(work: Path, name: str, *overrides: str) -> ActivationStore:
    """Runs the main job with the bundled model on a folder of texts in `work`."""
    path = work / f"{name}-store"
    capture = [f"capture.layers=[{KEY.layer}]", f"capture.sites=[{KEY.site}]", "capture.dtype=float32"]
    texts = ["data=demo", f"data.path={work / name}", "model=tiny", "run.progress=false"]
    running.run(compose([*texts, *capture, f"store.path={path}", *overrides]))
    return ActivationStore.open(path)


def initial_weights(width: int) -> Weights:
    """Random directions, the same in encoder and decoder."""
    rows = jax.random.normal(jax.random.key(SEED), (WIDTH, width))
    w_dec = rows / jnp.linalg.norm(rows, axis=1, keepdims=True)
    return Weights(w_dec.T.copy(), jnp.zeros(WIDTH), w_dec, jnp.zeros(width))


def largest(values: Float[Array, "n F"], k: int) -> Float[Array, "n F"]:
    """Keeps each token's k largest values if they are positive; all others are 0. The choice has no gradient."""
    kth = jax.lax.top_k(jax.lax.stop_gradient(values), k)[0][:, -1:]
    return jnp.where(values >= kth, jax.nn.relu(values), 0)


def loss_of(
    weights: Weights, x: Float[Array, "n D"], is_dead: Bool[Array, " F"]
) -> tuple[Float[Array, ""], tuple[Float[Array, ""], Bool[Array, " F"]]]:
    """The loss of Gao et al. (2024); also the unexplained share of x, and which features fired."""
    pre = (x - weights.b_dec) @ weights.w_enc + weights.b_enc
    values = largest(pre, K)
    error = x - weights.b_dec - values @ weights.w_dec
    squares = jnp.mean(jnp.square(error))

    def dead_loss() -> Float[Array, ""]:
        dead_values = largest(jnp.where(is_dead, pre, -jnp.inf), DEAD_K)
        return jnp.mean(jnp.square(jax.lax.stop_gradient(error) - dead_values @ weights.w_dec))

    loss = squares + DEAD_WEIGHT * jax.lax.cond(is_dead.any(), dead_loss, lambda: jnp.zeros(()))
    return loss, (squares / jnp.mean(jnp.square(x)), (values > 0).any(axis=0))


def train(store: ActivationStore, steps: int) -> Weights:
    """Trains with Adam. The learning rate rises, then falls to a twentieth."""

    @partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(
        weights: Weights, state: optax.OptState, silent: Int32[Array, " F"], x: Float[Array, "n D"]
    ) -> tuple[Weights, optax.OptState, Int32[Array, " F"], Float[Array, ""]]:
        gradients, (unexplained, fired) = jax.grad(loss_of, has_aux=True)(weights, x, silent > DEAD_TOKENS)
        updates, state = optimiser.update(gradients, state, weights)
        weights = optax.apply_updates(weights, updates)
        rows = weights.w_dec / jnp.linalg.norm(weights.w_dec, axis=1, keepdims=True)
        return weights._replace(w_dec=rows), state, jnp.where(fired, 0, silent + len(x)), unexplained

    schedule = optax.warmup_cosine_decay_schedule(0.0, PEAK_RATE, steps // 20, steps, PEAK_RATE / 20)
    optimiser = optax.adam(schedule)
    weights = initial_weights(store.arrays[KEY.name].shape[2])
    state, silent, shares = optimiser.init(weights), jnp.zeros(WIDTH, jnp.int32), []
    normalisation = store.normalisation(KEY)
    batches = store.batches(KEY, BATCH_TOKENS, shuffle=True, seed=SEED, epochs=None, normalisation=normalisation)
    for number, batch in zip(range(1, steps + 1), batches, strict=False):
        weights, state, silent, unexplained = step(weights, state, silent, batch.activations)
        shares.append(float(unexplained))
        if number % REPORTED_STEPS == 0:
            dead = int((silent > DEAD_TOKENS).sum())
            explained = 1 - np.mean(shares[-REPORTED_STEPS:])
            print(f"step {number} of {steps}: {explained:.3f} explained, {dead} dead features", flush=True)
    batches.close()
    return weights


def folded(weights: Weights, normalisation: Normalisation) -> dict[str, np.ndarray]:
    """SAELens' tensors for activations that are not normalised. Features have the scale of these activations."""
    scale = np.float32(normalisation.scale)
    return {
        "W_enc": np.asarray(weights.w_enc),
        "b_enc": np.asarray(weights.b_enc) / scale,
        "W_dec": np.asarray(weights.w_dec),
        "b_dec": np.asarray(weights.b_dec) / scale + normalisation.mean,
    }


def write_config(out: Path, width: int, measured: Mapping[str, float]) -> None:
    """Writes cfg.json in the format of SAELens 6. `measured` is added to its metadata."""
    config = {
        "architecture": "topk",
        "d_in": width,
        "d_sae": WIDTH,
        "k": K,
        "rescale_acts_by_decoder_norm": False,
        "dtype": "float32",
        "device": "cpu",
        "apply_b_dec_to_input": True,
        "normalize_activations": "none",
        "reshape_activations": "none",
        "metadata": {
            "model_name": "tiny-qwen2",
            "hook_name": KEY.hook_name(),
            "prepend_bos": False,
            "context_size": 256,
            **measured,
        },
    }
    (out / "cfg.json").write_text(json.dumps(config, indent=2) + "\n")


def measure(store: ActivationStore) -> dict[str, float]:
    """What the features in a store of held-out documents explain."""
    statistics = store.feature_statistics(KEY.name)
    return {
        "held_out_tokens": store.num_tokens,
        "explained_variance": round(statistics.explained_variance, 4),
        "l0": round(statistics.l0, 2),
        "features_that_fire": int((statistics.count > 0).sum()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the SAE")
    parser.add_argument("--steps", type=int, default=2500, help=f"steps of {BATCH_TOKENS} tokens")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    texts = documents()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        write_shards([text for text in texts if not is_held_out(text)], work / "text", 2)
        write_shards([text for text in texts if is_held_out(text)], work / "held_out", 1)
        store = make_store(work, "text")

        began = time.process_time()
        weights = train(store, args.steps)
        minutes = (time.process_time() - began) / 60
        tensors = folded(weights, store.normalisation(KEY)[KEY.name])
        (args.out / "sae_weights.safetensors").write_bytes(save(tensors))
        width = len(tensors["b_dec"])
        write_config(args.out, width, {})
        encoding = [f'capture.encode={{{KEY.name}: "{args.out}"}}', f"capture.encode_top={K}"]
        measured = measure(make_store(work, "held_out", *encoding, "capture.encode_error=true"))
    write_config(args.out, width, measured)
    result = (
        f"It explains {measured['explained_variance']:.1%} of the variance of {measured['held_out_tokens']:,} held-out "
        f"tokens with {measured['l0']:g} of {WIDTH} features per token; {measured['features_that_fire']} fire there"
    )
    effort = (
        f"{args.steps} steps of {BATCH_TOKENS} tokens ({args.steps * BATCH_TOKENS / store.num_tokens:.1f} epochs) in "
        f"{minutes:.0f} minutes of CPU time; seed {SEED}, Python {platform.python_version()}"
    )
    readme = README.format(layer=KEY.layer, array=KEY.name)
    (args.out / "README.md").write_text(f"{readme}\n{result}; {effort}.\n")
    print(result)


if __name__ == "__main__":
    main()
