"""The bookkeeping of a growing store takes no more requests."""

import json
import os
import subprocess
import sys

import pytest

from scripts.bench.bench_scale import num_requests
from tests.jobs import ROOT

pytestmark = pytest.mark.heavy
STREAMS = 10
# Requests for 10 streams, for any number of blocks. Lower them when a change saves requests.
BOUNDS = {
    "start of one process": 23,
    "reader: open, unfinished": 82,
    "finish": 60,
    "reader: open": 2,
    "reader: document(number)": 9,
    "reader: document(id)": 13,
    "start of one process, to extend": 20,
}


def test_the_bookkeeping_of_a_growing_store_takes_no_more_requests(tmp_path):
    """In another process, since TensorStore keeps the first address of Google Cloud Storage."""
    command = [sys.executable, "-m", "scripts.bench.bench_scale", "--blocks", "20", "40", "--streams", str(STREAMS)]
    command += ["--latency-s", "0"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ['PYTHONPATH']}"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    costs = json.loads((tmp_path / "build" / "bench-scale.json").read_text())
    counts = {path: [num_requests(costs[blocks][path]) for blocks in ("20", "40")] for path in BOUNDS}
    assert {path: both for path, both in counts.items() if max(both) > BOUNDS[path]} == {}
    assert {path: both for path, both in counts.items() if both[1] > both[0] + STREAMS} == {}
