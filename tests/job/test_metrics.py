"""The log of a run: its name, and what it counts."""

import json

from pipeline.config.composing import compose
from pipeline.extraction.job_run import run
from pipeline.job.metrics import run_name
from pipeline.store import ActivationStore
from pipeline.store.format.keys import is_worker_key
from tests.jobs import write_text


def test_run_names_are_unique():
    first, second = run_name(), run_name()
    assert first != second
    assert is_worker_key(f"_metrics/{first}.jsonl")
    assert is_worker_key(f"_metrics/{second}-generate.json")


def test_a_partial_block_counts_only_the_rows_that_it_has(tmp_path):
    text = write_text(tmp_path / "text", files=1, documents=30)
    sizes = ["batch.rows=4", "batch.length=64", "store.shard_mib=0.25", "run.max_tokens=6000", "capture.layers=[1]"]
    run(compose([f"data.path={text}", f"store.path={tmp_path / 'store'}", "run.progress=false", *sizes]))
    store = ActivationStore.open(tmp_path / "store")
    rows = [record.rows for record in store.blocks]
    assert len(rows) > 1
    assert rows[-1] < rows[0] == store.metadata.rows_per_block
    [array] = [store.arrays[key.name] for key in store.keys]
    row_bytes = array.shape[1] * array.shape[2] * array.dtype.numpy_dtype.itemsize
    [log] = (tmp_path / "store" / "_metrics").iterdir()
    counted = json.loads(log.read_text().splitlines()[-1])
    assert (counted["blocks"], counted["stored_bytes"]) == (len(rows), sum(rows) * row_bytes)
