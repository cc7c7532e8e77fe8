"""Measures training on a stream: its overhead over the forward pass, how well it shuffles, and an SAE's loss.

    python -m scripts.bench.bench_stream speed [--repetitions 3] [--tokens 9000]
    python -m scripts.bench.bench_stream shuffle [--tokens 100000]
    python -m scripts.bench.bench_stream loss [--repetitions 5] [--tokens 100000]

speed: captures layers 2 and 5 with bench_job's model (d=768, float32, random weights, steps of 8 x 256 tokens) and
text. The same tokens go through the forward pass alone, whose results stay on the device, and through `Stream.batches`,
from making the reader to the last batch: with a consumer that does nothing, with one that does nothing while a store is
filled, and with one that trains a top-k SAE, which is compared with the sum of the forward pass and of training on a
batch in memory. All alternate in one process; the ratios are medians.

shuffle: the share of pairs of tokens in a batch that come from the same document, for a stream and for `store.batches`
with the same memory, on the demo's text with the bundled model. Pieces of the store have 1,024 tokens, as with
d = 4096. In .venv-saes (`make test-saes`), also for SAELens' buffer, which keeps half of its tokens and mixes new ones
with them.

loss: trains an SAE from a stream and from a store, with different seeds in every repetition, and compares the losses
of the last tenth.
"""

import argparse
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from pipeline import Stream
from pipeline.config import composing
from pipeline.extraction import job_run
from pipeline.library import StreamReader
from pipeline.store import ActivationStore, Batch
from scripts.bench import bench_job
from scripts.examples import train_sae_on_stream as sae

LAYERS, SPEED_KEY, WIDTH = "[2,5]", "blocks.5.resid_post", 768
SPEED_BATCH, SPEED_BUFFER = 1024, 8192
KEY = "blocks.3.resid_post"
TOKEN_BYTES = 256  # for the bundled model's activations in bfloat16
BATCH = 1024
SEEDS = 3


class Cost(NamedTuple):
    """The cost of some work. Core seconds measure the amount of work even on a busy machine."""

    wall_s: float
    cpu_s: float


def cost(work: Callable[[], object]) -> Cost:
    wall, cpu = time.perf_counter(), time.process_time()
    jax.block_until_ready(work())
    return Cost(time.perf_counter() - wall, time.process_time() - cpu)


def trained(batches: Iterable[Batch]) -> sae.Training:
    training = sae.Training(WIDTH)
    for batch in batches:
        sae.step(training, batch.activations)
    return training


