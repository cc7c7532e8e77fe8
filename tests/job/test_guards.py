"""Guards against slowdowns that do not depend on the machine's load: they count calls and bytes, not seconds."""

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pipeline.cluster import preemption
from pipeline.config import composing
from pipeline.job.loaded_step import load_step
from pipeline.job.loop import fill
from pipeline.job.opening import open_job
from pipeline.store.write.store_writer import StoreWriter
from tests.jobs import write_text

pytestmark = pytest.mark.heavy


@contextmanager
def python_calls() -> Iterator[Counter[str]]:
    """The number of Python calls by thread name."""
    calls: Counter[str] = Counter()

    def count(_frame: object, event: str, _argument: object) -> None:
        calls[threading.current_thread().name] += event == "call"

    threading.setprofile(count)
    sys.setprofile(count)
    try:
        yield calls
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


@pytest.mark.usefixtures("cached_steps")
def test_the_host_does_little_per_step(tmp_path):
    """The loop and the writer run no Python per token, row or feature."""
    text = write_text(tmp_path / "text", files=1, documents=40)
    found = {}
    for steps in (2, 5):  # of one block
        overrides = ["batch.rows=8", "batch.length=256", "capture.layers=all", "run.progress=false"]
        overrides += ["run.max_tokens=1", f"store.rows_per_block={8 * steps}"]
        store = tmp_path / str(steps)
        job = open_job(composing.compose([f"data.path={text}", f"store.path={store}", *overrides]))
        step = load_step(job)
        writer = StoreWriter.open(str(store), job.metadata, job.layout)
        with preemption.stop_on_signals() as stop, python_calls() as calls:
            metrics = fill(job, writer, stop, step)
        assert metrics.steps == steps
        found[steps] = calls
    few, many = sorted(found)
    per_step = {name: (found[many][name] - found[few][name]) / (many - few) for name in ("MainThread", "writer")}
    assert per_step["MainThread"] < 1200  # measured: 600; a step has 2048 tokens
    assert per_step["writer"] < 1200


def test_capturing_more_layers_needs_no_more_temporary_memory(tmp_path):
    """The step writes activations once, straight to its outputs.

    The comparison is with three layers, since layers outside a scan share their attention mask in memory.
    """
    text = write_text(tmp_path / "text", files=1, documents=5)
    temporaries = {}
    for layers in ("[3,4,5]", "all"):
        overrides = ["batch.rows=4", "batch.length=128", f"capture.layers={layers}", f"store.path={tmp_path / 'store'}"]
        job = open_job(composing.compose([f"data.path={text}", *overrides]))
        memory = load_step(job).compiled.executable.memory_analysis()
        temporaries[layers] = memory.temp_size_in_bytes
    assert temporaries["all"] <= temporaries["[3,4,5]"]
