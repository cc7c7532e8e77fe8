"""Measures generation on this machine: tokens/s with and without a cache, compiled or not, and with transformers.

The model has the shape of GPT-2 small and random weights in float32. 8 prompts are continued greedily, and no
continuation ends early. Writes build/bench-generate.json. transformers (its `generate` is measured) and torch come with
the test environment (`make setup-test`).
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from pipeline.cluster.sharding import make_mesh
from pipeline.config.sampling import Sampling
from pipeline.core.cores import num_cores
from pipeline.core.sites import FINAL_NORM, ActivationKey, Site
from pipeline.generation.cache import CachedLayer
from pipeline.generation.generator import Generator, Prompt, compile_generator
from pipeline.generation.spec import GenerationSpec
from pipeline.models.decoder import Params
from pipeline.models.head import logits
from pipeline.models.partition import Partition
from pipeline.models.registry import Model, open_model

BUILD = Path("build/bench-generate")
CONFIG = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
ROWS, PROMPT = 8, 32
CAPTURED = (ActivationKey(5, Site.resid_post),)


def prompts() -> list[Prompt]:
    return [Prompt(number, row) for number, row in enumerate(tokens())]


def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(0, CONFIG["vocab_size"], (ROWS, PROMPT), dtype=np.int32)


def seconds(work: Callable[[], object], repeats: int) -> float:
    """The median time of `repeats` runs, after a run that is not counted."""
    work()
    measured = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        measured.append(time.perf_counter() - began)
    return statistics.median(measured)


def generator(
    model: Model, params: Params, partition: Partition, num_new: int, keys: tuple[ActivationKey, ...] = ()
) -> Generator:
    spec = GenerationSpec(
        rows=ROWS, max_prompt=PROMPT, max_new_tokens=num_new, end_tokens=(), sampling=Sampling(), keys=keys
    )
    return compile_generator(model, params, partition, spec)


def cached_compiled(generator: Generator) -> Callable[[], object]:
    return lambda: list(generator.run(iter(prompts())))


def uncached_step(model: Model, params: Params, length: int) -> Callable[[], object]:
    """Returns a function that computes one token per row by the compiled forward pass over rows of `length`, as each
    token would be computed without a cache in a program with fixed shapes."""

    @jax.jit
    def step(params: Params, ids: jax.Array) -> jax.Array:
        positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), ids.shape)
        captured = model.apply(params, ids, jnp.ones_like(ids), positions, model.generation.keys())
        return jnp.argmax(logits(model.head, params, captured[FINAL_NORM][:, -1]), axis=-1)

    ids = jnp.zeros((ROWS, length), jnp.int32)
    return lambda: step(params, ids).block_until_ready()


def eager_step(model: Model, params: Params, length: int) -> Callable[[], object]:
    """Returns a function that computes one token per row with a cache, without compilation."""
    arch = model.arch
    empty = jnp.zeros((ROWS, arch.num_kv_heads, length, arch.head_dim))
    ids, positions = jnp.zeros((ROWS, 1), jnp.int32), jnp.full((ROWS, 1), length - 1, jnp.int32)

    def step() -> None:
        layers = [CachedLayer(empty, empty, positions[:, 0]) for _ in range(arch.num_layers)]
        captured = model.apply(params, ids, jnp.ones_like(ids), positions, model.generation.keys(), layers)
        chosen = jnp.argmax(logits(model.head, params, captured[FINAL_NORM][:, 0]), axis=-1)
        jax.block_until_ready((chosen, [layer.cache for layer in layers]))

    return step


def hf_generate(num_new: int) -> Callable[[], object]:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    torch.set_num_threads(num_cores())
    model = GPT2LMHeadModel(GPT2Config(**CONFIG)).eval()
    ids = torch.from_numpy(tokens().astype(np.int64))

    def work() -> None:
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_new,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                use_cache=True,
            )
        assert out.shape == (ROWS, PROMPT + num_new)

    return work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--new-tokens", type=int, nargs="+", default=[128, 256])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--without-hf", action="store_true", help="if torch is not installed")
    parser.add_argument("--out", type=Path, default=Path("build/bench-generate.json"))
    options = parser.parse_args()

    BUILD.mkdir(parents=True, exist_ok=True)
    (BUILD / "config.json").write_text(json.dumps(CONFIG))
    model, partition = open_model(str(BUILD), init="random"), Partition(make_mesh(devices=jax.devices()[:1]))
    params = model.load_leaves(model.generation.leaves(), "float32", partition.leaf_sharding)
    results: dict[str, dict[str, float]] = {}
    for num_new in options.new_tokens:
        total, length = ROWS * num_new, PROMPT + num_new
        rates = {
            "uncached, compiled": ROWS / seconds(uncached_step(model, params, length), 1),
            "cached, eager": ROWS / seconds(eager_step(model, params, length), options.repeats),
            "cached, compiled": total
            / seconds(cached_compiled(generator(model, params, partition, num_new)), options.repeats),
            f"cached, compiled, {CAPTURED[0].name} captured": total
            / seconds(cached_compiled(generator(model, params, partition, num_new, CAPTURED)), options.repeats),
        }
        if not options.without_hf:
            rates["transformers' generate"] = total / seconds(hf_generate(num_new), options.repeats)
        results[f"{num_new} new tokens"] = rates
        for name, rate in rates.items():
            print(f"{num_new:5d} new tokens  {name:45s} {rate:9.1f} tokens/s  {1e3 * ROWS / rate:8.1f} ms per step")
    options.out.write_text(json.dumps({"rows": ROWS, "prompt": PROMPT, "tokens_per_s": results}, indent=1))


if __name__ == "__main__":
    main()
