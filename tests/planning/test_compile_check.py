"""Compiles steps for TPU slices. Needs libtpu (the extra `tpu`), but no TPU."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.core.errors import EXIT_INVALID, ConfigError
from pipeline.planning.slice.chips import parse_slice
from pipeline.planning.slice.compile_check import slice_devices
from scripts.bench.published_shapes import write_shapes
from tests.jobs import ROOT, run, run_program, write_text

pytestmark = pytest.mark.heavy
needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu (the extra `tpu`)")


@pytest.fixture(scope="module")
def shapes(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("shapes")
    write_shapes(path)
    return path


def plan(shapes: Path, name: str, *overrides: str) -> subprocess.CompletedProcess:
    """Runs the command in a new process, where JAX has not initialised another backend."""
    common = [f"model.path={shapes / name}", "model.init=random", "model.dtype=bfloat16"]
    return run(*common, "store.path=gs://bucket/store", *overrides, module="pipeline.plan", timeout_s=900)


@needs_libtpu
def test_a_published_model_fits_a_slice(shapes: Path) -> None:
    """Compares the plan's arithmetic with the compiler's figures, which include the padding of layouts. The audit
    compiles more models."""
    sizes = (
        "capture.layers=[21]",
        "capture.sites=[resid_pre]",
        "batch.rows=16",
        "batch.length=1024",
        "run.max_inflight_mib=40000",
    )
    done = plan(shapes, "Qwen2.5-7B", "topology=v5e-16", *sizes, "plan.json=true")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    program = report["program"]
    rows_bytes = 3 * 4 * report["rows_per_device"] * report["length"]
    assert program["argument_bytes"] == pytest.approx(report["weight_bytes"] + rows_bytes, rel=0.05)
    assert program["output_bytes"] == pytest.approx(report["output_bytes"], rel=0.05)
    assert (program["attention"], report["weights"]) == ("splash", "fsdp")
    assert sum(program["collectives"].values()) > 1  # gathers
    assert program["peak_bytes"] < report["hbm_bytes_needed"] < report["hbm_bytes"]


LONG_ROWS = ("topology=v5e-4", "capture.layers=[0]", "batch.length=8192")


@needs_libtpu
def test_a_job_that_does_not_fit_is_refused_with_a_remedy(shapes) -> None:
    done = plan(shapes, "Llama-3-8B", *LONG_ROWS, "batch.rows=512", "run.max_inflight_mib=40000")
    assert done.returncode == EXIT_INVALID
    assert "ran out of memory" in done.stderr
    assert "Lower batch.rows (by half" in done.stderr
    assert "Traceback" not in done.stderr


KERNELS = """
import math, re, sys
import jax
from jax.sharding import NamedSharding, PartitionSpec
from pipeline.planning.slice.compile_check import slice_devices
from pipeline.cluster.sharding import make_mesh
from pipeline.models.attention.spec import AttentionInputs, AttentionSpec
from pipeline.models.attention.splash import attend_splash
from pipeline.models.sae.encoding import encode
from pipeline.models.sae.params import abstract_params
from pipeline.models.sae.spec import FeatureActivation, SAESpec
from pipeline.planning.slice.chips import parse_slice
every, width = sys.argv[1] == "every", int(sys.argv[2])
for number, name in enumerate(("v5e-4", "v4-8", "v5p-8", "v6e-4")):
    mesh = make_mesh(2, slice_devices(parse_slice(name)))
    shapes = (
        (14, 2, 64, 1024, "bfloat16", {"causal": True}),
        (12, 12, 64, 512, "float32", {"causal": False}),
        (8, 4, 256, 1152, "bfloat16", {"causal": True, "softcap": 50.0, "window": 300}),
        (8, 2, 80, 600, "bfloat16", {"causal": True}),
        (8, 2, 128, 2048, "bfloat16", {"causal": True}),  # from here on with blocks of each row's own
        (64, 8, 64, 2048, "bfloat16", {"causal": True, "window": 128}, True),
        *[(8, 4, 256, 8192, "bfloat16", {"causal": True, "softcap": 50.0})] * (name == "v5e-4"),
    )
    chosen = shapes if every else (*shapes[number:6:4], *shapes[6:])  # each shape on one chip
    for num_heads, num_kv_heads, head_dim, length, dtype, rule, *with_sinks in chosen:
        def shape(*sizes, dtype=dtype, spec=PartitionSpec("data")):
            return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, spec))
        heads = PartitionSpec("data", None, "tensor")
        qkv = [shape(4, length, number, head_dim, spec=heads) for number in (num_heads, num_kv_heads, num_kv_heads)]
        with jax.default_matmul_precision("highest" if dtype == "float32" else "default"):
            attend = jax.jit(lambda *x: attend_splash(AttentionInputs(*x), AttentionSpec(scale=0.1, **rule), mesh=mesh))
            sinks = [shape(num_heads, spec=PartitionSpec("tensor"))] * len(with_sinks)
            text = attend.lower(*qkv, shape(4, length, dtype="int32"), *sinks).compile().as_text()
        assert text.count('custom_call_target="tpu_custom_call"') == 1
        assert " while(" not in text  # over rows
        assert "all-" not in text
