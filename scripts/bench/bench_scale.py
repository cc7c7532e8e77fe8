"""Measures how the cost of a store's bookkeeping grows with its blocks: requests and seconds.

    python -m scripts.bench.bench_scale [--blocks 1000 10000] [--streams 100] [--latency-s 0.05]

`StoreWriter` fills a store of tiny blocks in `gcs_standin`. Then each path of PATHS runs once, with 50 ms per request:
what a job does at its start and end, and what readers do. They run in the order of a store's life, so each finds the
store as the one before has left it. Writes build/bench-scale.json.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import jax
import ml_dtypes  # noqa: F401  numpy then knows "bfloat16"
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.config.composing import compose
from pipeline.data.documents import DOCUMENT_SCHEMA
from pipeline.job.opening import Job, open_job
from pipeline.job.running import complete, has_work, open_store
from pipeline.store import ActivationStore
from pipeline.store.format.commits import CommitRecord
from pipeline.store.format.statistics import token_statistics
from pipeline.store.indexes.ids import index_ids
from pipeline.store.io.storage import Storage
from pipeline.store.read.shard_reads import REMOTE_REQUESTS
from pipeline.store.write.store_writer import StoreWriter
from scripts.bench.gcs_standin import control, environment, server

BUILD = Path("build/bench-scale")
ROWS, LENGTH, WIDTH = 4, 8, 128  # the bundled model's width; a row is a document
BLOCK_TOKENS = ROWS * LENGTH
DOCUMENTS = 1024  # of a stream's file: those of 256 blocks
PROCESSES = 64  # of a job; one of them is measured


class Life:
    """A store during its life: each of PATHS is one of its methods."""

    def __init__(self, url: str, blocks: int, streams: int) -> None:
        self.url, self.blocks, self.streams = url, blocks, streams
        self.job = self.open_job(blocks)

    def open_job(self, blocks: int) -> Job:
        """Opens the job that fills this many blocks."""
        folder = BUILD / f"data-{self.streams}"
        if not folder.exists():
            folder.mkdir(parents=True)
            documents = {"id": [str(i) for i in range(DOCUMENTS)], "text": ["Some text."] * DOCUMENTS}
            for stream in range(self.streams):
                pq.write_table(pa.table(documents), folder / _source(stream))
        overrides = [f"data.path={folder}", f"data.num_streams={self.streams}", f"store.path={self.url}"]
        overrides += ["store.shard_mib=0.001", "capture.layers=[0]", f"batch.rows={ROWS}", f"batch.length={LENGTH}"]
        return open_job(compose([*overrides, f"run.max_tokens={blocks * BLOCK_TOKENS}", "run.progress=false"]))

    def fill(self, first: int, end: int) -> None:
        """Writes the blocks from `first` to `end` of each stream, all with the same activations."""
        [spec] = self.job.layout.arrays
        activations = (np.arange(ROWS * LENGTH * WIDTH).reshape(ROWS, LENGTH, WIDTH) % 61 - 30).astype("bfloat16")
        statistics = {spec.name: token_statistics(activations.reshape(-1, WIDTH).astype(np.float32))}
        position = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (ROWS, LENGTH))
        sides = {"tokens": position + 1, "segments": np.ones((ROWS, LENGTH), np.int32), "positions": position}
        writer = StoreWriter.open(self.job.storage, self.job.metadata, self.job.layout)
        for stream in range(self.streams):
            for block in range(first, end):
                index = np.arange(block * ROWS, (block + 1) * ROWS)
                numbers = index * self.streams + stream
                ids, source = [f"{stream}/{i}" for i in index], [_source(stream)] * ROWS
                columns = [numbers, ids, source, index, *(np.full(ROWS, size) for size in (LENGTH, 0, 0, LENGTH))]
                start, after = (
                    {"shard": 0, "document": at * ROWS, "token": 0, "ordinal": at * ROWS} for at in (block, block + 1)
                )
                record = CommitRecord(stream, block, ROWS, *[BLOCK_TOKENS] * 2, ROWS, 0, (), start, after, False)
                documents = np.broadcast_to(numbers[:, None], (ROWS, LENGTH))
                arrays = sides | {spec.name: activations, "documents": documents}
                table = pa.table(columns, schema=DOCUMENT_SCHEMA)
                writer.start_block(record, arrays, table, lambda _: (statistics, {})).result()

    def share(self, job: Job) -> Job:
        """The job of one of PROCESSES processes."""
        streams = replace(job.plan.streams, local=tuple(range(0, job.plan.streams.count, PROCESSES)))
        return replace(job, plan=replace(job.plan, streams=streams))

    def start(self) -> None:
        job = self.share(self.job)
        assert has_work(job, open_store(job))

    def finish(self) -> None:
        complete(self.job, open_store(self.job))

    def open(self) -> None:
        self.store = ActivationStore.open(self.url)

    def document(self) -> None:
        self.id = self.store.document(self.blocks * ROWS // 2).id

    def index(self) -> None:
        index_ids(Storage.open(self.url).with_own_requests(REMOTE_REQUESTS))

    def document_id(self) -> None:
        """The same document by its id, in a new reader: the index's headers are read, too."""
        assert ActivationStore.open(self.url).document(self.id).id == self.id

    def first_batch(self) -> None:
        with closing(self.store.batches(self.store.keys, 64, shuffle=True, seed=0, buffer_mib=1)) as batches:
            next(batches)

    def extend(self) -> None:
        """Starts a job that wants twice as many blocks."""
        job = self.share(self.open_job(2 * self.blocks))
        assert has_work(job, open_store(job))


