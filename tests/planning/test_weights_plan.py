"""The planned bytes of weights against the compiler's, on numbers of devices that divide a model's axes or do not."""

import json
from pathlib import Path

import pytest

from pipeline.core.sites import ActivationKey, Site
from pipeline.models.registry import open_model
from pipeline.planning.expert_groups import choose_group, pair_bytes, received_bytes
from scripts.bench.published_shapes import SHAPES
from tests.jobs import run_program
from tests.step.test_mesh import CONFIG, GPT_OSS

pytestmark = pytest.mark.heavy
TINY = {  # in gpt_oss, 3 and 6 devices divide no axis alone, as 128 do in gpt-oss-20b
    "int8": CONFIG | {"num_hidden_layers": 2},
    "gpt_oss": GPT_OSS | {"hidden_size": 40, "intermediate_size": 40, "num_local_experts": 4},
}
DEVICES = {"int8": [(1, 1, 1), (8, 2, 2)], "gpt_oss": [(1, 1, 1), (3, 1, 1), (6, 2, 1), (6, 1, 2)]}
"""By model, their number, and how many are along `tensor` and `context`."""
PROGRAM = """
import json, sys
import jax, numpy as np
from pipeline.cluster.sharding import make_mesh, put_rows
from pipeline.core.sites import ActivationKey, Site
from pipeline.job.writing.transfer import start_copies
from pipeline.models.partition import Partition
from pipeline.models.registry import open_model
from pipeline.step.compiled_step import compile_step
from tests.specs import step_spec

rng, keys = np.random.default_rng(0), (ActivationKey(1, Site.resid_post),)
batch = {"tokens": rng.integers(0, 101, (24, 8), dtype=np.int32), "segments": np.ones((24, 8), np.int32)}
batch["positions"] = np.tile(np.arange(8, dtype=np.int32), (24, 1))
report = []
for name in sys.argv[3:]:
    model = open_model(f"{sys.argv[1]}/{name}", init="random")
    quantised = "int8" if name == "int8" else None
    expected = None
    for devices, tensor, context in json.loads(sys.argv[2])[name]:
        partition = Partition(make_mesh(tensor, jax.devices()[:devices], context), fsdp=True)
        data = devices // (tensor * context)
        params = model.load(keys, "float32", partition.leaf_sharding, quantised=quantised)
        step = compile_step(model, step_spec(model, keys, rows=24, length=8, dtype="float32"), params, partition)
        outputs = step(params, **put_rows(partition.mesh, batch)).arrays[:1]
        activations = np.zeros(outputs[0].shape, np.float32)
        for copy in start_copies(outputs, first_row=0):
            activations[copy.place(0)] = copy.wait()
        expected = activations if expected is None else expected
        report.append({
            "planned": model.weight_bytes(keys, "float32", quantised).on_device(tensor, data, context=context),
            "compiled": step.memory.argument_bytes - 3 * 4 * 24 * 8 // (devices // tensor),
            "error": float(np.linalg.norm(activations - expected) / np.linalg.norm(expected)),
        })
json.dump(report, sys.stdout)
"""


def write(path: Path, name: str, config: dict) -> str:
    (path / name).mkdir()
    (path / name / "config.json").write_text(json.dumps(config))
    return str(path / name)


def test_planned_bytes_are_the_programs_arguments_on_any_number_of_devices(tmp_path: Path) -> None:
    for name, config in TINY.items():
        write(tmp_path, name, config)
    done = run_program(PROGRAM, str(tmp_path), json.dumps(DEVICES), *TINY, devices=8)
    assert done.returncode == 0, done.stderr
    cases = [(name, *devices) for name in TINY for devices in DEVICES[name]]
    for case, step in zip(cases, json.loads(done.stdout), strict=True):
        assert step["planned"] == pytest.approx(step["compiled"], rel=0.01), case
        assert step["error"] < 1e-5, case


GROUPS = [  # of devices that exchange tokens, for this many tokens on each, and the share of the received bytes
    *(("Qwen3-30B-A3B", "tpu", 64, 2048, 8, 0.30), ("Qwen3-30B-A3B", "tpu", 64, 8192, 4, 0.69)),
    *(("Qwen3-30B-A3B", "tpu", 64, 32768, 1, 1), ("Qwen3-30B-A3B", "gpu", 8, 8192, 8, 0.44)),
    *(("gpt-oss-120b", "tpu", 128, 8192, 16, 0.20), ("DeepSeek-V3", "tpu", 128, 8192, 8, 0.26)),
    *(("DeepSeek-V3", "tpu", 7, 8192, 1, 1), ("Qwen2.5-7B", "tpu", 64, 2048, 1, None)),
]


@pytest.mark.parametrize(("name", "platform", "data", "num_tokens", "group", "share"), GROUPS)
def test_experts_or_tokens_are_exchanged_whichever_are_fewer(
    name, platform, data, num_tokens, group, share, tmp_path
) -> None:
    model = open_model(write(tmp_path, name, SHAPES[name]), init="random")
    weights = model.weight_bytes((ActivationKey(model.num_layers - 1, Site.resid_post),), "bfloat16")
    num_bytes, on_gpus = pair_bytes(model.arch, num_tokens, item_bytes=2), platform == "gpu"
    assert choose_group(weights, data, 1, num_bytes, on_gpus) == group
    if share is not None:
        received, gathered = (received_bytes(weights, data, 1, num_bytes, size, on_gpus) for size in (group, 1))
        assert received / gathered == pytest.approx(share, abs=0.01)
        assert weights.on_device(1, data, group) <= 1.01 * weights.on_device(1, data)


PLANNED = [  # GiB in bfloat16, with fsdp over data * tensor devices
    *(("gpt-oss-20b", 64, 1, 0.61), ("gpt-oss-20b", 128, 1, 0.60), ("gpt-oss-20b", 64, 2, 0.31)),
    *(("Qwen2.5-7B", 3, 1, 12.49), ("Qwen2.5-7B", 6, 1, 6.25), ("Qwen3-30B-A3B", 128, 1, 0.46)),
]


@pytest.mark.parametrize(("name", "data", "tensor", "gib"), PLANNED)
def test_fsdp_divides_among_as_many_devices_as_divide_an_axis(name, data, tensor, gib, tmp_path: Path) -> None:
    model = open_model(write(tmp_path, name, SHAPES[name]), init="random")
    weights = model.weight_bytes((ActivationKey(model.num_layers - 1, Site.resid_post),), "bfloat16")
    assert weights.on_device(tensor, data) / 2**30 == pytest.approx(gib, abs=0.01)
