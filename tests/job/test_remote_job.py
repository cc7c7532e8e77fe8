"""The main job with model, text and store on object storage: killed, and resumed through faults."""

import json
import signal
import subprocess
from pathlib import Path

import pytest

from pipeline.store.check.verifying import verify_store
from pipeline.store.io.storage import Storage
from tests.conftest import SECRET
from tests.jobs import (
    ROOT,
    children,
    local_processes,
    objects,
    run,
    run_here,
    run_processes,
    start,
    wait_until,
    without_writer,
    write_text,
)
from tests.store.emulators import new_bucket
from tests.store.fault_proxy import FaultProxy

pytestmark = pytest.mark.heavy
MODEL = ROOT / "pipeline" / "assets" / "tiny-qwen2"
OVERRIDES = (
    "data.num_streams=2",
    "batch.rows=4",
    "batch.length=64",
    "capture.layers=[0,1]",
    "store.shard_mib=0.25",
    "store.retry_delay_s=0.05",
)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"), files=2, documents=12)


@pytest.fixture(scope="module")
def reference(text, tmp_path_factory) -> dict[str, bytes]:
    """The store that the same job makes on a local disk."""
    store = tmp_path_factory.mktemp("reference") / "store"
    local = [override for override in OVERRIDES if not override.startswith("store.retr")]
    run_here(*local, f"data.path={text}", f"store.path={store}")
    return without_paths(objects(store))


def without_paths(found: dict[str, bytes]) -> dict[str, bytes]:
    """Without what depends on where the text and the store are: services list checksums of other kinds."""
    root = json.loads(found["zarr.json"])
    for key in ("config", "created", "sha256"):
        root["attributes"]["activation_store"].pop(key, None)
    same = {key: content for key, content in found.items() if key != "_jobs/manifest.json"}
    same |= {key: without_writer(same[key]) for key in same if key.startswith("_commits/")}
    return same | {"zarr.json": json.dumps(root).encode()}


def remote_objects(path: str) -> dict[str, bytes]:
    storage = Storage.open(path)
    return {key: storage.read(key) for key in storage.list_keys()}


def upload(folder: Path, bucket: str) -> str:
    for file in sorted(folder.iterdir()):
        Storage.open(bucket).write(f"{folder.name}/{file.name}", file.read_bytes())
    return f"{bucket}/{folder.name}"


def wait_for_commits(blocks: int, proxy: FaultProxy, process: subprocess.Popen) -> None:
    def committed() -> int:
        return sum("_commits/stream" in key and method in ("POST", "PUT") for method, key in list(proxy.requests))

    wait_until(lambda: committed() >= blocks, process, f"{blocks} commits", poll_s=0.01)


def kill_after(blocks: int, proxy: FaultProxy, *overrides: str) -> None:
    process = start(*overrides)
    wait_for_commits(blocks, proxy, process)
    process.kill()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, output
    assert SECRET not in output


def kill_one_of_two_after(blocks: int, proxy: FaultProxy, *overrides: str) -> None:
    with local_processes(2, 1, *overrides) as launcher:
        wait_for_commits(blocks, proxy, launcher)
        children(launcher)[1].kill()
        output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 1, output
    assert "[1] ended with SIGKILL" in output
    assert SECRET not in output


def inputs(scheme: str, proxy: FaultProxy, text: Path) -> list[str]:
    """Overrides for model and text on the same service; for S3 local text, since s3fs is not a dependency."""
    if scheme == "s3":
        return [f"data.path={text}"]
    places = {"model.path": MODEL, "data.path": text}
    return [f"{key}={upload(folder, new_bucket(scheme, proxy.backend))}" for key, folder in places.items()]


@pytest.mark.parametrize(
    ("scheme", "killed", "resumed"),
    [
        ("gs", kill_after, 1),
        pytest.param("gs", kill_after, 2, marks=pytest.mark.slow),
        pytest.param("gs", kill_one_of_two_after, 2, marks=pytest.mark.slow),
        pytest.param("gs", kill_one_of_two_after, 1, marks=pytest.mark.slow),
        pytest.param("s3", kill_after, 1, marks=pytest.mark.slow),
    ],
)
def test_a_job_resumed_through_faults_makes_the_local_store(scheme, killed, resumed, text, reference, request, caplog):
    """`resumed`: the number of processes that resume the job. One process made the local store."""
    proxy = request.getfixturevalue("gcs" if scheme == "gs" else "s3")
    path = f"{new_bucket(scheme, proxy.backend)}/store"
    job = (*OVERRIDES, *inputs(scheme, proxy, text), f"store.path={path}")
    proxy.reset()
    killed(3, proxy, *job)
    proxy.reset(rate=0.05)
    if resumed == 1:
        run_here(*job)
    else:
        result = run_processes(resumed, 1, *job)
        assert result.returncode == 0, result.stdout
        assert SECRET not in result.stdout
    assert proxy.faults
    proxy.reset()
    found = remote_objects(path)
    expected = {key: value for key, value in found.items() if not key.startswith(("_jobs/2", "_jobs/lease-"))}
    assert without_paths(expected) == reference
    assert not [key for key, value in found.items() if SECRET.encode() in value]
    assert SECRET not in caplog.text
    assert verify_store(path) == []


@pytest.mark.slow
def test_too_many_faults_end_the_run_and_the_next_run_resumes(text, reference, gcs):
    path = f"{new_bucket('gs', gcs.backend)}/store"
    job = (*OVERRIDES, f"data.path={text}", f"store.path={path}", "store.retry_delay_s=0.01")
    kill_after(2, gcs, *job)
    gcs.reset(rate=1.0)
    result = run(*job)
    assert result.returncode == 1, result.stderr
    assert f"StoreError: {path}/" in result.stderr
    assert "run the same command again" in result.stderr
    gcs.reset()
    assert run(*job).returncode == 0
    found = {
        key: value for key, value in remote_objects(path).items() if not key.startswith(("_jobs/2", "_jobs/lease-"))
    }
    assert without_paths(found) == reference
