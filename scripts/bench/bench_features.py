"""Compares reading one feature of a store with many blocks to reading all features, from local files and a bucket.

    python -m scripts.bench.bench_features [--blocks 1000]

Each block has 2,048 tokens, for each of which 64 of 16,384 features fire, some a thousand times as often as others. The
bucket is `gcs_standin` with 50 ms per request, which serves the local files.
"""

import argparse
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.data.documents import DOCUMENT_SCHEMA
from pipeline.store import ActivationStore
from pipeline.store.features.block_statistics import feature_statistics
from pipeline.store.features.index_file import by_feature, encode_index, index_key
from pipeline.store.format.commits import CommitRecord
from pipeline.store.format.layout import StoreLayout, feature_specs
from pipeline.store.format.metadata import StoreMetadata
from pipeline.store.write.store_writer import StoreWriter
from scripts.bench.gcs_standin import control, environment, server

PATH = Path("build/bench/features")
ARRAY, WIDTH, TOP = "blocks.5.resid_post", 16384, 64
ROWS, LENGTH = 16, 128
FEATURES = f"features.{ARRAY}"


class Files:
    """A `gcs_standin.Provider` of the local store, as gs://bucket/store."""

    def content(self, key: str) -> bytes | None:
        path = PATH / key.removeprefix("bucket/store/")
        return path.read_bytes() if path.is_file() else None

    def keys_from(self, start: str) -> Iterator[str]:
        keys = (f"bucket/store/{path.relative_to(PATH)}" for path in PATH.rglob("*") if path.is_file())
        return iter(sorted(key for key in keys if key >= start))


def write_store(num_blocks: int) -> None:
    """Writes random features, whose frequencies follow Zipf's law."""
    shutil.rmtree(PATH, ignore_errors=True)
    encoder = {"features": FEATURES, "array": ARRAY, "width": WIDTH, "top": TOP, "dtype": "bfloat16"}
    metadata = StoreMetadata(
        **{"model": {}, "tokenizer": {}, "data": {}, "batch": {"length": LENGTH}, "store": {"compression": "none"}},
        capture={"arrays": [], "dtype": "bfloat16", "statistics": True, "encode": [encoder], "encode_index": True},
        num_streams=1,
        rows_per_block=ROWS,
        config={"run": {"max_tokens": 0}},
    )
    layout = StoreLayout(1, ROWS, LENGTH, (), outputs=feature_specs(FEATURES, TOP, "bfloat16", "position"))
    writer = StoreWriter.open(str(PATH), metadata, layout)
    rng, shape = np.random.default_rng(0), (ROWS, LENGTH)
    sides = {"tokens": np.ones(shape, np.int32), "segments": np.ones(shape, np.int32)}
    sides |= {"positions": np.broadcast_to(np.arange(LENGTH, dtype=np.int32), shape).copy()}
    for block in range(num_blocks):
        index = np.minimum(rng.zipf(1.2, (*shape, TOP)) - 1, WIDTH - 1)
        # A token occasionally has a feature twice, which does not matter here.
        index = ((index + np.arange(TOP)) % WIDTH).astype(np.int32)
        value = -np.sort(-np.abs(rng.normal(size=(*shape, TOP))), axis=2)
        parts = {"index": index, "value": value.astype("bfloat16"), "n_active": np.full(shape, TOP, np.int32)}
        matrix, key = by_feature(index, parts["value"], WIDTH), index_key(FEATURES, 0, block)
        statistics = {FEATURES: feature_statistics(parts, np.ones(shape, bool), matrix)}
        arrays = sides | {"documents": np.full(shape, block, np.int64)}
        arrays |= {f"{FEATURES}.{part}": values for part, values in parts.items()}
        cursors = [{"shard": 0, "document": at, "token": 0, "ordinal": at} for at in (block, block + 1)]
        record = CommitRecord(0, block, ROWS, ROWS * LENGTH, 0, 0, (), *cursors, block == num_blocks - 1)
        table, indexes = DOCUMENT_SCHEMA.empty_table(), {key: encode_index(matrix, key)}
        writer.write_block(record, arrays, table, statistics, indexes)
    writer.finish(force=True)


def timed(what: str, read: Callable[[], Any]) -> Any:
    began = time.perf_counter()
    result = read()
    print(f"{what}: {time.perf_counter() - began:.2f} s", flush=True)
    return result


def measure(store: ActivationStore) -> None:
    count = store.feature_statistics(ARRAY).count
    rare = int(np.argsort(count)[len(count) // 2])
    for name, feature in (("the most frequent feature", int(count.argmax())), ("the median feature", rare)):
        for top in (None, 20):
            timed(
                f"  {name}, {count[feature]:,} firings, top={top}", lambda f=feature, t=top: store.feature(ARRAY, f, t)
            )
        num_bytes = 24 * len(store.blocks) + 6 * count[feature]
        print(f"    {num_bytes / 2**20:.2f} MiB of all features' {6 * count.sum() / 2**20:,.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=1000)
    num_blocks = parser.parse_args().blocks
    timed(f"{num_blocks} blocks written", lambda: write_store(num_blocks))
    print("local files")
    store = timed("  opened", lambda: ActivationStore.open(str(PATH)))
    measure(store)
    timed("  all features of all tokens", lambda: sum(1 for _ in store.batches([], 4096, features=True)))

    with server(Files()) as url:
        os.environ.update(environment(url))
        control(url, latency_s=0.05)
        print("bucket, 50 ms per request")
        measure(timed("  opened", lambda: ActivationStore.open("gs://bucket/store")))


if __name__ == "__main__":
    main()
