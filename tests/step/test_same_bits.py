"""A row's activations have the same bits for one device and for many, on CPUs. Another process has the devices."""

import json
import os

import pytest

from tests.jobs import run_program
from tests.step.test_mesh import CONFIGS

pytestmark = pytest.mark.heavy
MODELS = ("dense", "experts")
PROGRAM = """
import json, sys
import jax, numpy as np
from pipeline.cluster.sharding import make_mesh, put_rows
from pipeline.core.sites import ActivationKey, Site, activation_keys
from pipeline.models.partition import Partition
from pipeline.models.registry import open_model
from pipeline.models.weight_specs import has_site
from pipeline.step.compiled_step import compile_step
from tests.specs import step_spec

SITES = Site.attn_entropy, Site.attn_out, Site.router_weights, Site.router_indices, Site.mlp_out, Site.resid_post
rows, length, report = 8, 96, {}
segments = np.repeat(np.array([[1] * 40 + [2] * 50 + [0] * 6], np.int32), rows, axis=0)
tokens = np.random.default_rng(0).integers(0, 101, (rows, length), dtype=np.int32)
batch = {"tokens": tokens, "segments": segments, "positions": np.tile(np.arange(length, dtype=np.int32), (rows, 1))}
for name in sys.argv[2:]:
    model = open_model(f"{sys.argv[1]}/{name}", init="random")
    keys = [key for key in activation_keys((0,), SITES) if has_site(model.arch, key.layer, key.site)]
    keys.append(ActivationKey(1, Site.resid_post))
    expected = None
    for devices, fsdp in ((1, False), (8, True)):
        partition = Partition(make_mesh(1, jax.devices()[:devices]), fsdp)
        params = model.load(keys, "float32", partition.leaf_sharding)
        spec = step_spec(model, keys, rows=rows, length=length, dtype="float32", statistics=False)
        step = compile_step(model, spec, params, partition)
        arrays, _, _ = step(params, **put_rows(partition.mesh, batch))
        content = [np.asarray(array).tobytes() for array in arrays]
        expected = expected or content
        different = [key.name for key, got, want in zip(keys, content, expected) if got != want]
        report[f"{name} on {devices} devices, fsdp {fsdp}"] = different
json.dump(report, sys.stdout)
"""


def test_a_row_has_the_same_bits_for_any_number_of_devices(tmp_path) -> None:
    for name in MODELS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(CONFIGS[name] | {"num_hidden_layers": 2}))
    # Compiled as for users: without LLVM's optimisations, sums over some numbers of rows differ in their last bits.
    environment = os.environ | {"XLA_FLAGS": ""}
    done = run_program(PROGRAM, str(tmp_path), *MODELS, devices=8, env=environment, timeout_s=600)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert len(report) == 2 + 2
    assert {case: different for case, different in report.items() if different} == {}
