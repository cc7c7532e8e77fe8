"""Compiled for TPU slices, where libtpu is installed (the extra `tpu`); no TPU is needed."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.compile_check import Program, largest
from pipeline.errors import EXIT_INVALID
from pipeline.tpu import CHIPS
from scripts.published_shapes import write_shapes
from tests.jobs import ROOT

needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu (the extra `tpu`)")


@pytest.fixture(scope="module")
def shapes(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("shapes")
    write_shapes(path)
    return path


def plan(shapes: Path, name: str, *overrides: str) -> subprocess.CompletedProcess:
    """In a process of its own, which must not have started another backend."""
    command = [sys.executable, "-m", "pipeline.plan", f"model.path={shapes / name}", "model.init=random"]
    common = ["model.dtype=bfloat16", "store.path=gs://bucket/store", "plan.json=true"]
    return subprocess.run(
        [*command, *common, *overrides],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=900,
    )


def planned(shapes: Path, name: str, *overrides: str) -> dict:
    done = plan(shapes, name, *overrides)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def assert_as_predicted(report: dict) -> None:
    """The plan's arithmetic against the compiler's figures, which are of padded layouts."""
    rows_bytes = 3 * 4 * report["rows_per_chip"] * report["length"]
    program = report["program"]
    assert program["argument_bytes"] == pytest.approx(report["weight_bytes"] + rows_bytes, rel=0.05)
    assert program["output_bytes"] == pytest.approx(report["output_bytes"], rel=0.05)
    assert report["hbm_bytes_needed"] < report["hbm_bytes"]


@needs_libtpu
def test_a_small_model_is_replicated_and_exchanges_its_counts_alone(shapes: Path) -> None:
    report = planned(
        shapes, "Qwen2.5-0.5B", "topology=v5e-4", "capture.layers=[6,12,18]", "batch.rows=64", "batch.length=1024"
    )
    assert_as_predicted(report)
    assert report["weights"] == "replicated"
    assert report["program"]["attention"] == "splash"
    assert report["program"]["collectives"] == {"all-reduce": 1}
    assert report["program"]["temporary_bytes"] < 200e6


@needs_libtpu
def test_what_does_not_fit_is_refused_with_what_would(shapes: Path) -> None:
    done = plan(
        shapes,
        "Qwen2.5-0.5B",
        *(
            "topology=v5e-4",
            "capture.layers=[1]",
            "batch.rows=4096",
            "batch.length=2048",
            "run.max_inflight_mib=100000",
        ),
    )
    assert done.returncode == EXIT_INVALID
    assert "does not fit" in done.stderr
    assert "Lower batch.rows" in done.stderr
    assert "Traceback" not in done.stderr


KERNELS = """
import jax
from jax.sharding import NamedSharding, PartitionSpec
from pipeline.compile_check import slice_devices
from pipeline.distributed import make_mesh
from pipeline.models.attention_splash import attend_splash
from pipeline.tpu import parse_slice
for name in ("v4-8", "v5e-4", "v5p-8", "v6e-4"):
    mesh = make_mesh(2, slice_devices(parse_slice(name)))
    for num_heads, num_kv_heads, head_dim, length, dtype, rule in (
        (14, 2, 64, 1024, "bfloat16", {"causal": True}),
        (12, 12, 64, 512, "float32", {"causal": False}),
        (8, 4, 256, 1152, "bfloat16", {"causal": True, "softcap": 50.0, "window": 300}),
        (8, 2, 80, 640, "bfloat16", {"causal": True}),
    ):
        def shape(*sizes, dtype=dtype, spec=PartitionSpec("data")):
            return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, spec))
        heads = PartitionSpec("data", None, "tensor")
        qkv = [shape(2, length, number, head_dim, spec=heads) for number in (num_heads, num_kv_heads, num_kv_heads)]
        with jax.default_matmul_precision("highest" if dtype == "float32" else "default"):
            attend = jax.jit(lambda *x: attend_splash(*x, scale=0.1, mesh=mesh, **rule))
            text = attend.lower(*qkv, shape(2, length, dtype="int32")).compile().as_text()
        assert "tpu_custom_call" in text
        assert "all-" not in text
