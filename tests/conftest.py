"""Fixtures for all tests: object stores, stores of real activations, and the real material next to the checkout."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.forking import Forked, collect_seldom, hold_links
from tests.jobs import HASTE, HASTY_FLAGS, ROOT, own_compilation_cache, run, run_here, write_text
from tests.store.emulators import gcs_emulator, s3_emulator
from tests.store.fault_proxy import FaultProxy

collect_seldom()  # importing the tests would spend a sixth of its time in the garbage collector
hold_links()
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # even if libtpu is installed: JAX would try it and log errors
os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch's threads spin while they wait for each other
# Not in a fixture: TensorStore reads it at the process's first request, whichever test makes it.
os.environ["TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS"] = "3"

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in background jobs of a shell, and their children
    signal.signal(signal.SIGINT, signal.default_int_handler)

Forked.imported_with = dict(os.environ)

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
MEASURED = "measured"  # a test's user property; printed at the end
# The slowest files, slowest first. All others run after them.
LONGEST = (
    *("test_processes.py", "test_compile_check.py", "test_generate.py", "test_parity.py", "test_mesh.py"),
    *("test_faults.py", "test_generator.py", "test_training_stream.py", "test_int8.py", "test_positions.py"),
    *("test_object_storage.py", "test_features.py", "test_bfloat16.py", "test_extractor.py", "test_cli.py"),
    *("test_attention_splash.py", "test_stream_store.py", "test_leased_jobs.py", "test_remote_job.py"),
    *("test_compilation_cache.py", "test_generation_mesh.py", "test_generation_tpu.py", "test_int8_errors.py"),
    *("test_compiled_step.py", "test_run.py", "test_resume.py", "test_process_startup.py", "test_real_inputs.py"),
    *("test_train_examples.py", "test_writing.py", "test_batches.py", "test_families.py"),
)
# Modules whose programs LLVM would optimise for longer than they run. Without these optimisations only the last bits of
# results differ, so none of these modules compares with results of another one.
HASTILY_COMPILED = (
    *("tests/library/test_aligned", "tests/library/test_extractor", "tests/library/test_stream_store.py"),
    *("tests/library/test_training_stream.py", "tests/models/"),
    *("tests/generation/test_generator.py", "tests/step/test_compiled_step.py"),
    *("tests/extraction/test_positions.py", "tests/extraction/test_features.py"),
    *("tests/extraction/test_run.py", "tests/extraction/test_writer.py", "tests/extraction/test_expert_stores.py"),
    *("tests/step/test_head_outputs.py", "tests/step/test_storage_dtypes.py", "tests/step/test_stored_statistics.py"),
    *("tests/step/test_mesh.py", "tests/step/test_int8_errors.py", "tests/extraction/test_zero_activations.py"),
    *("tests/extraction/test_extension.py", "tests/extraction/test_alignment.py", "tests/job/test_metrics.py"),
    *("tests/store/test_begun_before.py", "tests/generation/test_generate.py", "tests/generation/test_sampling.py"),
    *("tests/generation/test_generation_mesh.py", "tests/extraction/test_guards.py", "tests/commands/test_merge.py"),
)
SLOW = (  # files that compile many or large programs, or run whole jobs
    *("extraction/test_alignment.py", "extraction/test_guards.py", "extraction/test_resume.py"),
    *("extraction/test_run.py", "extraction/test_writer.py", "models/test_bfloat16.py", "store/test_begun_before.py"),
    *("extraction/test_leased_jobs.py", "extraction/test_processes.py", "step/test_mesh.py"),
    *("extraction/test_positions.py", "extraction/test_real_inputs.py", "generation/test_generate.py"),
    *("generation/test_generation_tpu.py", "planning/test_compile_check.py", "store/test_damage_fuzzer.py"),
    *("library/test_extractor.py", "library/test_extractor_parity.py", "library/test_aligned_models.py"),
    *("generation/test_generator.py", "generation/test_sampling.py", "models/test_families.py", "models/test_int8.py"),
    *("models/test_attention_splash.py", "models/test_parity.py", "step/test_compiled_step.py"),
    *("step/test_storage_dtypes.py", "step/test_stored_statistics.py", "step/test_int8_errors.py"),
    *("extraction/test_zero_activations.py", "extraction/test_expert_stores.py", "extraction/test_features.py"),
    *("extraction/test_extension.py", "models/test_attention_xla.py", "models/test_experts.py"),
    *("models/test_real_encoder.py", "step/test_head_outputs.py"),
    *("store/test_verifying_in_parts.py", "scripts/test_attention_blocks.py"),
    *("library/test_training_stream.py", "library/test_stream_store.py", "library/test_stream_processes.py"),
    *("scripts/test_train_examples.py", "scripts/test_train_with_libraries.py", "models/test_delta_net.py"),
    *("commands/test_export.py", "commands/test_feature_page.py", "commands/test_merge.py"),
    *("scripts/test_tiny_qwen2.py", "scripts/test_tiny_sae.py", "store/test_stores_made_before.py"),
    *("store/test_torch_dataset.py", "models/test_attention_pattern.py", "models/test_sae_encoding.py"),
    *("models/test_loading_memory.py", "models/test_exchange.py", "step/test_storage_cast.py"),
    *("planning/test_weights_plan.py", "extraction/test_many_streams.py"),
    *("config/test_experiments.py", "data/test_hub_data.py", "models/test_config_attributes.py", "models/test_fp8.py"),
    *("models/test_fuzz_checkpoints.py", "store/test_damage.py", "store/test_hub_store.py"),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="skip tests that start processes or compile much")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With --fast, the slow files are not even imported."""
    return True if config.getoption("--fast") and collection_path.as_posix().endswith(SLOW) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Runs the slowest files first, so that no process of the suite ends up with one while the others are idle."""
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(4 * 3600))
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))
    if config.getoption("--fast"):
        subprocess.Popen.__init__ = lambda *_, **__: pytest.skip("starts a process")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Imported modules stay: scanning them at every garbage collection would take a tenth of the time."""
    collect_seldom()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for report in terminalreporter.stats.get("passed", ()):
        for name, value in report.user_properties:
            if name == MEASURED:
                terminalreporter.write_line(value)


