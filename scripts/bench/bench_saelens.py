"""Compares SAELens' loader of cached activations with this reader, on the same activations. Needs sae-lens.

    python scripts/bench/bench_saelens.py [--tokens 300000] [--repeats 3]

SAELens' cache is written by pipeline.export, in float16 (Arrow has no bfloat16), which has two bytes, as in the store.
Both yield shuffled batches of 4096 tokens as torch tensors, alternate in one process, and are timed over one epoch from
the page cache, including the start.
"""

import argparse
import shutil
import statistics
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from bench_reader import BATCH_SIZE, LAYERS, LENGTH, PATH, WIDTH, write_store
from sae_lens.training.activations_store import ActivationsStore

from pipeline.store import ActivationStore
from pipeline.store.read.exports.saelens import write_cached_activations

CACHE = Path("build/bench-reader/saelens")
HOOK = f"blocks.{LAYERS[0]}.hook_resid_post"
ROWS_AT_A_TIME = 16


def saelens_batches() -> Iterator[torch.Tensor]:
    return ActivationsStore(
        model=None,
        dataset=None,
        streaming=False,
        hook_name=HOOK,
        hook_head_index=None,
        context_size=LENGTH,
        d_in=WIDTH,
        n_batches_in_buffer=64,
        total_training_tokens=10**9,
        store_batch_size_prompts=ROWS_AT_A_TIME,
        train_batch_size_tokens=BATCH_SIZE,
        prepend_bos=False,
        normalize_activations="none",
        device=torch.device("cpu"),
        dtype="float16",
        cached_activations_path=str(CACHE),
    )


def our_batches(store: ActivationStore) -> Iterator[torch.Tensor]:
    batches = store.batches(
        f"blocks.{LAYERS[0]}.resid_post", BATCH_SIZE, shuffle=True, seed=0, epochs=None, framework="torch"
    )
    return (batch.activations for batch in batches)


def tokens_per_s(batches: Iterator[torch.Tensor], num_tokens: int) -> float:
    began = time.perf_counter()
    seen = sum(len(batch) for batch in islice(batches, num_tokens // BATCH_SIZE))
    return seen / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=300_000)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    write_store(options.tokens)
    store = ActivationStore.open(PATH)
    shutil.rmtree(CACHE, ignore_errors=True)
    write_cached_activations(store, CACHE, [f"blocks.{LAYERS[0]}.resid_post"], LENGTH, "float16")
    ours, theirs = [], []
    for _ in range(options.repeats):
        theirs.append(tokens_per_s(saelens_batches(), options.tokens))
        ours.append(tokens_per_s(our_batches(store), options.tokens))
        print(f"SAELens {theirs[-1]:9,.0f} tokens/s, store {ours[-1]:9,.0f} tokens/s", flush=True)
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    print(f"the store's reader is {ratio:.1f} times as fast")


if __name__ == "__main__":
    main()