"""


@needs_libtpu
def test_splash_compiles_for_every_kind_of_chip() -> None:
    done = subprocess.run([sys.executable, "-c", KERNELS], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


SLICES = """
import jax
from pipeline.compile_check import slice_devices
from pipeline.distributed import make_mesh
from pipeline.tpu import parse_slice
for name in ("v4-16", "v5e-64", "v5p-32", "v6e-32"):
    where = parse_slice(name)
    for tensor in (1, 2, 4):
        processes = [device.process_index for device in make_mesh(tensor, slice_devices(where)).devices.flat]
        assert len(processes) == where.num_chips, name
        assert processes == sorted(processes) and processes[-1] == where.num_hosts - 1, (name, processes)
"""


@needs_libtpu
def test_a_process_has_neighbouring_devices_of_every_slice() -> None:
    """Plan gives each process consecutive rows: its devices must be the ones that hold them."""
    done = subprocess.run([sys.executable, "-c", SLICES], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


PODS = {
    "Qwen2.5-7B on v5e-64": ("Qwen2.5-7B", "v5e-64", "[7,14,21]", 256, 2048),
    "Llama-3-8B on v5e-64": ("Llama-3-8B", "v5e-64", "[8,16,24]", 256, 2048),
    "Gemma-2-9B on v6e-64": ("Gemma-2-9B", "v6e-64", "[10,20,30]", 64, 8192),  # longer than its windows
    "Llama-3-70B on v5e-256": ("Llama-3-70B", "v5e-256", "[20,40,60]", 512, 2048),
}


@needs_libtpu
@pytest.mark.slow  # minutes: large programs for many chips
@pytest.mark.parametrize(("name", "topology", "layers", "rows", "length"), PODS.values(), ids=PODS.keys())
def test_large_models_fit_pods(shapes: Path, name: str, topology: str, layers: str, rows: int, length: int) -> None:
    report = planned(
        shapes,
        name,
        *(f"topology={topology}", f"capture.layers={layers}", f"batch.rows={rows}", f"batch.length={length}"),
        *("model.weights=fsdp", "run.max_inflight_mib=40000"),
    )
    assert_as_predicted(report)
    assert report["program"]["attention"] == "splash"
    assert report["program"]["collectives"]["all-gather"] > 0


@needs_libtpu
@pytest.mark.slow  # compiles several times
def test_search_finds_the_largest_batch(shapes: Path) -> None:
    found = planned(
        shapes, "Qwen2.5-0.5B", "topology=v5e-4", "capture.layers=[0]", "batch.length=8192", "plan.search=true"
    )
    done = plan(
        shapes,
        "Qwen2.5-0.5B",
        *("topology=v5e-4", "capture.layers=[0]", "batch.length=8192", f"batch.rows={found['rows'] + 4}"),
    )
    assert done.returncode == EXIT_INVALID


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is not None, reason="libtpu is installed")
def test_without_libtpu_the_way_to_get_it_is_said(shapes: Path) -> None:
    done = plan(shapes, "Qwen2.5-0.5B", "topology=v5e-4", "capture.layers=[1]", "batch.rows=4")
    assert done.returncode == EXIT_INVALID
    assert "pip install -e '.[tpu]'" in done.stderr


@pytest.mark.parametrize("most", [0, 1, 2, 3, 7, 8, 100])
def test_largest(most: int) -> None:
    tried = []

    def fits(number: int) -> bool:
        tried.append(number)
        return number <= most

    assert largest(fits, limit=64) == min(most, 64)
    assert len(tried) <= 14
    assert len(tried) == len(set(tried))


def test_activations_of_steps_in_flight_stay_on_the_chip() -> None:
    program = Program("xla", None, 100, 10, 50, 155, {}, 1.0)
    assert program.resident_bytes(1) == 160
    assert program.resident_bytes(4) == 190
    assert CHIPS["v5e"].hbm_bytes > 190
