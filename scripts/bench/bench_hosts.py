"""Checks that many hosts, killed at random, fill a store as one undisturbed process would.

    python -m scripts.bench.bench_hosts [--blocks 100000] [--streams 1000] [--hosts 64] [--kills 200] [--latency-s 0.05]

Each host is a job of one process. It reads, tokenises and packs real documents; only the step is fake: the
activations are a function of the tokens. Everything after the step is the job's code: blocks, statistics, records,
leases, and completing the store. A host that is killed or fails is restarted. At the end, the table of all blocks and
the merged statistics are compared, byte for byte, with those that one process computes from the documents without a
store. The store is a local folder, or with `--latency-s` in a bucket of `gcs_standin`, which counts requests. Writes
build/bench-hosts.json.
"""

import argparse
import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import reduce
from multiprocessing import connection, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.config.composing import compose
from pipeline.core.errors import EXIT_FAILED, StoreError
from pipeline.data.documents import TokenBlock
from pipeline.extraction.block_contents import commit_record, side_arrays
from pipeline.extraction.job_run import complete, open_store
from pipeline.extraction.leasing import LeasedStreams
from pipeline.job.metrics import Metrics
from pipeline.job.opening import Job, open_job
from pipeline.store.format.block_table import NO_BLOCKS, BlockTable, StreamBlocks, join_streams
from pipeline.store.format.metadata import require_root
from pipeline.store.format.statistics import BlockStatistics, encode_statistics, merge_arrays, token_statistics
from pipeline.store.format.summary import BLOCKS, STATISTICS
from pipeline.store.format.tables import table_digest
from pipeline.store.write.leases import Leases
from pipeline.store.write.store_writer import StoreWriter
from scripts.bench.gcs_standin import control, environment, server

RESULTS = Path("build/bench-hosts.json")
LENGTH = 8  # tokens per row; a row is a block with one document
POLL_S = 0.02


@dataclass(frozen=True)
class Shape:
    """The amount of work: `blocks` in `streams`, by `hosts`, with `kills` kills."""

    blocks: int
    streams: int
    hosts: int
    kills: int
    lease_s: float = 20.0


@dataclass
class Figures:
    """Results. computed: number of blocks, counting repetitions. killed, failed: numbers of hosts."""

    seconds: float
    killed: int = 0
    failed: int = 0
    computed: int = 0


