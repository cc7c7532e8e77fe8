"""Trains the bundled model: a Qwen2 of 1.4 million parameters and its tokenizer, on two CPU cores in minutes.

    python -m scripts.train.train_demo_model --out pipeline/assets/tiny-qwen2 [--steps 1500]

It is trained on the demo's text and tasks (make_demo_text.py, make_demo_tasks.py), which the pipeline reads, tokenises
and packs, with the pipeline's forward pass. One document in twenty is held out. Writes an ordinary Hugging Face
checkpoint in bfloat16, and a README.md with the loss.

Letters: R rows, T positions, B rows of a step, V vocabulary.
"""

import argparse
import hashlib
import json
import platform
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array, Float, Int32
from optax.contrib import MuonDimensionNumbers, muon
from safetensors.numpy import save

from pipeline.config.choices import OnError
from pipeline.config.schema import ArcData, DataConfig, ParquetData
from pipeline.core.sites import FINAL_NORM
from pipeline.data.sources import open_source
from pipeline.data.stream import TokenStream
from pipeline.data.text.tokenizer import TextTokenizer, load_tokenizer
from pipeline.data.tokenised import TokenisedDocuments
from pipeline.models.decoder import Params
from pipeline.models.leaves import Leaf, LeafTree, needed_leaves
from pipeline.models.registry import Model, open_model
from scripts.demo.demo_tokenizer import END, VOCAB_SIZE, write_tokenizer
from scripts.demo.make_demo_tasks import KINDS, make_task
from scripts.demo.make_demo_text import Text, documents, write_shards

SEED = 0
TASKS_PER_KIND = 8
STEP_TOKENS = 2048
REPORTED_STEPS = 50
# Rows are short for most of the training, since the cost of attention is quadratic, and long at its end.
SHORT, LONG, LONG_SHARE = 256, 1024, 0.15
PEAK_RATE, WEIGHT_DECAY = 0.02, 0.1
KEYS = (FINAL_NORM,)

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LONG,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "bos_token_id": None,
    "eos_token_id": 0,
    "torch_dtype": "bfloat16",
}
README = """# tiny-qwen2

A toy that makes examples and tests run without a network, trained by `scripts/train/train_demo_model.py`
(`make train-demo-model`) on Python's own documentation and on generated grid tasks.
"""


class Rows(NamedTuple):
    """Packed token rows, as the pipeline passes them to a model. `segments` is 0 at padding."""

    tokens: Int32[np.ndarray, "R T"]
    segments: Int32[np.ndarray, "R T"]
    positions: Int32[np.ndarray, "R T"]


def is_held_out(text: Text) -> bool:
    """Whether a document is held out from training the bundled weights: one in twenty, by name."""
    return hashlib.sha256(text.name.encode()).digest()[0] < 256 / 20


def write_corpus(work: Path) -> list[str]:
    """Writes text and tasks, and held-out text, to folders in `work`. Returns the texts for training."""
    texts = documents()
    learned = [text for text in texts if not is_held_out(text)]
    write_shards(learned, work / "text", 1)
    write_shards([text for text in texts if is_held_out(text)], work / "held_out", 1)
    (work / "tasks").mkdir()
    for number in range(TASKS_PER_KIND * len(KINDS)):
        kind = KINDS[number % len(KINDS)]
        task = make_task(kind, np.random.default_rng([SEED, number, 1]))  # the demo's tasks use [0, number]
        (work / "tasks" / f"{number:03}.json").write_text(json.dumps(task))
    return [text.text for text in learned]


def packed_rows(config: DataConfig, tokenizer: TextTokenizer, length: int) -> Rows:
    """All documents of a source, each followed by <|endoftext|>, in rows of `length`."""
    source = open_source(config, tokenizer)
    documents = TokenisedDocuments(source, tokenizer, range(len(source.shards)), on_error=OnError.fail, vocab_size=None)
    blocks = list(TokenStream(documents, stream=0, num_streams=1, rows_per_block=64, length=length).blocks())
    return Rows(*(np.concatenate([getattr(block, name) for block in blocks]) for name in Rows._fields))


def text_rows(folder: Path, tokenizer: TextTokenizer, length: int) -> Rows:
    return packed_rows(ParquetData(source="parquet", path=str(folder)), tokenizer, length)


