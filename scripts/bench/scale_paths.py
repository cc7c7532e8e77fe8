"""Measures a path of a store's bookkeeping against `gcs_standin`, in a separate process.

A path is prepared without latency; only the path itself is measured. Run by `bench_scale`, which starts the server.
"""

import argparse
import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline import delete as delete_command
from pipeline.extraction.job_run import complete, has_work, open_store
from pipeline.extraction.leasing import LeasedStreams
from pipeline.inspection.report import inspect
from pipeline.job.metrics import Metrics
from pipeline.job.opening import Job
from pipeline.store import ActivationStore
from pipeline.store.check.scope import Level, Scope
from pipeline.store.check.verifying import verify_store
from pipeline.store.format.layout import MIB, SIDE_ARRAYS
from pipeline.store.io.storage import Storage, StorageOptions
from pipeline.store.read import batches
from pipeline.store.read.shard_reads import REMOTE_REQUESTS
from pipeline.store.write.indexing import index_ids
from pipeline.store.write.leases import Leases
from scripts.bench.gcs_standin import control
from scripts.bench.scale_store import BLOCK_TOKENS, LENGTH, ROWS, URL, WIDTH, State, StoreShape, open_bench_job

PROCESSES = 64
# For a store with d=2048 in bfloat16 and blocks of 64 MiB: the number of blocks whose side arrays a shuffled reader
# holds, and the blocks of activations in one of its buffers.
WINDOW_BLOCKS, BUFFER_BLOCKS = 200, 4
Measured = Callable[[], object]


@dataclass(frozen=True)
class MeasuredPath:
    """One measured path.

    title: for the table. state: the store's. prepare: is called with B and S, makes preparations, and returns the
    function to measure. stored: the share of the B blocks that the store has. wanted: its target, as a multiple of B
    blocks. has_ids: the store has indexes of ids.
    """

    title: str
    state: State
    prepare: Callable[[int, int], Measured]
    stored: float = 1.0
    wanted: float = 1.0
    has_ids: bool = False


def share(job: Job, index: int) -> Job:
    """The job of process `index` of PROCESSES."""
    streams = replace(job.plan.streams, local=tuple(range(index, job.plan.streams.count, PROCESSES)))
    return replace(job, plan=replace(job.plan, streams=streams))


def prepare_start(blocks: int, streams: int, wanted: float) -> Measured:
    """What `pipeline.run` does before its first step: it reads the store, and finds what is left of its streams."""
    job = share(open_bench_job(streams, int(wanted * blocks) * BLOCK_TOKENS), 0)

    def start() -> None:
        store = open_store(job)
        assert has_work(job, store)

    return start


def prepare_starts(blocks: int, streams: int, wanted: float) -> Measured:
    """PROCESSES processes start at the same time and send separate requests; here they are threads."""
    target, options = int(wanted * blocks) * BLOCK_TOKENS, StorageOptions(concurrency=32)
    jobs = [
        replace(
            share(open_bench_job(streams, target), index),
            storage=Storage.open(URL, options),
        )
        for index in range(PROCESSES)
    ]

    def start_all() -> None:
        with ThreadPoolExecutor(PROCESSES) as pool:
            assert all(not store.complete for store in pool.map(open_store, jobs))

    return start_all


def prepare_finish(blocks: int, streams: int) -> Measured:
    """The last process of a job completes the store, and has already read the records."""
    job = open_bench_job(streams, blocks * BLOCK_TOKENS)
    store = open_store(job)

    def finish() -> None:
        complete(job, store)
        assert store.complete

    return finish


def prepare_open(blocks: int, streams: int) -> Measured:
    def open_reader() -> None:
        assert ActivationStore.open(URL).num_tokens == blocks * BLOCK_TOKENS

    return open_reader


def prepare_document(blocks: int, streams: int) -> Measured:
    """One document in the middle of the store, by its number."""
    store, number = ActivationStore.open(URL), blocks * ROWS // 2
    return lambda: store.document(number)


def prepare_document_id(blocks: int, streams: int) -> Measured:
    """The same document by its id. It is a reader's first, so the indexes' headers are also read."""
    store, number = ActivationStore.open(URL), blocks * ROWS // 2
    id = store.document(number).id

    def document() -> None:
        assert store.document(id).document == number

    return document


def prepare_index(blocks: int, streams: int) -> Measured:
    """The share of one process of PROCESSES."""
    storage = Storage.open(URL).with_own_requests(REMOTE_REQUESTS)
    return lambda: index_ids(storage, range(0, streams, PROCESSES))


def prepare_batches(blocks: int, streams: int) -> Measured:
    """Reads the first batch of a shuffled epoch, with as many blocks in memory as with blocks of real sizes."""
    store = ActivationStore.open(URL)
    side_bytes = sum(spec.position_bytes for spec in SIDE_ARRAYS)
    batches.WINDOW_MIB = WINDOW_BLOCKS * BLOCK_TOKENS * side_bytes / MIB
    buffer_mib = BUFFER_BLOCKS * BLOCK_TOKENS * WIDTH * 2 / MIB

    def first_batch() -> None:
        with closing(store.batches(store.keys, 64, shuffle=True, seed=0, buffer_mib=buffer_mib)) as reader:
            next(reader)

    return first_batch


