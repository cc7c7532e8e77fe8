"""Whole jobs of many processes on a Hub that fails a fifth of the requests, and whose branches move."""

import io
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config import composing
from tests.hub import Hub, contents
from tests.jobs import assert_same_store, run, run_processes, write_text
from tests.store.fault_proxy import Fault, FaultProxy

pytestmark = pytest.mark.heavy
TINY = contents(composing.PACKAGE / "assets" / "tiny-qwen2")
MODEL, DATA = "models/owner/tiny", "datasets/owner/text"
FAULTS = (Fault.too_many_requests, Fault.unavailable, Fault.refused, Fault.unanswered, Fault.short)
PROCESSES = 16
SMALL = (
    *("capture.layers=[1]", "batch.length=64", f"batch.rows={PROCESSES}", "run.progress=false"),
    f"store.rows_per_block={PROCESSES}",  # the whole store is resumed by one process, in steps of as many rows
    *(f"data.num_streams={PROCESSES}", "data.row_groups_per_shard=1", "distributed.join_timeout_s=900"),
    "distributed.heartbeat_timeout_s=600",
)


def other_data() -> Mapping[str, bytes]:
    sink = io.BytesIO()
    pq.write_table(pa.table({"text": ["another text"], "id": ["0"]}), sink)
    return {"data/000.parquet": sink.getvalue()}


def with_other_weights() -> Mapping[str, bytes]:
    weights = TINY["model.safetensors"]
    return TINY | {"model.safetensors": weights[:-2] + bytes([weights[-2] ^ 1, weights[-1]]), "README.md": b"edited"}


@pytest.mark.slow
def test_sixteen_processes_resumed_through_faults_read_the_first_commits(tmp_path: Path, monkeypatch) -> None:
    """The store equals that of one process that read the first commits from disk."""
    text = write_text(tmp_path / "text", files=4, documents=64)
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", str(PROCESSES))  # the same mesh, hence the same bits
    done = run(f"data.path={text}", *SMALL, "run.max_tokens=40000", f"store.path={tmp_path / 'reference'}")
    assert done.returncode == 0, done.stderr

    hub_job = ("model.path=owner/tiny", "data=fineweb", "data.path=hf://datasets/owner/text/data", *SMALL)
    store = tmp_path / "store"
    with Hub().serving() as server, FaultProxy(server.address).serving() as proxy:
        first = {MODEL: server.push(MODEL, TINY)}
        first[DATA] = server.push(DATA, {f"data/{name}": content for name, content in contents(text).items()})

        def move_once_resolved(request: str) -> None:
            for repo, commit in first.items():
                if commit in request and server.refs[repo, "main"] == commit:
                    server.push(repo, with_other_weights() if repo == MODEL else other_data())

        server.before = move_once_resolved
        proxy.reset(0.2, seed=0, kinds=FAULTS)
        monkeypatch.setenv("HF_ENDPOINT", proxy.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        done = run_processes(PROCESSES, 1, *hub_job, "run.max_tokens=20000", f"store.path={store}", timeout_s=1500)
        assert done.returncode == 0, done.stdout
        assert all(server.refs[repo, "main"] != commit for repo, commit in first.items())
        faults = sum(proxy.faults.values())
        proxy.reset(0.2, seed=1, kinds=FAULTS)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "another_home"))
        resumed = run(*hub_job, "run.max_tokens=40000", f"store.path={store}", timeout_s=600)
        assert resumed.returncode == 0, resumed.stderr
        assert faults + sum(proxy.faults.values()) > 0
    for path in (store, tmp_path / "reference"):
        (path / "_jobs" / "manifest.json").unlink()  # the Hub lists the files' blobs, a disk nothing
    assert_same_store(store, tmp_path / "reference")
