"""The log of a run, its counts and its requests; and the watchdog, which ends a run that hangs, and no other."""

import json
import subprocess
import sys
import textwrap
from contextlib import closing

import pytest

from pipeline.config.composing import compose
from pipeline.job.metrics import Metrics, run_name
from pipeline.job.running import run
from pipeline.store import ActivationStore
from pipeline.store.format.keys import Kind, parse_key
from pipeline.store.io.options import StorageOptions
from pipeline.store.io.storage import Storage
from tests.jobs import write_text
from tests.store.emulators import new_bucket
from tests.store.fault_proxy import Fault


def test_run_names_are_unique():
    first, second = run_name(), run_name()
    assert first != second
    assert parse_key(f"_jobs/{first}.jsonl").kind is Kind.job


def test_a_partial_block_counts_only_its_rows_and_waiting_for_its_commit_is_not_leasing(tmp_path):
    text = write_text(tmp_path / "text", files=1, documents=30)
    sizes = ["batch.rows=4", "batch.length=64", "store.shard_mib=0.25", "capture.layers=[1]"]
    run(compose([f"data.path={text}", f"store.path={tmp_path / 'store'}", "run.progress=false", *sizes]))
    store = ActivationStore.open(tmp_path / "store")
    rows = [record.rows for record in store.blocks]
    assert len(rows) > 1
    assert rows[-1] < rows[0] == store.metadata.rows_per_block
    [array] = [store.arrays[key.name] for key in store.keys]
    row_bytes = array.shape[1] * array.shape[2] * array.dtype.numpy_dtype.itemsize
    [log] = (tmp_path / "store").glob("_jobs/*.jsonl")
    counted = json.loads(log.read_text().splitlines()[-1])
    assert (counted["blocks"], counted["stored_bytes"]) == (len(rows), sum(rows) * row_bytes)
    assert counted["seconds"]["feed"]["finish"] > counted["seconds"]["feed"]["lease"]


def test_repeated_requests_are_counted(gcs):
    storage = Storage.open(f"{new_bucket('gs', gcs.backend)}/store", StorageOptions(retries=100, retry_delay_s=0.001))
    with closing(Metrics()) as metrics:
        for kind, is_refused in ((Fault.too_many_requests, True), (Fault.refused, False)):
            before = metrics.snapshot()
            gcs.reset(rate=0.5, kinds=[kind])
            assert [storage.read(f"{number}") for number in range(20)] == [None] * 20
            counts = {name: metrics.snapshot()[name] - before[name] for name in ("storage_retries", "storage_refused")}
            assert counts["storage_retries"] > 0
            assert counts["storage_refused"] == (gcs.faults[kind] if is_refused else 0)
        retries, refused = (metrics.snapshot()[name] for name in ("storage_retries", "storage_refused"))
        assert f"{retries} requests to storage failed and were retried. {refused} responses" in metrics.summary()


pytestmark = pytest.mark.heavy

HANGS = {
    "holds the lock of Python": "{{ n ** (n ** n) }}",
    "runs Python code": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
}
PROGRAM = """
    import time
    from types import SimpleNamespace
    from pipeline.data.text.templates import TextTemplate
    from pipeline.job.watchdog import Watchdog, time_limit

    metrics = SimpleNamespace(last_step=0.0, stages={"feed": "work"})
    with Watchdog(metrics, 0.4):
        for _ in range(10):
            time.sleep(0.1)
            metrics.last_step = time.monotonic()
    time.sleep(1)
    print("a run that goes on is left alone", flush=True)
    with %s:
        TextTemplate(%r)({"n": 9})
"""


@pytest.mark.parametrize(
    ("hang", "limit"),
    [*((hang, "Watchdog(metrics, 0.5)") for hang in HANGS), ("holds the lock of Python", "time_limit(0.5)")],
)
def test_a_template_that_hangs_ends_the_process(hang, limit):
    program = textwrap.dedent(PROGRAM) % (limit, HANGS[hang])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "a run that goes on is left alone\n")
    assert "in render" in done.stderr
