"""64 processes, killed at random, fill one store: it equals that of one process, byte by byte.

Each host is a job of one process, and everything but the step is the job's code: the activations are a function of the
tokens. A host that is killed or fails is started again.
"""

import os
import random
import signal
from collections.abc import Sequence
from contextlib import closing
from multiprocessing import connection, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config.composing import compose
from pipeline.core.errors import EXIT_FAILED, StoreError
from pipeline.job.leasing import LeasedStreams
from pipeline.job.metrics import Metrics
from pipeline.job.opening import open_job
from pipeline.job.running import complete, open_store
from pipeline.job.writing.block_writer import commit_record, side_arrays
from pipeline.store.check.verifying import verify_store
from pipeline.store.format.statistics import token_statistics
from pipeline.store.write.leases import Leases
from tests.jobs import assert_same_store

BLOCKS, STREAMS, HOSTS, KILLS = 2000, 200, 64, 20
LENGTH = 8  # tokens of a row, which is a block with one document


def write_text(folder: Path) -> None:
    """Writes a file per stream, with a document of five to eight words for each of its blocks."""
    folder.mkdir(parents=True)
    for stream in range(STREAMS):
        texts = [" ".join(["the"] * (5 + (stream + number * 7) % 4)) for number in range(BLOCKS // STREAMS)]
        pq.write_table(pa.table({"text": texts}), folder / f"{stream:06}.parquet")


def run_host(text: Path, path: Path, computed: Sequence[int], number: int) -> None:
    """Runs one host to its end. Counts its blocks in `computed[number]`. Exits with 1 after an error."""
    overrides = [f"data.path={text}", f"data.num_streams={STREAMS}", "data.id_column=null", f"store.path={path}"]
    overrides += ["store.shard_mib=0.001", "capture.layers=[0]", "batch.rows=1", f"batch.length={LENGTH}"]
    try:
        job = open_job(compose([*overrides, "run.lease_s=20", "run.progress=false"]))
        [spec] = job.layout.arrays
        store = open_store(job)
        metrics = Metrics(total_tokens=None, stored_tokens=0, progress=False, interval_s=3600)
        with closing(metrics), closing(Leases(store.storage, job.config.run.lease_s)) as leases:
            leased = LeasedStreams(job, store, leases, metrics)
            for block in leased.blocks(lambda: False):
                values = (block.tokens + block.positions)[..., None] * (np.arange(spec.width) % 61 - 30) / 64
                arrays = {spec.name: np.where(block.segments[..., None] != 0, values, 0).astype(spec.dtype)}
                valid = arrays[spec.name][block.segments != 0].astype(np.float32)
                arrays |= side_arrays(block, job.layout)
                if leased.holds(block.stream):
                    statistics = {spec.name: token_statistics(valid)}
                    store.start_block(
                        commit_record(block), arrays, block.table, lambda _, s=statistics: (s, {})
                    ).result()
                leased.finished(block.stream)
                computed[number] += 1
        complete(job, store)
    except StoreError as error:
        print(f"host {number}: {error}", flush=True)
        os._exit(EXIT_FAILED)


def run_hosts(text: Path, path: Path) -> int:
    """Runs all hosts until the store is complete, and kills one after random numbers of blocks. Returns how many."""
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    computed = context.RawArray("q", HOSTS)  # without a lock, which a killed host might hold
    rng = random.Random(0)
    kill_at = sorted(rng.sample(range(1, BLOCKS * 9 // 10), KILLS), reverse=True)
    hosts: dict[int, BaseProcess] = {}
    doomed: set[int] = set()
    killed = 0

    def start(number: int) -> None:
        hosts[number] = context.Process(target=run_host, args=(text, path, computed, number))
        hosts[number].start()

    try:
        for number in range(HOSTS):
            start(number)
        while hosts:
            connection.wait([host.sentinel for host in hosts.values()], timeout=0.02)
            if kill_at and sum(computed) >= kill_at[-1] and (alive := sorted(hosts.keys() - doomed)):
                kill_at.pop()
                doomed.add(number := rng.choice(alive))
                hosts[number].kill()
            for number in [number for number, host in hosts.items() if host.exitcode is not None]:
                code = hosts.pop(number).exitcode
                if number in doomed:
                    doomed.remove(number)
                    kill_at += [0] * (code != -signal.SIGKILL)  # it ended before the kill, so another host is killed
                assert code in (0, EXIT_FAILED, -signal.SIGKILL)
                killed += code == -signal.SIGKILL
                if code:
                    start(number)
    finally:
        for host in hosts.values():
            host.kill()
    return killed


@pytest.mark.slow
def test_64_hosts_of_which_20_are_killed_make_the_same_store(tmp_path):
    text, store, reference = (tmp_path / name for name in ("text", "store", "reference"))
    write_text(text)
    assert run_hosts(text, store) == KILLS
    assert verify_store(str(store)) == []
    run_host(text, reference, [0], 0)
    assert_same_store(store, reference)