def _source(stream: int) -> str:
    return f"part-{stream:05d}.parquet"


# By title, in the order of a store's life. The last block of each stream is missing until `finish`.
PATHS: dict[str, Callable[[Life], None]] = {
    "start of one process": Life.start,
    "reader: open, unfinished": Life.open,
    "finish": Life.finish,
    "reader: open": Life.open,
    "reader: document(number)": Life.document,
    "index the ids": Life.index,
    "reader: document(id)": Life.document_id,
    "reader: first batch": Life.first_batch,
    "start of one process, to extend": Life.extend,
}


def measure(server_url: str, blocks: int, streams: int, latency_s: float) -> dict[str, dict[str, float]]:
    """The requests by kind, and seconds, of all paths for a new store. TensorStore must use the server."""
    if blocks % streams:
        raise ValueError(f"{blocks} blocks do not divide into {streams} streams")
    life, costs = Life(f"gs://bench-scale/{blocks}-{streams}", blocks, streams), {}
    life.fill(0, blocks // streams - 1)
    for title, run in PATHS.items():
        if title == "finish":
            life.fill(blocks // streams - 1, blocks // streams)
        control(server_url, latency_s=latency_s)
        began = time.perf_counter()
        run(life)
        seconds = time.perf_counter() - began
        costs[title] = {"seconds": round(seconds, 2), **control(server_url, latency_s=0)}
    return costs


def num_requests(cost: dict[str, float]) -> int:
    return sum(number for kind, number in cost.items() if kind != "seconds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="+", default=[1_000, 10_000])
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--latency-s", type=float, default=0.05)
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    with server() as url:
        os.environ |= environment(url)
        costs = {size: measure(url, size, options.streams, options.latency_s) for size in options.blocks}
    BUILD.with_name("bench-scale.json").write_text(json.dumps(costs, indent=1) + "\n")
    print(f"| path | {' | '.join(f'B = {size:,}: requests, seconds' for size in costs)} |\n|---{'|---' * len(costs)}|")
    for path in PATHS:
        of_path = [by_path[path] for by_path in costs.values()]
        cells = [f"{num_requests(cost):,}, {cost['seconds']:.1f}" for cost in of_path]
        print(f"| {path} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
