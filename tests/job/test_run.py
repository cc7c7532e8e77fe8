"""The main job in this process: its compilations, transfers and stores."""

import json
import shlex
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pipeline.cluster import devices, preemption
from pipeline.config import composing
from pipeline.core.errors import ConfigError, InputError, NotFiniteError, StoreError, StoreMismatch
from pipeline.core.sites import ActivationKey, Site
from pipeline.job.loaded_step import load_step
from pipeline.job.loop import fill
from pipeline.job.metrics import Stage
from pipeline.job.opening import open_job, print_plan
from pipeline.job.running import open_store, run
from pipeline.models.leaves import num_params
from pipeline.planning import host_memory
from pipeline.planning.host_memory import MAX_STEPS_IN_FLIGHT
from pipeline.store import ActivationStore
from pipeline.store.check.verifying import verify_store
from pipeline.store.write.store_writer import StoreWriter
from scripts.bench.device_idle import device_idle
from tests.jobs import assert_same_store, committed, write_text
from tests.store.written_check import assert_well_written

pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("cached_steps")]
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"), files=2, documents=24)


def job_config(text, store, *overrides):
    base = [f"data.path={text}", f"store.path={store}", "batch.rows=2", "batch.length=128", "run.progress=false"]
    return composing.compose([*base, "store.shard_mib=0.25", *overrides])


@pytest.fixture
def compilations():
    """A list that grows by an entry per compilation."""
    events = []

    def listen(event, duration, **_):
        if event == COMPILE_EVENT:
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)


def test_the_loop_compiles_nothing_and_makes_no_implicit_transfer(text, tmp_path, compilations):
    config = job_config(text, tmp_path / "store", "run.max_tokens=4000")
    job = open_job(config)
    step = load_step(job)
    assert compilations, "the listener must see the step's compilation"
    compilations.clear()
    store = StoreWriter.open(config.store.path, job.metadata, job.layout)
    with preemption.stop_on_signals() as stop, jax.transfer_guard_host_to_device("disallow"):
        metrics = fill(job, store, stop, step)
    assert not compilations
    assert metrics.steps > 10
    seconds = {thread: sum(metrics.thread_seconds(thread).values()) for thread in ("feed", "loop", "writer")}
    for thread in ("loop", "writer"):  # apart from interruptions between stages, they account for the whole time
        assert 0.5 * metrics.elapsed_s < seconds[thread] < 1.01 * metrics.elapsed_s
    assert 0 < seconds["feed"] < 1.01 * metrics.elapsed_s
    assert metrics.seconds[Stage.FEED_FINISH] > 0  # it waited for its own blocks, not for a lease
    assert f"The bottleneck was {metrics.binding_stage()[0]}" in metrics.summary()


@pytest.mark.parametrize(
    ("is_planned_before", "exit_code", "message"),
    [(True, 1, "was created while this job was being planned"), (False, 2, "capture.dtype: the store has")],
)
def test_a_store_created_during_planning_is_refused(text, tmp_path, is_planned_before, exit_code, message):
    configs = [job_config(text, tmp_path / "store", f"capture.dtype={dtype}") for dtype in ("bfloat16", "float32")]
    planned = open_job(configs[0]) if is_planned_before else None
    other = open_job(configs[1])
    StoreWriter.open(other.config.store.path, other.metadata, other.layout)
    with pytest.raises(StoreError, match=message) as caught:
        open_store(planned or open_job(configs[0]))
    assert caught.value.exit_code == exit_code


def test_max_tokens_are_exceeded_by_at_most_a_block_per_stream(text, tmp_path):
    config = job_config(text, tmp_path / "store", "run.max_tokens=3001", "data.num_streams=2")
    plan = open_job(config).plan
    assert plan.rows_per_block == plan.step.rows  # so few tokens
    run(config)
    store = ActivationStore.open(str(tmp_path / "store"))
    assert store.complete
    assert 3001 <= store.num_tokens <= plan.streams.most_tokens(plan.rows_per_block * 128) == 3001 + 2 * (2 * 128 - 1)


def test_the_store_does_not_depend_on_the_steps_in_flight(text, tmp_path, monkeypatch):
    stores = []
    for cores in (1, 1000):
        monkeypatch.setattr(devices, "num_cores", lambda cores=cores: cores)
        config = job_config(text, tmp_path / str(cores), "run.max_tokens=2000")
        stores.append((tmp_path / str(cores), open_job(config).plan.memory.inflight_steps))
        run(config)
    (one, of_one), (many, of_many) = stores
    assert (of_one, of_many) == (1, MAX_STEPS_IN_FLIGHT)
    assert committed(one) > 2
    assert_same_store(many, one)


