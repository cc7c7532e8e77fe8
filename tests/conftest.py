"""Fixtures for all tests: object stores, stores of real activations, and the real material next to the checkout."""

import os
import shutil
import signal
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.every_process import sitecustomize
from tests.jobs import SMALL_JOB, own_compilation_cache, run_here, write_text
from tests.store.emulators import gcs_emulator, s3_emulator
from tests.store.fault_proxy import FaultProxy

# For this process and those that tests start.
os.environ["PYTHONPATH"] = f"{Path(sitecustomize.__file__).parent}:{os.environ.get('PYTHONPATH', '')}"
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # even if libtpu is installed: JAX would try it and log errors
os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch's threads spin while they wait for each other
# Not in a fixture: TensorStore reads it at the process's first request, whichever test makes it.
os.environ["TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS"] = "3"
# LLVM would optimise programs for longer than they run. Without that, only the last bits of results differ.
FAST_COMPILATION = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
if version("jaxlib").startswith("0.10."):  # later versions refuse it
    FAST_COMPILATION += " --xla_cpu_use_fusion_emitters=false"
os.environ["XLA_FLAGS"] = f"{FAST_COMPILATION} {os.environ.get('XLA_FLAGS', '')}"

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in background jobs of a shell, and their children
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests keep their stores in memory if there is room: on a disk, TensorStore would sync every object.
MEMORY = Path("/dev/shm")
if (
    not {"PYTEST_DEBUG_TEMPROOT", "TMPDIR"} & os.environ.keys()
    and os.access(MEMORY, os.W_OK)
    and shutil.disk_usage(MEMORY).free >= 4 << 30
    and not os.statvfs(MEMORY).f_flag & os.ST_NOEXEC  # tests start programs that they write
):
    os.environ["PYTEST_DEBUG_TEMPROOT"] = str(MEMORY)

SHARED = Path(__file__).resolve().parents[2] / "shared"
SECRET = "ya29.nobody-may-see-this"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(4 * 3600))


@pytest.fixture(scope="session")
def shared() -> Path:
    """Real ARC tasks, English documents and the Qwen2 tokenizer. Skips tests on machines without them."""
    if not SHARED.is_dir():
        pytest.skip("this machine does not have the real material (../shared)")
    return SHARED


@pytest.fixture(scope="session")
def compilation_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An override for jobs that share compiled steps. Only steps of at most 256 tokens are cached."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compilation-cache"  # one per suite
    folder.mkdir(exist_ok=True)
    return f"run.compilation_cache={folder}"


@pytest.fixture(scope="module")
def cached_steps(compilation_cache: str) -> Iterator[None]:
    """Makes jobs in this process compile equal steps once."""
    from pipeline.step.compiler import use_compilation_cache  # not at the top, as JAX

    with own_compilation_cache():
        use_compilation_cache(compilation_cache.partition("=")[2])
        yield


@pytest.fixture(scope="session")
def small_job(tmp_path_factory: pytest.TempPathFactory, compilation_cache: str) -> list[str]:
    """Overrides of a job with three streams of many small blocks, the first of which is the longest."""
    text = write_text(tmp_path_factory.mktemp("text"), files=4, documents=20)
    return [f"data.path={text}", "data.num_streams=3", *SMALL_JOB, compilation_cache]


@pytest.fixture(scope="session")
def small_store(small_job: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store that one undisturbed run of `small_job` makes. Only for reading."""
    path = tmp_path_factory.mktemp("small") / "store"
    run_here(*small_job, f"store.path={path}")
    return path


@pytest.fixture(scope="session")
def real_store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of a store of English prose that the main job made with the bundled model. Only for reading.

    It has layers 2 and 4 of about 24,000 tokens, in blocks of a few thousand.
    """
    folder = tmp_path_factory.mktemp("real")
    text = write_text(folder / "text", files=1, documents=80)
    path = str(folder / "store")
    run_here(f"data.path={text}", f"store.path={path}", "store.shard_mib=1", "run.max_tokens=24000")
    return path


@pytest.fixture(scope="session")
def encoded_store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of a store of about 10,000 tokens of English prose: layer 4 of the bundled model in float32, and the
    bundled SAE's features of it."""
    folder = tmp_path_factory.mktemp("encoded")
    capture = ["capture.layers=[4]", "capture.dtype=float32", "capture.keep=both", "capture.encode_top=16"]
    sae = ["capture.encode={blocks.4.resid_post: '${assets:tiny-sae}'}", "capture.encode_error=true"]
    text, path = write_text(folder / "text", files=1, documents=40), str(folder / "store")
    run_here(f"data.path={text}", f"store.path={path}", "store.shard_mib=1", "run.max_tokens=10000", *capture, *sae)
    return path


@pytest.fixture(scope="session")
def gcs_proxy() -> Iterator[FaultProxy]:
    """An emulator of Google Cloud Storage behind a proxy. A process's TensorStore keeps the first address it gets."""
    with gcs_emulator() as address, FaultProxy(address).serving() as proxy, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TENSORSTORE_GCS_HTTP_URL", proxy.url)
        yield proxy


@pytest.fixture
def gcs(gcs_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """The proxy without faults, with its counters at zero."""
    monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", SECRET)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs_proxy.url)
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    monkeypatch.setenv("FSSPEC_GCS_TOKEN", "anon")
    gcs_proxy.reset()
    yield gcs_proxy
    gcs_proxy.reset()


@pytest.fixture(scope="session")
def s3_proxy() -> Iterator[FaultProxy]:
    """An emulator of Amazon S3 behind a proxy."""
    with s3_emulator() as address, FaultProxy(address).serving() as proxy:
        yield proxy


@pytest.fixture
def s3(s3_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """The proxy without faults, with its counters at zero."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_proxy.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    s3_proxy.reset()
    yield s3_proxy
    s3_proxy.reset()
