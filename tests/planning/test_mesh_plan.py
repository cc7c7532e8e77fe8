"""Division of rows and weights among the devices."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.cluster.devices import Topology
from pipeline.config.choices import Weights
from pipeline.config.schema import MeshConfig
from pipeline.core.errors import ConfigError
from pipeline.core.sites import ActivationKey, Site
from pipeline.models.checkpoints.loading import WeightBytes
from pipeline.models.leaves import make_leaf
from pipeline.models.registry import Model, open_model
from pipeline.planning.expert_groups import choose_group, pair_bytes, received_bytes
from pipeline.planning.mesh import MeshPlan, plan_mesh, plan_weights
from pipeline.store.format.layout import MIB
from scripts.bench.published_shapes import SHAPES
from tests.specs import LLAMA

TENSOR_DIMS = {"attention heads": 14, "key-value heads": 2, "MLP neurons": 4864}
ARCH = replace(LLAMA, d_model=1024, d_mlp=4096, vocab_size=90 * 1024)
WEIGHTS = WeightBytes(  # 500 matrices of 8 MiB, an embedding of 180 MiB
    {"gate": make_leaf(ARCH, "mlp.gate", "*", range(500)), "embed": make_leaf(ARCH, "embed", "embed")},
    "bfloat16",
    others=20 * MIB,
)

MESHES = {
    "heads": (4, 8, r"does not divide the model's 14 attention heads: 14 = 3 \* 4 \+ 2"),
    "across processes": (
        2,
        1,
        r"mesh.tensor = 1 \* 2 does not divide the 1 devices of a process \(8 devices",
    ),
    "not a divisor": (3, 8, r"mesh.tensor = 1 \* 3 does not divide the 8 devices of a process"),
}


@pytest.mark.parametrize(("tensor", "process_devices", "message"), MESHES.values(), ids=MESHES.keys())
def test_the_refusal_of_a_mesh_gives_the_whole_equation(tensor, process_devices, message):
    topology = Topology(devices=8, processes=8 // process_devices)
    with pytest.raises(ConfigError, match=message):
        plan_mesh(MeshConfig(tensor=tensor), 8, topology, TENSOR_DIMS)


def test_each_process_has_consecutive_rows():
    topology = Topology(devices=8, processes=4, process=3)
    for data in (None, 4):
        mesh = plan_mesh(MeshConfig(data, tensor=2), 16, topology, TENSOR_DIMS)
        assert mesh == MeshPlan(4, 2, 4, process_rows=4, first_row=12)
    with pytest.raises(ConfigError, match=r"3 \* 1 \* 2 is not the number of devices, 8. Set mesh.data=null"):
        plan_mesh(MeshConfig(data=3, tensor=2), 16, topology, TENSOR_DIMS)


@pytest.mark.parametrize(
    ("context", "tensor", "process_devices", "message"),
    [
        (4, 1, 4, None),
        (2, 2, 4, None),
        (8, 1, 4, r"mesh.context \* mesh.tensor = 8 \* 1 does not divide the 4 devices of a process \(8 devices / 2"),
        (4, 2, 4, r"mesh.context \* mesh.tensor = 4 \* 2 .* rows must stay within their process"),
    ],
)
def test_the_positions_of_a_row_stay_within_a_process(context, tensor, process_devices, message):
    topology = Topology(devices=8, processes=8 // process_devices, process=1)
    given = MeshConfig(tensor=tensor, context=context), 4, topology, TENSOR_DIMS
    if message is None:
        assert plan_mesh(*given) == MeshPlan(2, tensor, 2, process_rows=2, first_row=2, context=context)
        return
    with pytest.raises(ConfigError, match=message):
        plan_mesh(*given)


@pytest.mark.parametrize(
    ("wanted", "tensor", "device_mib", "weights", "weights_mib", "noted"),
    [
        ("auto", 1, None, "replicated", 4200, False),
        ("auto", 1, 8000, "replicated", 4200, False),
        ("auto", 1, 6000, "fsdp", 1065, True),
        ("fsdp", 1, None, "fsdp", 1065, False),
        ("auto", 2, 6000, "tensor", 2110, False),
        ("auto", 2, 3000, "fsdp", 1065, True),
    ],
)
def test_weights_are_divided_if_they_would_not_fit(wanted, tensor, device_mib, weights, weights_mib, noted):
    """On 4 devices."""
    topology = Topology(4, device_mib and device_mib * MIB)
    plan = plan_weights(Weights(wanted), WEIGHTS, 4 // tensor, tensor, topology)
    assert (plan.sharding, plan.device_bytes) == (weights, weights_mib * MIB)
    assert any("weights are divided" in note for note in plan.notes) == noted


def test_weights_that_do_not_fit_even_divided_are_refused():
    with pytest.raises(ConfigError, match=r"fsdp\) take 1065 MiB on each device, which has 1000 MiB\. Use more"):
        plan_weights(Weights.auto, WEIGHTS, data=4, tensor=1, topology=Topology(4, 1000 * MIB))


def published_model(name: str, path: Path) -> Model:
    (path / "config.json").write_text(json.dumps(SHAPES[name]))
    return open_model(str(path), init="random")


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
    model = published_model(name, tmp_path)
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
    model = published_model(name, tmp_path)
    weights = model.weight_bytes((ActivationKey(model.num_layers - 1, Site.resid_post),), "bfloat16")
    assert weights.on_device(tensor, data) / 2**30 == pytest.approx(gib, abs=0.01)
