"""Compares the reader with numpy on this machine: shuffled batches of 4096 tokens from a store in the page cache.

    python -m scripts.bench.bench_reader [--tokens 300000] [--repeats 5]

First fills a store with three layers, d=768, bfloat16, and rows of 256 tokens. numpy reads the store's shards as whole
files without checks (`np.fromfile`); the reader reads, checks crc32c, shuffles and gathers. They alternate in one
process, because the speed of a shared machine drifts; the ratio is the median over neighbouring pairs. On a busy
machine, the CPU seconds are more reliable than the speed. Writes build/bench-reader.json.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from pipeline.store import ActivationStore
from scripts.bench.bench_host import broadcast_step
from scripts.bench.bench_job import fill_store, open_benchmark, prepare

BUILD = Path("build/bench-reader")
PATH = BUILD / "stores" / "store"
LAYERS, BATCH_SIZE = (2, 6, 10), 4096
EPOCHS = 12  # of one layer; of three layers, a third of it
GIB = 1 << 30


def write_store(num_tokens: int) -> None:
    """Fills a store by a step that only broadcasts its tokens. A layer's blocks have 15 MiB each."""
    prepare(BUILD)
    overrides = [f"model.path={BUILD / 'model'}", f"capture.layers={list(LAYERS)}", "batch.rows=8", "batch.length=256"]
    overrides += ["data.num_streams=1", "store.rows_per_block=40", f"run.max_tokens={num_tokens}"]
    job = open_benchmark(BUILD, "store", *overrides)
    fill_store(job, broadcast_step(job), job.config.store.path)


def numpy_bytes(layers: tuple[int, ...], epochs: int) -> int:
    files = [file for layer in layers for file in (PATH / f"blocks.{layer}.resid_post").glob("c.*")]
    return sum(np.fromfile(file, np.uint8).nbytes for _ in range(epochs) for file in files)


def reader_bytes(store: ActivationStore, layers: tuple[int, ...], epochs: int, stack: bool) -> int:
    """Reads from the call of `batches` to the last batch, including threads and memory. Returns the bytes."""
    num_bytes = 0
    keys = [f"blocks.{layer}.resid_post" for layer in layers]
    for batch in store.batches(keys, BATCH_SIZE, shuffle=True, seed=0, epochs=epochs, stack=stack, dtype="stored"):
        arrays = [batch.activations] if stack else batch.activations.values()
        num_bytes += sum(array.nbytes for array in arrays)
    return num_bytes


def timed(read: Callable[[], int]) -> tuple[float, float]:
    """GiB/s, and the CPU seconds of all threads per GiB."""
    began, cpu = time.perf_counter(), time.process_time()
    gib = read() / GIB
    return gib / (time.perf_counter() - began), (time.process_time() - cpu) / gib


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=300_000)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    write_store(options.tokens)

    store = ActivationStore.open(PATH)
    cases: dict[str, Callable[[], int]] = {
        "numpy, one layer": lambda: numpy_bytes(LAYERS[:1], EPOCHS),
        "reader, one layer": lambda: reader_bytes(store, LAYERS[:1], EPOCHS, stack=False),
        "numpy, three layers": lambda: numpy_bytes(LAYERS, EPOCHS // 3),
        "reader, three layers": lambda: reader_bytes(store, LAYERS, EPOCHS // 3, stack=False),
        "reader, three layers stacked": lambda: reader_bytes(store, LAYERS, EPOCHS // 3, stack=True),
    }
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    for _ in range(options.repeats):
        for name, read in cases.items():
            runs[name].append(timed(read))
    speeds = {name: [speed for speed, _ in measured] for name, measured in runs.items()}
    for name, measured in speeds.items():
        cpu = statistics.median(seconds for _, seconds in runs[name])
        against = speeds["numpy, one layer" if "one" in name else "numpy, three layers"]
        ratio = statistics.median(ours / raw for ours, raw in zip(measured, against, strict=True))
        print(
            f"{name:30} {statistics.median(measured):5.2f} GiB/s ({min(measured):.2f} to {max(measured):.2f}), "
            f"{cpu:.2f} CPU seconds per GiB, {ratio:.2f} of numpy's speed"
        )
    Path("build/bench-reader.json").write_text(json.dumps(runs, indent=1) + "\n")


if __name__ == "__main__":
    main()