def test_a_store_keeps_the_sizes_of_its_shards(text, tmp_path, monkeypatch):
    """Blocks that are divided hold the same values as undivided ones, and an extension divides its blocks alike."""
    for name, shard_bytes in (("whole", 1 << 20), ("divided", 20_000)):
        config = ("capture.layers=[1]", "store.shard_mib=0.01")
        with monkeypatch.context() as patch:
            patch.setattr(host_memory, "LARGEST_SHARD_BYTES", shard_bytes)
            run(job_config(text, tmp_path / name, *config, "run.max_tokens=2000"))
        run(job_config(text, tmp_path / name, *config, "run.max_tokens=4000"))
    whole, divided = (ActivationStore.open(str(tmp_path / name)) for name in ("whole", "divided"))
    assert verify_store(str(tmp_path / "divided")) == []
    [key] = divided.keys
    np.testing.assert_array_equal(divided.read(key, divided.rows), whole.read(key, whole.rows))
    shards = [list((tmp_path / name / key.name).glob("c.*")) for name in ("whole", "divided")]
    assert len(shards[1]) == 4 * len(shards[0]) > 40, "a row of 32 KiB is two shards, a block two rows"


def test_a_profile_gives_the_devices_idle_time(text, tmp_path):
    run(job_config(text, tmp_path / "store", f"run.profile={tmp_path / 'trace'}", "run.max_tokens=3000"))
    (idle,) = device_idle(tmp_path / "trace").values()
    assert 0 <= idle < 1
    assert list(tmp_path.rglob("perfetto_trace.json.gz"))


def test_activations_that_overflow_the_stored_dtype_end_the_run_and_are_not_stored(text, tmp_path):
    """The bundled model with its embedding times a million: finite as bfloat16, infinite as float16."""
    model = tmp_path / "model"
    shutil.copytree(composing.PACKAGE / "assets" / "tiny-qwen2", model)
    tensors = load_file(model / "model.safetensors")
    tensors["model.embed_tokens.weight"] = (tensors["model.embed_tokens.weight"].astype(np.float32) * 1e6).astype(
        tensors["model.embed_tokens.weight"].dtype
    )
    save_file(tensors, model / "model.safetensors")
    overrides = [f"model.path={model}", "capture.sites=[resid_post]"]
    short = write_text(tmp_path / "short", files=1, documents=1)  # a single block, so that no step follows
    for texts, store, tokens in ((text, "a", "2000"), (short, "b", "null")):
        with pytest.raises(NotFiniteError, match=r"blocks\.2\.resid_post.*capture\.dtype=bfloat16"):
            run(job_config(texts, tmp_path / store, *overrides, "capture.dtype=float16", f"run.max_tokens={tokens}"))
    run(
        job_config(
            text,
            tmp_path / "c",
            *overrides,
            "capture.dtype=float16",
            "capture.on_not_finite=warn",
            "run.max_tokens=2000",
        )
    )
    store = ActivationStore.open(str(tmp_path / "c"))
    statistics = store.statistics("blocks.2.resid_post")
    assert statistics.count + statistics.not_finite == store.num_tokens
    assert statistics.not_finite > 0
    assert np.isfinite(statistics.mean).all()
    assert verify_store(str(tmp_path / "c")) == []
    assert_well_written(str(tmp_path / "c"))


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("data.text='\"{{ body }}\"'", "data.text='\"{{ text }}\"'"),
        ("data.id_column=body", "data.id_column=null"),
        ("batch.length=64 data.prefix=[", "batch.length=128"),
    ],
)
def test_a_failed_first_run_leaves_no_store_that_refuses_the_corrected_command(wrong, right, tmp_path):
    lines = [json.dumps({"text": f"line {number}" * 9, "body": "x" if number < 5 else None}) for number in range(40)]
    (tmp_path / "lines.jsonl").write_text("\n".join(lines))
    base = ["data=hf", "data.path=json", f"data.data_files={tmp_path / 'lines.jsonl'}", "batch.rows=2"]
    base += [f"store.path={tmp_path / 'store'}", "run.progress=false", "batch.length=128"]
    with pytest.raises((InputError, ConfigError)):
        run(composing.compose([*base, *shlex.split(wrong)]))
    run(composing.compose([*base, *shlex.split(right)]))
    assert verify_store(str(tmp_path / "store")) == []
    with pytest.raises(StoreMismatch, match="capture"):  # a store with blocks is never replaced
        run(composing.compose([*base, *shlex.split(right), "capture.layers=[1]"]))


def test_the_printed_plan_gives_the_models_parameters_sites_and_flops(text, tmp_path, capsys):
    print_plan(job_config(text, tmp_path / "store", "capture.layers=[2]"))
    printed = capsys.readouterr().out
    model = open_job(job_config(text, tmp_path / "store")).model
    keys = (ActivationKey(2, Site.resid_post),)
    parameters = num_params(model.leaves(keys))
    assert f"qwen2, {model.num_layers} layers; the capture needs {parameters:,} parameters" in printed
    assert (
        "embed 128, resid_pre 128, attn_in 128, q 128, k 64, v 64, attn_entropy 4, attn_pattern 512, attn_z 128,"
        in printed
    )
    assert f"{model.flops_per_token(keys, 128):,} FLOPs per token" in printed
    assert "blocks.2.resid_post: 256 bytes per token as bfloat16" in printed
    assert "\ndata      2 source shards in 2 streams, 2 for this process\n" in printed
    assert not (tmp_path / "store").exists()