@pytest.fixture(scope="module", autouse=True)
def compilation(request: pytest.FixtureRequest) -> Iterator[None]:
    """Sets how a module's programs are compiled, in this process and in those that it starts."""
    if not request.path.relative_to(ROOT).as_posix().startswith(HASTILY_COMPILED):
        yield
        return
    import jax  # not at the top: the variables above come first, and only some modules need it
    from jax._src import compiler

    options_of = compiler.get_compile_options

    def hasty_options(*args: Any, **kwargs: Any) -> Any:
        options = options_of(*args, **kwargs)
        options.env_option_overrides = [*options.env_option_overrides, *HASTE.items()]
        return options

    options_of(num_replicas=1, num_partitions=1)  # XLA reads XLA_FLAGS once: now, before it is changed
    jax.config.update("jax_disable_most_optimizations", True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "get_compile_options", hasty_options)
        patch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} {HASTY_FLAGS}")  # for jobs that tests start
        yield
    jax.config.update("jax_disable_most_optimizations", False)


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
    from pipeline.step.compilation_cache import use_compilation_cache  # not at the top, as JAX

    with own_compilation_cache():
        use_compilation_cache(compilation_cache.partition("=")[2])
        yield


@pytest.fixture(scope="session")
def real_store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of a store of English prose that the main job made with the bundled model. Only for reading.

    It has layers 2 and 4 of about 40,000 tokens, in blocks of a few thousand.
    """
    folder = tmp_path_factory.mktemp("real")
    text = write_text(folder / "text", files=1, documents=80)
    path = str(folder / "store")
    done = run(f"data.path={text}", f"store.path={path}", "store.shard_mib=1", "run.max_tokens=40000")
    assert done.returncode == 0, done.stderr
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
