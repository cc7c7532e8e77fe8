"""The stores of `make bench-scale`, and how many requests the bookkeeping of small ones takes."""

import json
import os
import subprocess
import sys
from typing import NamedTuple

import pytest

from pipeline.store.check.verifying import verify_store
from pipeline.store.io.storage import Storage
from pipeline.store.write.store_writer import StoreWriter
from scripts.bench import scale_store
from scripts.bench.scale_growth import BLOCKS, MEASURED
from scripts.bench.scale_store import PLACE, State, StoreShape, arrays, make_store, record, statistics, table
from tests.jobs import ROOT


class Bound(NamedTuple):
    """At most `fixed` + `per_block` * B requests, for B blocks in 10 streams."""

    fixed: int
    per_block: float


# Tighten these where a change saves requests.
BOUNDS = {
    "start": Bound(fixed=30, per_block=1),
    "extend": Bound(fixed=50, per_block=0),
    "finish": Bound(fixed=30, per_block=1),
    "open": Bound(fixed=12, per_block=0),
    "open unfinished": Bound(fixed=12, per_block=1),
    "document": Bound(fixed=12, per_block=1),
}


@pytest.mark.parametrize("state", State)
def test_a_synthetic_store_has_the_objects_that_the_writer_writes(state, tmp_path, monkeypatch):
    monkeypatch.setattr(scale_store, "BUILD", tmp_path)
    shape = StoreShape(blocks=12, streams=3, state=state)
    synthetic = make_store(shape, shape.tokens)
    job = scale_store.open_bench_job(shape.streams, shape.tokens, f"memory://written-{state}")
    writer = StoreWriter.open(job.storage, job.metadata, job.layout)
    for stream in range(shape.streams):
        for block in range(shape.stream_blocks):
            contents = arrays(shape, job.layout, stream, block), table(shape, stream, block), statistics(job.layout)
            writer.commit(writer.begin_block(stream, block, *contents), record(block, stream))
    if state is State.complete:
        writer.finish()
    assert verify_store(job.storage) == []
    keys = job.storage.list_keys()
    assert [key.removeprefix(f"{PLACE}/") for key in synthetic.keys_from("")] == keys
    assert [key for key in keys if synthetic.content(f"{PLACE}/{key}") != job.storage.read(key)] == ["zarr.json"]
    copy = Storage.open(f"memory://copy-{state}")  # of the root, the time of creation and the path differ
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


def test_the_bookkeeping_of_a_growing_store_takes_no_more_requests_than_before(tmp_path):
    """In a process of its own: TensorStore keeps the first address of Google Cloud Storage that it is given."""
    command = [sys.executable, "-m", "scripts.bench.scale_growth"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout.splitlines()[-1])
    assert set(counts) == set(MEASURED) == set(BOUNDS)
    allowed = {name: {b: bound.fixed + bound.per_block * b for b in BLOCKS} for name, bound in BOUNDS.items()}
    too_many = {
        (name, blocks): f"{counts[name][str(blocks)]} requests, at most {most:g} are allowed"
        for name, limits in allowed.items()
        for blocks, most in limits.items()
        if counts[name][str(blocks)] > most
    }
    assert too_many == {}
