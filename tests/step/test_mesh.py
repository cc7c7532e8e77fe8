"""The step on eight devices, divided in every way. It runs in another process, which starts with eight devices."""

import math
import re

import numpy as np
import pytest

from pipeline.store.read.reader import ActivationStore
from tests.jobs import run_here, run_processes, write_random_model, write_text
from tests.step.divisions import CONFIG, Division, run_divisions

pytestmark = pytest.mark.heavy
CASES = {
    ("dense", None): [
        *(Division(), Division(fsdp=True), Division(tensor=2)),
        Division(2, True, context=4, selects=True),
    ],
    ("experts", None): [Division(tensor=2)],
    ("gpt_oss", None): [Division(2, True, group=2), Division(2, True, devices=6), Division(2, True, context=2)],
    ("deepseek", "int8"): [Division(2, True, group=4)],
    ("delta", None): [Division(tensor=2), Division(fsdp=True, context=2)],
    ("conv", "int4"): [Division(2, True)],
    ("mamba", None): [Division(2, True)],
    ("gemma4", None): [Division(2, True, group=2)],
    ("llama4", None): [Division(2, True, group=4), Division(context=4)],
    ("roberta", None): [Division(context=4)],
}
ROWS, LENGTH = 24, 48


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> dict[str, dict]:
    return run_divisions(tmp_path_factory.mktemp("models"), ROWS, LENGTH, CASES)


@pytest.mark.parametrize("name", ["topk", "gated"])
def test_features_do_not_depend_on_the_mesh(report, name):
    features = report[name]
    assert features["equal"]
    assert features["error"] < 1e-5
    assert features["fire"] > 0
    assert features["loaded"] == features["planned"]


@pytest.mark.parametrize(
    ("case", "division"), [(case, each) for case, divisions in CASES.items() for each in divisions]
)
def test_every_division_computes_the_same_and_holds_its_share_of_the_weights(report, case, division):
    """All outputs: activations and, with divided positions, statistics and the head's."""
    model, quantised = case
    found = report[f"{model} {division}"]
    assert found["error"] < 1e-5
    if quantised == "int4":  # which CPUs hold in int8
        return
    assert found["loaded"] == found["planned"]
    if division.devices == 8 and division.context == 1:
        share = 1 / 8 if division.fsdp else 1 / division.tensor
        assert 0.8 * share < found["share"] < share + 0.1  # norms, biases, routers and scales are whole


@pytest.mark.parametrize(("tensor", "fsdp"), [(4, False), (2, True)])
def test_a_divided_vocabulary_gives_the_same_outputs(report, tensor, fsdp):
    """Without fsdp, devices exchange only a few numbers per token."""
    found = report[f"head {tensor} {fsdp}"]
    assert found["error"] < 1e-5
    if fsdp:
        return
    shapes = [shape for each in found["collectives"] for shape in re.findall(r"\[([\d,]+)\]", each)]
    exchanged = [math.prod(map(int, shape.split(","))) for shape in shapes]
    num_tokens, num_candidates = 24 * tensor, 8 * tensor  # per device
    assert max(exchanged) == num_tokens * num_candidates


def collectives(report: dict[str, dict], model: str, division: Division) -> tuple[list[str], list[str]]:
    """All collectives of a step, and those that sum its residual stream."""
    found = report[f"{model} {division}"]["collectives"]
    rows = ROWS // division.data
    return found, [each for each in found if each.startswith(f"all-reduce f32[{rows},{LENGTH},32]")]