def step_rows(work: Path, tokenizer: TextTokenizer, steps: int) -> Iterator[Rows]:
    """The rows of each step, in random order, for several epochs: first short rows, then long ones."""
    rng = np.random.default_rng(SEED)
    num_long = round(steps * LONG_SHARE)
    for length, count in ((SHORT, steps - num_long), (LONG, num_long)):
        tasks = ArcData(source="arc", path=str(work / "tasks"), include_solution=True)
        sources = text_rows(work / "text", tokenizer, length), packed_rows(tasks, tokenizer, length)
        rows = Rows(*(np.concatenate(arrays) for arrays in zip(*sources, strict=True)))
        num_rows = len(rows.tokens)
        size = STEP_TOKENS // length
        order = np.concatenate([rng.permutation(num_rows) for _ in range(1 + count * size // num_rows)])
        for first in range(0, count * size, size):
            yield Rows(*(array[order[first : first + size]] for array in rows))


def write_weights(leaves: LeafTree, params: Params, out: Path) -> None:
    """Writes model.safetensors in bfloat16, with transformers' names and shapes."""
    tensors = {}
    for leaf, array in zip(jax.tree.leaves(leaves), jax.tree.leaves(params), strict=True):
        stack = np.asarray(array).astype(ml_dtypes.bfloat16).reshape(len(leaf.tensors), *leaf.hf_shape)
        tensors |= {f"model.{name}": tensor for name, tensor in zip(leaf.tensors, stack, strict=True)}
    (out / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))


def load(model: Model) -> Params:
    """Loads all weights of a model onto the first device, in float32."""
    return model.load(KEYS, "float32", SingleDeviceSharding(jax.devices()[0]))


def loss_sum(model: Model, params: Params, rows: Rows) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The cross-entropy in nats, summed over all tokens except each document's first, and the number of these
    tokens."""
    (hidden,) = model.apply(params, *rows, KEYS).values()
    logits = jnp.einsum("BTD,VD->BTV", hidden[:, :-1], params["embed"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, rows.tokens[:, 1:])
    counted = (rows.segments[:, 1:] == rows.segments[:, :-1]) & (rows.segments[:, 1:] > 0)
    return jnp.sum(losses, where=counted), jnp.sum(counted, dtype=jnp.float32)


def matrix_axes(leaf: Leaf) -> MuonDimensionNumbers | None:
    """The input and output axes of a stack of matrices, without the layer axis; None for other weights."""
    if not leaf.is_stacked or len(leaf.hf_shape) != 2:
        return None
    axes = range(1, 1 + len(leaf.layer_shape))
    sizes = np.cumprod(leaf.layer_shape)
    num_outputs = 1 + int(np.flatnonzero(sizes == leaf.hf_shape[0])[0])
    return MuonDimensionNumbers(tuple(axes[num_outputs:]), tuple(axes[:num_outputs]))


def train(model: Model, leaves: LeafTree, batches: Iterator[Rows], steps: int) -> Params:
    """Trains with Muon (Jordan et al., 2024) for the layers' matrices and Adam for the rest. The learning rate rises,
    then falls to zero."""

    def initial(leaf: Leaf, array: Array) -> Array:
        """Random weights, but zeros for the matrices that write to the residual stream."""
        return jnp.zeros_like(array) if leaf.key in ("attention.o", "mlp.down") else array

    def mean_loss(params: Params, rows: Rows) -> Float[Array, ""]:
        total, count = loss_sum(model, params, rows)
        return total / count

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Params, state: optax.OptState, rows: Rows) -> tuple[Params, optax.OptState, Float[Array, ""]]:
        loss, gradients = jax.value_and_grad(mean_loss)(params, rows)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    optimizer = muon(
        optax.warmup_cosine_decay_schedule(0.0, PEAK_RATE, steps // 20, steps),
        weight_decay=WEIGHT_DECAY,
        muon_weight_dimension_numbers=jax.tree.map(matrix_axes, leaves),
    )
    params = jax.tree.map(initial, leaves, load(model))
    state = optimizer.init(params)
    losses = []
    for number, rows in enumerate(batches, start=1):
        params, state, loss = step(params, state, rows)
        losses.append(float(loss))
        if number % REPORTED_STEPS == 0:
            print(f"step {number} of {steps}: {np.mean(losses[-REPORTED_STEPS:]):.3f} nats/token", flush=True)
    return params


def held_out_loss(model: Model, rows: Rows) -> float:
    """The loss in nats per token, computed in float32."""
    params, evaluate = load(model), jax.jit(partial(loss_sum, model))
    size = STEP_TOKENS // rows.tokens.shape[1]
    total = count = 0.0
    for first in range(0, len(rows.tokens) - size + 1, size):
        part = evaluate(params, Rows(*(array[first : first + size] for array in rows)))
        total, count = total + float(part[0]), count + float(part[1])
    return total / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--steps", type=int, default=1500, help=f"steps of {STEP_TOKENS} tokens")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        write_tokenizer(write_corpus(work), args.out, LONG)
        tokenizer = load_tokenizer(str(args.out), suffix=END)
        untrained = open_model(str(args.out), init="random", seed=SEED)
        leaves = needed_leaves(untrained.arch, untrained.table, KEYS)
        began = time.monotonic()
        params = train(untrained, leaves, step_rows(work, tokenizer, args.steps), args.steps)
        effort = (
            f"{args.steps} steps of {STEP_TOKENS} tokens in {(time.monotonic() - began) / 60:.0f} minutes on two CPU "
            f"cores; seed {SEED}, Python {platform.python_version()}"
        )
        write_weights(leaves, params, args.out)
        held_out = text_rows(work / "held_out", tokenizer, SHORT)
        trained_loss, loss = held_out_loss(open_model(str(args.out)), held_out), held_out_loss(untrained, held_out)
    result = f"Held-out text {trained_loss:.2f} nats/token, untrained {loss:.2f}"
    (args.out / "README.md").write_text(f"{README}\n{result}; {effort}.\n")
    print(result)


if __name__ == "__main__":
    main()