def prepare_lease(blocks: int, streams: int, wanted: int) -> Measured:
    """Until one process of PROCESSES has its first block to compute, or finds that no stream needs it."""
    job = share(open_bench_job(streams, wanted * blocks * BLOCK_TOKENS), 0)
    store = open_store(job)

    def lease() -> None:
        metrics = Metrics(total_tokens=job.plan.streams.max_tokens, stored_tokens=0, progress=False, interval_s=1e9)
        with closing(metrics), closing(Leases(store.storage, job.config.run.lease_s)) as leases:
            block = next(LeasedStreams(job, store, leases, metrics).blocks(lambda: False), None)
            assert (block is None) == (wanted == 1)

    return lease


def prepare_verify(blocks: int, streams: int) -> Measured:
    def verify() -> None:
        assert verify_store(URL) == []

    return verify


def prepare_verify_records(blocks: int, streams: int) -> Measured:
    """The share of one process of PROCESSES."""
    scope = Scope(rank=0, world=PROCESSES, level=Level.records)

    def verify() -> None:
        assert verify_store(URL, scope=scope) == []

    return verify


def prepare_inspect(blocks: int, streams: int) -> Measured:
    """Inspects a sample of 64 rows."""

    def inspect_quietly() -> None:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            inspect(URL, html=None, num_tokens=64 * LENGTH, seed=0, tokenizer=None)

    return inspect_quietly


def prepare_delete(blocks: int, streams: int) -> Measured:
    def delete() -> None:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            delete_command.delete(delete_command.Settings(URL, confirm=True))

    return delete


PATHS: Mapping[str, MeasuredPath] = {
    "start": MeasuredPath(
        "start of one process, B of 2B blocks done",
        State.unfinished,
        lambda b, s: prepare_start(b, s, 2),
        wanted=2,
    ),
    "resume": MeasuredPath(
        "start of one process, half of B blocks done",
        State.unfinished,
        lambda b, s: prepare_start(b, s, 1),
        stored=0.5,
    ),
    "extend": MeasuredPath(
        "start of one process, B blocks complete",
        State.complete,
        lambda b, s: prepare_start(b, s, 2),
    ),
    "extend together": MeasuredPath(
        f"start of {PROCESSES} processes, B blocks complete",
        State.complete,
        lambda b, s: prepare_starts(b, s, 2),
    ),
    "finish": MeasuredPath("finish", State.unfinished, prepare_finish),
    "open": MeasuredPath("reader: open", State.complete, prepare_open),
    "open unfinished": MeasuredPath("reader: open, unfinished", State.unfinished, prepare_open),
    "document": MeasuredPath("reader: document(number)", State.complete, prepare_document),
    "document id": MeasuredPath("reader: document(id), indexed", State.complete, prepare_document_id, has_ids=True),
    "index": MeasuredPath(f"index the ids, one process of {PROCESSES}", State.complete, prepare_index),
    "batches": MeasuredPath("reader: first batch", State.complete, prepare_batches),
    "lease": MeasuredPath(
        "lease a stream, B of 2B blocks done",
        State.unfinished,
        lambda b, s: prepare_lease(b, s, 2),
        wanted=2,
    ),
    "lease none": MeasuredPath("lease, no stream needs work", State.unfinished, lambda b, s: prepare_lease(b, s, 1)),
    "verify": MeasuredPath("verify", State.complete, prepare_verify),
    "verify records": MeasuredPath(
        f"verify records, one process of {PROCESSES}", State.complete, prepare_verify_records
    ),
    "inspect": MeasuredPath("inspect", State.complete, prepare_inspect),
    "delete": MeasuredPath("delete", State.complete, prepare_delete),
}


def shape_and_target(name: str, blocks: int, streams: int) -> tuple[StoreShape, int]:
    """The shape of the store for a path, and its target in tokens."""
    path = PATHS[name]
    stored = int(path.stored * blocks) // streams * streams
    return StoreShape(stored, streams, path.state, path.has_ids), int(path.wanted * blocks) * BLOCK_TOKENS


class Measurement:
    """Seconds, CPU seconds, growth of peak memory, and requests since its creation."""

    def __init__(self, server: str, latency_s: float) -> None:
        self._server = server
        control(server, latency_s=latency_s)
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak of resident memory
        self._resident_mib = _status_mib("VmRSS")
        self._began, self._cpu = time.perf_counter(), time.process_time()

    def results(self, is_over_limit: bool) -> dict[str, Any]:
        return {
            "seconds": round(time.perf_counter() - self._began, 2),
            "is_over_limit": is_over_limit,
            "cpu_s": round(time.process_time() - self._cpu, 2),
            "peak_mib": round(_status_mib("VmHWM") - self._resident_mib),
            "requests": control(self._server)["counters"],
        }


def _status_mib(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=PATHS)
    parser.add_argument("server")
    parser.add_argument("result", type=Path)
    parser.add_argument("--blocks", type=int, required=True)
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--latency-s", type=float, default=0.05)
    parser.add_argument("--limit-s", type=float, default=300)
    options = parser.parse_args()
    run = PATHS[options.name].prepare(options.blocks, options.streams)
    measurement = Measurement(options.server, options.latency_s)
    is_written = threading.Lock()

    def end(is_over_limit: bool) -> None:
        with is_written:
            options.result.write_text(json.dumps(measurement.results(is_over_limit)))
            os._exit(0)  # the limit: other threads wait for requests

    limit = threading.Timer(options.limit_s, end, [True])
    limit.daemon = True
    limit.start()
    run()
    end(False)


if __name__ == "__main__":
    main()
