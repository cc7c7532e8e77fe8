"""Compares the write path with raw writes of the same bytes, on this machine. Writes build/bench-writer.json.

    python scripts/bench/bench_writer.py [--blocks 8] [--repeats 5]

Blocks have three layers, d=768, bfloat16, and 128 rows of 256 tokens: 48 MiB per object. "Store" does what the job's
writer thread does with a block in its buffers: `start_block`, with crc32c, document table and record, and two blocks in
progress. "TensorStore" writes the same objects by its key-value store; "files" by write,
fsync and rename in one thread per core. All three end when everything is synced to the disk. They alternate in one
process, because the speed of a shared machine drifts; the ratios are medians over neighbouring pairs.
"""

import argparse
import json
import os
import shutil
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np

from pipeline.core.sites import ActivationKey
from pipeline.data.documents import DOCUMENT_SCHEMA
from pipeline.store.format.commits import CommitRecord
from pipeline.store.format.layout import StoreLayout, activation_spec
from pipeline.store.format.metadata import StoreMetadata
from pipeline.store.io.storage import Storage
from pipeline.store.write.store_writer import StoreWriter

BUILD = Path("build/bench-writer")
LAYERS, WIDTH, LENGTH, ROWS = 3, 768, 256, 128
BUFFERS = 2  # sets of a block's arrays, in turn, as a job has: a single one would stay in the processor's cache
GIB = 1 << 30

Arrays = dict[str, np.ndarray]


def make_block() -> Arrays:
    """The arrays of a block without padding."""
    rng = np.random.default_rng(0)
    shape = (ROWS, LENGTH)
    values = rng.standard_normal((*shape, WIDTH), np.float32).astype(ml_dtypes.bfloat16)
    return {
        "tokens": rng.integers(1, 50000, shape, np.int32),
        "segments": np.ones(shape, np.int32),
        "positions": np.broadcast_to(np.arange(LENGTH, dtype=np.int32), shape).copy(),
        "documents": np.broadcast_to(np.arange(ROWS)[:, None], shape).copy(),
        **{f"blocks.{layer}.resid_post": values.copy() for layer in range(LAYERS)},
    }


def write_store(buffers: Sequence[Arrays], blocks: int) -> None:
    keys = [ActivationKey.parse(name) for name in buffers[0] if name.startswith("blocks.")]
    arrays = tuple(activation_spec(key, key.hook_name(), WIDTH, "bfloat16", "position") for key in keys)
    capture, config = {"statistics": False, "dtype": "bfloat16"}, {"run": {"max_tokens": 0}}
    batch = {"length": LENGTH}
    metadata = StoreMetadata({}, {}, {}, batch, capture, {}, num_streams=1, rows_per_block=ROWS, config=config)
    writer = StoreWriter.open(str(BUILD / "store"), metadata, StoreLayout(1, ROWS, LENGTH, arrays))
    start = {"shard": 0, "document": 0, "token": 0, "ordinal": 0}
    pending: deque = deque()
    for index in range(blocks):
        record = CommitRecord(0, index, ROWS, ROWS * LENGTH, 0, 0, (), start, start, False)
        block = buffers[index % len(buffers)]
        pending.append(writer.start_block(record, block, DOCUMENT_SCHEMA.empty_table(), lambda _: (None, {})))
        if len(pending) == BUFFERS:
            pending.popleft().result()
    while pending:
        pending.popleft().result()


def write_tensorstore(contents: Sequence[Mapping[str, bytes]], blocks: int) -> None:
    storage = Storage.open(BUILD / "tensorstore")
    pending: deque = deque()
    for index in range(blocks):
        block = contents[index % len(contents)]
        pending.append([storage.start_write(f"{name}/{index}", content) for name, content in block.items()])
        if len(pending) == BUFFERS:
            _ = [write.result() for write in pending.popleft()]
    _ = [write.result() for writes in pending for write in writes]


def write_files(buffers: Sequence[Arrays], blocks: int) -> None:
    def write(name: str, index: int) -> None:
        folder = BUILD / "files" / name
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f"{index}.part", "wb", buffering=0) as file:
            content = memoryview(buffers[index % len(buffers)][name].view(np.uint8)).cast("B")
            while content:
                content = content[file.write(content) :]
            os.fsync(file.fileno())
        os.rename(folder / f"{index}.part", folder / str(index))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(write, *zip(*((name, index) for index in range(blocks) for name in buffers[0]), strict=True)))


def timed(write: Callable[[int], None], blocks: int, gib: float) -> tuple[float, float]:
    """GiB/s, and the CPU seconds of all threads per GiB. Earlier output is deleted and synced first."""
    shutil.rmtree(BUILD, ignore_errors=True)
    BUILD.mkdir(parents=True)
    os.sync()
    began, cpu = time.perf_counter(), time.process_time()
    write(blocks)
    return gib / (time.perf_counter() - began), (time.process_time() - cpu) / gib


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    buffers = [make_block() for _ in range(BUFFERS)]
    gib = options.blocks * sum(values.nbytes for values in buffers[0].values()) / GIB
    contents = [{name: values.tobytes() for name, values in block.items()} for block in buffers]
    cases = {
        "files": partial(write_files, buffers),
        "TensorStore": partial(write_tensorstore, contents),
        "store": partial(write_store, buffers),
    }
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    for _ in range(options.repeats):
        for name, write in cases.items():
            runs[name].append(timed(write, options.blocks, gib))
    shutil.rmtree(BUILD)
    speeds = {name: [speed for speed, _ in measured] for name, measured in runs.items()}
    for name, measured in speeds.items():
        cpu = statistics.median(seconds for _, seconds in runs[name])
        ratio = statistics.median(ours / raw for ours, raw in zip(speeds["store"], measured, strict=True))
        print(
            f"{name:12} {statistics.median(measured):5.2f} GiB/s ({min(measured):.2f} to {max(measured):.2f}), "
            f"{cpu:.2f} CPU seconds per GiB; the store has {ratio:.2f} of its speed"
        )
    Path("build/bench-writer.json").write_text(json.dumps(runs, indent=1) + "\n")


if __name__ == "__main__":
    main()