def make_text(folder: Path, shape: Shape) -> None:
    """Writes a file per stream, with a document of five to eight words for each of its blocks."""
    folder.mkdir(parents=True)
    numbers = np.arange(shape.blocks // shape.streams)
    for stream in range(shape.streams):
        texts = [" ".join(["the"] * (5 + (stream + number * 7) % 4)) for number in numbers.tolist()]
        pq.write_table(pa.table({"text": texts}), folder / f"{stream:06}.parquet")


def open_hosts_job(folder: Path, path: str, shape: Shape) -> Job:
    """Opens the job that reads the documents of `make_text`."""
    overrides = {
        "data.path": folder,
        "data.num_streams": shape.streams,
        "data.id_column": "null",
        "store.path": path,
        "store.shard_mib": 0.001,
        "capture.layers": "[0]",
        "batch.rows": 1,
        "batch.length": LENGTH,
        "run.lease_s": shape.lease_s,
        "run.progress": "false",
    }
    return open_job(compose([f"{key}={value}" for key, value in overrides.items()]))


def fake_step(job: Job, block: TokenBlock) -> tuple[dict[str, np.ndarray], BlockStatistics]:
    """All arrays of a block, and the statistics of its activations, which are a function of its tokens."""
    [spec] = job.layout.arrays
    shape = job.layout.shard_shape(spec)
    features = np.arange(spec.width) % 61 - 30
    activations = np.zeros(shape, spec.dtype)
    valid = block.segments != 0
    activations[: block.num_rows] = np.where(valid, block.tokens + block.positions, 0)[..., None] * features / 64
    stored = activations[: block.num_rows][valid].astype(np.float32)
    arrays = {spec.name: activations} | side_arrays(block, job.layout.rows_per_block)
    return arrays, {spec.name: token_statistics(stored)}


def run_host(folder: Path, path: str, shape: Shape, computed: Sequence[int], number: int) -> None:
    """Runs one host to its end. Counts its blocks in `computed[number]`. Exits with 1 after an error."""
    try:
        job = open_hosts_job(folder, path, shape)
        store = open_store(job)
        metrics = Metrics(total_tokens=None, stored_tokens=0, progress=False, interval_s=3600)
        with closing(metrics), closing(Leases(store.storage, shape.lease_s)) as leases:
            leased = LeasedStreams(job, store, leases, metrics)
            for block in leased.blocks(lambda: False):
                _write(job, store, leased, block)
                computed[number] += 1
        complete(job, store)
    except StoreError as error:
        print(f"host {number}: {error}", flush=True)
        os._exit(EXIT_FAILED)


def _write(job: Job, store: StoreWriter, leased: LeasedStreams, block: TokenBlock) -> None:
    """Writes a block like the job's writer, which writes nothing of a stream that this host no longer holds."""
    arrays, statistics = fake_step(job, block)
    if leased.holds(block.stream):
        store.write_block(commit_record(block), arrays, block.table, statistics)
    leased.finished(block.stream)


def run_hosts(folder: Path, path: str, shape: Shape) -> Figures:
    """Starts the hosts, and restarts each host that ends before the store is complete.

    One of the running hosts is killed after every random number of computed blocks.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    computed = context.RawArray("q", shape.hosts)  # without a lock, which a killed host might hold
    rng = random.Random(0)
    kill_at = sorted(rng.sample(range(1, shape.blocks * 9 // 10), shape.kills), reverse=True)
    hosts: dict[int, BaseProcess] = {}
    doomed: set[int] = set()
    began, figures = time.monotonic(), Figures(0)

    def start(number: int) -> None:
        hosts[number] = context.Process(target=run_host, args=(folder, path, shape, computed, number))
        hosts[number].start()

    try:
        for number in range(shape.hosts):
            start(number)
        while hosts:
            connection.wait([host.sentinel for host in hosts.values()], POLL_S)
            if kill_at and sum(computed) >= kill_at[-1] and (alive := sorted(hosts.keys() - doomed)):
                kill_at.pop()
                doomed.add(number := rng.choice(alive))
                hosts[number].kill()
            for number in [number for number, host in hosts.items() if host.exitcode is not None]:
                code = hosts.pop(number).exitcode
                if number in doomed:
                    doomed.remove(number)
                    kill_at += [0] * (code != -signal.SIGKILL)  # it ended before the kill, so another host is killed
                if code not in (0, EXIT_FAILED, -signal.SIGKILL):
                    raise RuntimeError(f"host {number} has ended with exit code {code}")
                figures.killed += code < 0
                figures.failed += code > 0
                if code:
                    start(number)
    finally:
        for host in hosts.values():
            host.kill()
    figures.seconds, figures.computed = time.monotonic() - began, sum(computed)
    return figures


def differences(job: Job) -> list[str]:
    """The store's summaries that differ from those of a run without a store."""
    summary = require_root(job.storage).summary or {}
    streams, statistics = {}, []
    for stream in range(job.plan.streams.count):
        table, total = _expected_stream(job, stream)
        streams[stream] = StreamBlocks(table, None)
        statistics.append(total)
    expected = {
        BLOCKS: join_streams(streams).encode(),
        STATISTICS: encode_statistics({0: reduce(merge_arrays, statistics)}),
    }
    return [kind for kind, content in expected.items() if summary.get(kind) != table_digest(content)]


def _expected_stream(job: Job, stream: int) -> tuple[BlockTable, BlockStatistics]:
    records, statistics = [], []
    for block in _blocks(job, stream):
        records.append(replace(commit_record(block), statistics_sha256="some"))
        statistics.append(fake_step(job, block)[1])
    return BlockTable.from_records(records), reduce(merge_arrays, statistics)


def _blocks(job: Job, stream: int) -> Iterator[TokenBlock]:
    work = job.stream_work(stream, NO_BLOCKS)
    return iter(()) if work is None else work.blocks(lambda: False)


@contextmanager
def empty_store(folder: Path, latency_s: float | None) -> Iterator[tuple[str, str | None]]:
    """The path of a store, in `folder` or a bucket of a stand-in, and the stand-in's URL if there is one."""
    if latency_s is None:
        yield str(folder / "store"), None
        return
    with server() as url:
        os.environ |= environment(url)
        control(url, latency_s=latency_s)
        yield "gs://bench-hosts/store", url


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"blocks": 100_000, "streams": 1000, "hosts": 64, "kills": 200}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lease-s", type=float, default=Shape.lease_s)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="for documents and the local store")
    parser.add_argument("--latency-s", type=float, help="of each request: use the stand-in, not a local store")
    options = vars(parser.parse_args())
    os.environ["JAX_PLATFORMS"] = "cpu"  # for the hosts
    jax.config.update("jax_platforms", "cpu")
    folder, latency_s = options.pop("folder"), options.pop("latency_s")
    shape = Shape(**options)
    with (
        tempfile.TemporaryDirectory(dir=folder) as name,
        empty_store(Path(name), latency_s) as (store, url),
    ):
        text = Path(name, "text")
        make_text(text, shape)
        figures = run_hosts(text, store, shape)
        result = asdict(shape) | asdict(figures)
        if url:
            result |= {"latency_s": latency_s, "requests": control(url)["counters"]}
        result["different"] = differences(open_hosts_job(text, store, shape))
        print(json.dumps(result))
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