sae = SAESpec(2304, width, 2304, FeatureActivation.jumprelu)
mesh = make_mesh(1, slice_devices(parse_slice("v5e-4")))
rows = NamedSharding(mesh, PartitionSpec("data"))
x = jax.ShapeDtypeStruct((64, 1024, 2304), "bfloat16", sharding=rows)  # 16 rows on each chip
for decodes in (False, True) if every else (True,):
    names = ("w_enc", "b_enc", "threshold", *(("w_dec", "b_out") if decodes else ()))
    params = abstract_params(sae, names, "bfloat16", mesh)
    features = jax.jit(lambda x, params, decodes=decodes: encode(sae, params, x, 64, mesh=mesh, decodes=decodes))
    compiled = features.lower(x, params).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < (400 if decodes else 300) * 2**20
    shapes = re.findall(r"[a-z0-9]+\\[([0-9,]+)\\]", compiled.as_text())
    assert max(math.prod(map(int, shape.split(","))) for shape in shapes) == 2304 * width  # only the matrix
"""


@needs_libtpu
@pytest.mark.parametrize(
    ("shapes_of_chips", "width"), [("pairs", 16384), pytest.param("every", 65536, marks=pytest.mark.slow)]
)
def test_splash_and_encoding_compile_for_chips(shapes_of_chips: str, width: int) -> None:
    """With either width, the SAE's matrix is larger than the features of a tile of tokens."""
    done = run_program(KERNELS, shapes_of_chips, str(width), timeout_s=300)
    assert done.returncode == 0, done.stderr


SLICES = """
import jax
from pipeline.planning.slice.compile_check import slice_devices
from pipeline.cluster.sharding import make_mesh
from pipeline.planning.slice.chips import parse_slice
for name in ("v4-16", "v5e-8", "v5e-64", "v5p-32", "v6e-8", "v6e-32"):
    tpu_slice = parse_slice(name)
    for tensor in (1, 2, 4):
        processes = [device.process_index for device in make_mesh(tensor, slice_devices(tpu_slice)).devices.flat]
        assert len(processes) == tpu_slice.num_chips, name
        assert processes == sorted(processes) and processes[-1] == tpu_slice.num_hosts - 1, (name, processes)
"""


@needs_libtpu
def test_the_devices_of_a_process_are_neighbours_in_every_slice() -> None:
    """The plan gives each process consecutive rows, so its devices must be consecutive in the mesh."""
    done = run_program(SLICES, timeout_s=120)
    assert done.returncode == 0, done.stderr


@needs_libtpu
def test_libtpu_logs_nothing_without_a_tpu(tmp_path: Path) -> None:
    """Without JAX_PLATFORMS, JAX would ask libtpu for devices, and libtpu would log errors about missing variables."""
    command = [sys.executable, "-m", "pipeline.plan", f"data.path={write_text(tmp_path, files=1, documents=1)}"]
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")


def test_without_libtpu_the_message_says_how_to_install_it(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "libtpu", None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[tpu\]'"):
        slice_devices(parse_slice("v5e-4"))


@pytest.mark.skipif(bool(importlib.util.find_spec("jax_plugins")), reason="JAX's CUDA plugin may be there")
def test_without_the_cuda_plugin_the_message_says_how_to_install_it() -> None:
    with pytest.raises(ConfigError, match=r"topology=h100-8 requires JAX's CUDA plugin.*pip install -e '\.\[cuda\]'"):
        slice_devices(parse_slice("h100-8"))
