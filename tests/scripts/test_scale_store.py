"""The stores of `make bench-scale`, and the number of requests for the bookkeeping of small ones."""

import json
import os
import subprocess
import sys

import pytest

from pipeline.store.check.verifying import verify_store
from pipeline.store.io.storage import Storage
from pipeline.store.write.indexing import index_ids
from pipeline.store.write.store_writer import StoreWriter
from scripts.bench import scale_store
from scripts.bench.scale_growth import MEASURED
from scripts.bench.scale_store import PLACE, State, StoreShape, arrays, make_store, record, statistics, table
from tests.jobs import ROOT, without_writer

# Requests for 10 streams, for any number of blocks. Lower them when a change saves requests.
BOUNDS = {
    "start": 18,
    "extend": 19,
    "finish": 46,
    "open": 3,
    "open unfinished": 22,
    "document": 8,
    "document id": 11,  # the footer and a row group of the index, and the document by its number
}


@pytest.mark.parametrize("state", State)
def test_a_synthetic_store_has_the_objects_that_the_writer_writes(state, tmp_path, monkeypatch):
    monkeypatch.setattr(scale_store, "BUILD", tmp_path)
    shape = StoreShape(blocks=12, streams=3, state=state, has_ids=state is State.complete)
    synthetic = make_store(shape, shape.tokens)
    job = scale_store.open_bench_job(shape.streams, shape.tokens, f"memory://written-{state}")
    writer = StoreWriter.open(job.storage, job.metadata, job.layout)
    for stream in range(shape.streams):
        for block in range(shape.stream_blocks):
            content = arrays(shape, job.layout, stream, block), table(shape, stream, block), statistics(job.layout)
            writer.write_block(record(block, stream), *content)
    if state is State.complete:
        writer.finish()
        index_ids(job.storage)
    assert verify_store(job.storage) == []
    keys = job.storage.list_keys()
    assert [key.removeprefix(f"{PLACE}/") for key in synthetic.keys_from("")] == keys
    for key in keys:
        expected, stored = synthetic.content(f"{PLACE}/{key}"), job.storage.read(key)
        if key.startswith("_commits/"):
            expected, stored = without_writer(expected), without_writer(stored)
        assert (expected == stored) == (key != "zarr.json"), key
    copy = Storage.open(f"memory://copy-{state}")  # the roots differ in path and time of creation
    for key in keys:
        copy.write(key, synthetic.content(f"{PLACE}/{key}"))
    assert verify_store(copy) == []


def test_a_synthetic_store_has_no_other_objects(tmp_path, monkeypatch):
    monkeypatch.setattr(scale_store, "BUILD", tmp_path)
    shape = StoreShape(blocks=12, streams=3, state=State.unfinished)
    synthetic = make_store(shape, shape.tokens)
    absent = ["", "_commits/stream-00000/block-000004.json", "_commits/stream-00003/block-000000.json", "tokens/c/12/0"]
    assert [synthetic.content(f"{PLACE}/{key}") for key in absent] == [None] * 4
    keys = list(synthetic.keys_from(""))
    assert list(synthetic.keys_from(keys[17])) == keys[17:]
    assert list(synthetic.keys_from(keys[17] + "x")) == keys[18:]


def test_the_bookkeeping_of_a_growing_store_takes_no_more_requests(tmp_path):
    """In another process, since TensorStore keeps the first address of Google Cloud Storage."""
    command = [sys.executable, "-m", "scripts.bench.scale_growth"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout.splitlines()[-1])
    assert set(counts) == set(MEASURED) == set(BOUNDS)
    assert {name: counts[name] for name in BOUNDS if max(counts[name].values()) > BOUNDS[name]} == {}
    assert {name: by_blocks for name, by_blocks in counts.items() if len(set(by_blocks.values())) > 1} == {}
