"""Division of rows and weights among the devices."""

from dataclasses import replace

import pytest

from pipeline.cluster.devices import Topology
from pipeline.config.choices import Weights
from pipeline.config.schema import MeshConfig
from pipeline.core.errors import ConfigError
from pipeline.models.checkpoints.loading import WeightBytes
from pipeline.models.leaves import make_leaf
from pipeline.planning.mesh import MeshPlan, plan_mesh, plan_weights
from pipeline.store.format.layout import MIB
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