def test_divided_experts_exchange_sums_and_no_tokens(report):
    """Every layer sums over its experts; the captured layer also sums the output of each of a token's experts."""
    found, _ = collectives(report, "experts", Division(tensor=2))
    assert {kind.split()[0] for kind in found} == {"all-reduce"}
    exchanged = [list(map(int, shape.split(","))) for kind in found for shape in re.findall(r"f32\[([\d,]+)\]", kind)]
    widths = [math.prod(shape) // (ROWS // 4 * LENGTH) for shape in exchanged]
    assert set(widths) == {32, 3 * 32}
    assert widths.count(3 * 32) == 1
    assert len(widths) <= 1 + 1 + 3 * 2  # attention, experts and the shared one: in a scan of two layers, and after it


def test_the_replicated_step_has_no_collective_but_the_sum_of_the_counts(report):
    [only] = collectives(report, "dense", Division())[0]
    assert only.startswith("all-reduce (s32[], s32[]")


def test_the_fsdp_step_gathers_weights_and_nothing_else(report):
    found, _ = collectives(report, "dense", Division(fsdp=True))
    gathers = [each for each in found if each.startswith("all-gather f32[")]
    assert gathers
    assert len(found) == len(gathers) + 1, found
    sizes = {32 * 32, 2 * 8 * 32, 48 * 32}  # q and o; k and v; gate, up and down
    for gather in gathers:
        shape = [int(size) for size in re.search(r"\[([\d,]+)\]", gather)[1].split(",")]
        assert math.prod(shape) in sizes, gather


def test_divided_delta_nets_sum_as_often_as_attention(report):
    found, sums = collectives(report, "delta", Division(tensor=2))
    assert {each.split(" ")[0] for each in found} == {"all-reduce"}
    assert len(sums) == 1 + 2 * 2  # the embedding, and both layers


def test_the_tensor_step_sums_twice_a_layer_and_gathers_no_activations(report):
    """Once after attention, once after the MLP (Shoeybi et al., arXiv 1909.08053), and once for the embedding."""
    found, sums = collectives(report, "dense", Division(tensor=2))
    of_counts = [each for each in found if each.startswith("all-reduce") and "f32[" not in each]
    assert len(sums) == 1 + 2 * 2  # layer 0, and the body of the scan over layers 1 and 2
    assert len(found) == len(sums) + len(of_counts), found


def test_a_job_divided_in_every_way_makes_nearly_the_same_store(tmp_path):
    """Two processes divide rows, heads and experts, and exchange tokens; one divides heads and positions. Sums have
    another order."""
    shape = {name: size for name, size in CONFIG.items() if name != "vocab_size"}
    shape |= {"model_type": "qwen3_moe", "num_hidden_layers": 1, "head_dim": 8, "num_experts": 16}
    job = [
        *write_random_model(tmp_path / "model", **shape | {"num_experts_per_tok": 2, "moe_intermediate_size": 256}),
        *("model.dtype=float32", "capture.dtype=float32", "data.num_streams=2"),
        f"data.path={write_text(tmp_path / 'text', files=2, documents=15)}",
        *("batch.rows=4", "batch.length=64", "capture.layers=[0]", "capture.sites=[attn_z,expert_out,resid_post]"),
        *("run.progress=false", "store.rows_per_block=8", "run.max_tokens=1000", "capture.outputs=[loss]"),
    ]
    run_here(*job, f"store.path={tmp_path / 'one'}")
    one = ActivationStore.open(tmp_path / "one")
    for processes, note, *division in (
        (2, "2 neighbouring devices exchange tokens", "model.weights=fsdp"),
        (1, "context 2, tensor 2", "mesh.context=2"),
    ):
        store = tmp_path / str(processes)
        result = run_processes(processes, 4 // processes, *job, *division, "mesh.tensor=2", f"store.path={store}")
        assert result.returncode == 0, result.stdout
        assert note in result.stdout
        divided = ActivationStore.open(store)
        assert np.array_equal(one.rows, divided.rows)
        for name in ("attn_z", "expert_out", "resid_post"):
            a, b = (each.read(f"blocks.0.{name}", one.rows, np.float32) for each in (one, divided))
            assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(a), name
        a, b = (np.nan_to_num(each.read_outputs(one.rows, ["loss"])["loss"]) for each in (one, divided))
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(a)