def measure_speed(folder: Path, repetitions: int, tokens: int) -> None:
    bench_job.prepare()
    stream = Stream.from_config(bench_job.overrides(LAYERS, tokens))
    case = bench_job.case_of("stream", stream._job, stream._step)

    def batches(store: Path | None = None) -> StreamReader:
        options = {"shuffle_buffer_tokens": SPEED_BUFFER, "framework": "jax", "drop_last": True}
        return stream.batches(SPEED_BATCH, SPEED_KEY, store=store, **options)

    held = [next(batches())] * (tokens // SPEED_BATCH)
    trained(held[:2])  # compiles
    bench_job.bare_forward(case)  # the first one is slower
    rows = []
    for repetition in range(repetitions):
        forward = cost(lambda: bench_job.bare_forward(case))
        idle = cost(lambda: sum(len(batch.tokens) for batch in batches()))
        storing = cost(lambda n=repetition: sum(len(batch.tokens) for batch in batches(folder / f"store-{n}")))
        training = cost(lambda: trained(held))
        reader = batches()
        both = cost(lambda reader=reader: trained(reader))
        names = ("forward", "stream", "storing", "training", "both")
        costs = (forward, idle, storing, training, both)
        print(dict(zip(names, costs, strict=True)), reader.waits, flush=True)
        rows.append([(a / f, s / f, b / (f + t)) for f, a, s, t, b in zip(*costs, strict=True)])
    for place, what in enumerate(Cost._fields):
        alone, stored, both = (statistics.median(row[place][ratio] for row in rows) for ratio in range(3))
        print(f"{what}: a stream takes {alone:.3f} times its forward pass, {stored:.3f} times where it fills a store;")
        print(f"    with training, {both:.3f} times both")
    print(f"{tokens} tokens, up to {reader.host_bytes / 2**20:.0f} MiB on the host")


def same_document(batches: Iterable[Batch | np.ndarray]) -> float:
    """The share of pairs of tokens in a batch that come from the same document; the mean over batches. An array has the
    numbers of the tokens' documents."""
    shares = []
    for batch in batches:
        documents = batch if isinstance(batch, np.ndarray) else batch.documents
        counts = np.unique(documents, return_counts=True)[1]
        shares.append((counts * (counts - 1)).sum() / (len(documents) * (len(documents) - 1)))
    return float(np.mean(shares))


def mixed_by_saelens(documents: np.ndarray, buffer: int) -> Iterable[np.ndarray]:
    """The documents of the tokens in SAELens' batches, from tokens in this order."""
    import torch
    from sae_lens.training.mixing_buffer import mixing_buffer

    torch.manual_seed(0)
    return (batch.numpy() for batch in mixing_buffer(buffer, BATCH, iter(torch.from_numpy(documents).split(BATCH))))


def demo_overrides(tokens: int) -> list[str]:
    overrides = ["+experiment=demo_text", f"data.path={bench_job.BUILD / 'text'}"]
    overrides += ["capture.layers=[3]", "capture.encode=null"]
    return [*overrides, f"run.max_tokens={tokens}", "batch.rows=4", "store.shard_mib=0.25", "run.progress=false"]


def demo_store(folder: Path, tokens: int) -> ActivationStore:
    """Writes a store of the demo's text. A piece has 1,024 tokens."""
    bench_job.prepare()
    job_run.run(composing.compose([*demo_overrides(tokens), f"store.path={folder / 'store'}"]))
    return ActivationStore.open(str(folder / "store"))


def measure_shuffle(folder: Path, tokens: int) -> None:
    store = demo_store(folder, tokens)
    has_saelens = importlib.util.find_spec("sae_lens") is not None
    streams = {count: Stream.from_config([*demo_overrides(tokens), f"data.num_streams={count}"]) for count in (1, 6)}
    in_order = list(store.batches(KEY, BATCH))  # the order of a stream with shuffle=False, too
    documents = np.mean([len(np.unique(batch.documents)) for batch in in_order])
    print(f"{store.num_tokens} tokens, batches of {BATCH}")
    print(f"in order, a batch has {documents:.1f} documents: {same_document(in_order):.4f}")
    for buffer in (16384, 32768, 65536):
        shares = {
            f"stream, data.num_streams={count}": same_document(stream.batches(BATCH, shuffle_buffer_tokens=buffer))
            for count, stream in streams.items()
        }
        mib = buffer / 2 * TOKEN_BYTES / 2**20  # of each of two
        stored = [same_document(store.batches(KEY, BATCH, shuffle=True, seed=s, buffer_mib=mib)) for s in range(SEEDS)]
        shares["store"] = float(np.mean(stored))
        if has_saelens:
            order = np.concatenate([batch.documents for batch in in_order])
            shares["SAELens"] = same_document(mixed_by_saelens(order, buffer))
        print(f"{buffer:6} tokens in memory:", {name: round(share, 4) for name, share in shares.items()}, flush=True)


def last_losses(batches: Iterable[Batch], width: int) -> float:
    """The mean loss of the last tenth of training."""
    training, losses = sae.Training(width), []
    for batch in batches:
        loss = sae.step(training, batch.activations)
        losses.append(float(loss))
    return float(np.mean(losses[-len(losses) // 10 :]))


def measure_loss(folder: Path, tokens: int, repetitions: int) -> None:
    store = demo_store(folder, tokens)
    stream = Stream.from_config(demo_overrides(tokens))
    options = {"normalisation": store.normalisation([KEY]), "dtype": "float32", "framework": "jax", "drop_last": True}
    width = len(options["normalisation"][KEY].mean)
    results: dict[str, list[float]] = {"stream": [], "store": []}
    for seed in range(repetitions):
        streamed = stream.batches(256, KEY, shuffle_buffer_tokens=65536, seed=seed, **options)
        stored = store.batches(KEY, 256, shuffle=True, seed=seed, buffer_mib=65536 / 2 * TOKEN_BYTES / 2**20, **options)
        for name, batches in (("stream", streamed), ("store", stored)):
            results[name].append(last_losses(batches, width))
        print({name: round(losses[-1], 5) for name, losses in results.items()}, flush=True)
    for name, losses in results.items():
        print(f"{name}: {np.mean(losses):.5f}, standard deviation {np.std(losses, ddof=1):.5f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["speed", "shuffle", "loss"])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--tokens", type=int)
    options = parser.parse_args()
    options.tokens = options.tokens or (9_000 if options.what == "speed" else 100_000)
    with tempfile.TemporaryDirectory() as folder:
        match options.what:
            case "speed":
                measure_speed(Path(folder), options.repetitions, options.tokens)
            case "shuffle":
                measure_shuffle(Path(folder), options.tokens)
            case "loss":
                measure_loss(Path(folder), options.tokens, options.repetitions)


if __name__ == "__main__":
    main()
