"""The audit of compiled programs: counts in HLO texts of a TPU and a GPU, and small programs compiled for both."""

import copy
import json
from importlib.util import find_spec
from pathlib import Path

import jax
import pytest

from pipeline.planning.slice.compile_check import count_collectives
from scripts.audit.analysis import Collectives, Loop, Move, analyse
from scripts.audit.audit import audit, compare, table
from scripts.audit.cases import Case
from scripts.audit.measured import measure
from scripts.bench.published_shapes import SHAPES

pytestmark = pytest.mark.heavy
# A loop over five layers: a slice of stacked weights, a gather that is fused with an addition, a kernel; then a copy.
PROGRAM = Path(__file__).with_name("audited_program.txt").read_text()
# Of a GPU: three layers. A slice of the stacked weights is copied, and gathered during a product; its sum is reduced,
# with nothing meanwhile; cuDNN attention with a mask, a Pallas kernel, ten blocks of an inner loop. First, a transpose.
GPU_PROGRAM = Path(__file__).with_name("audited_gpu_program.txt").read_text()
MATRIX = 4 * 2048 * 2048  # bytes, carried by the loop
WEIGHTS = 2 * 256 * 512  # bytes per layer


def test_an_hlo_text_is_counted() -> None:
    analysis = analyse(PROGRAM)
    assert not analysis.is_of_one_iteration
    assert (analysis.cycles, analysis.unestimated) == (5 * (100 + 1000) + 10, 0)
    unknown = analyse(PROGRAM.replace('"estimated_cycles":"1000"', f'"estimated_cycles":"{(1 << 63) - 1}"'))
    assert (unknown.cycles, unknown.unestimated) == (5 * 100 + 10, 5)
    assert analysis.loops == (Loop("jit(step)/layers_0_to_4/while", trips=5, runs=1, cycles=1100, body="body"),)
    assert analysis.collectives == {
        "all-gather": Collectives(5, 5 * WEIGHTS * 3 // 4, 0)
    }  # in two fusions, but one chain
    assert analysis.large_moves == (Move("jit(step)/transpose", "f32[2048,2048]", 1, 2 * MATRIX),)
    assert analysis.large_float32 == ("f32[2048,2048]",)
    assert analysis.remat == ("fused.remat",)
    assert analysis.kernels == {"kernel": 5}
    gather, addition, kernel = WEIGHTS + WEIGHTS // 4, 2 * MATRIX, 2 * MATRIX
    scalars = 5 * 25
    assert analysis.hbm_bytes == 5 * (WEIGHTS + gather + addition + kernel) + 2 * MATRIX + scalars


def test_a_text_of_a_gpu_is_counted() -> None:
    analysis, layer, product = analyse(GPU_PROGRAM, "gpu", 2048), 2 * 4096 * 1024, 4 * 4096 * 1024
    loops = {loop.op_name.count("while"): (loop.trips, loop.runs) for loop in analysis.loops}
    assert loops == {1: (3, 1), 2: (10, 3)}
    assert analysis.launches == 2 + 3 * (8 + 10)
    rounds = GPU_PROGRAM.replace('"known_trip_count":{"n":"3"}', "")
    assert analyse(rounds, "gpu", 2048).launches == 2 + 8 + 10 + 1  # once, and the condition
    assert analysis.collectives == {
        "all-gather": Collectives(3, 3 * (4 - 1) * layer, overlapped=3),
        "all-reduce": Collectives(3, 3 * 2 * product * 3 // 4, overlapped=0),
    }
    assert analysis.large_moves == (
        Move("jit(step)/layers_N/while/body/squeeze", "bf16[1,4096,1024]", 3, 3 * (2 * layer + 4)),
        Move("jit(step)/layers_N/while", "bf16[1024,3,4096]", 1, 2 * 3 * layer),
    )
    assert analyse(GPU_PROGRAM).large_moves == analysis.large_moves[1:]  # a TPU slices while it reads
    assert analysis.kernels == {"__cudnn$fmhaScaleBiasSoftmax": 3, "grouped_product": 3}
    assert analysis.squares == ("bf16[2,1,2048,2048]",)
    assert analysis.large_float32 == ("f32[4096,4096]",)  # 64 MiB, and not the product with 16
    assert analyse(GPU_PROGRAM, "gpu", 1024).squares == ()
    read = [
        analyse(GPU_PROGRAM.replace("call(%rows, %all-gather-done)", f"call(%rows, %{name})"), "gpu").hbm_bytes
        for name in ("rows", "stacked")
    ]
    assert read[0] - read[1] == 3 * 2 * 4096 * 4096 - 3 * layer  # of stacked weights, a kernel reads one layer
    synchronous = GPU_PROGRAM.replace('"is_sync":false', '"is_sync":true')
    assert analyse(synchronous, "gpu").collectives["all-gather"].overlapped == 0


def test_collectives_of_one_channel_are_counted_by_instruction() -> None:
    """All collectives inside `shard_map` have the same channel."""
    unchained = PROGRAM.replace(', frontend_attributes={chain_id="0"}', "")
    assert analyse(unchained).collectives["all-gather"].count == 10
    for text, count in ((PROGRAM, 1), (unchained, 2)):
        assert count_collectives(text) == {"all-gather": count}


def test_a_loop_of_unknown_length_is_counted_for_one_iteration() -> None:
    unknown = PROGRAM.replace("direction=LT", "direction=NE")
    assert analyse(unknown).cycles == 1100 + analyse(PROGRAM).cycles - 5 * 1100  # with what is outside of it
    assert not analyse(PROGRAM, is_decoding=True).is_of_one_iteration
    analysis = analyse(unknown, is_decoding=True)
    assert analysis.is_of_one_iteration
    assert (analysis.cycles, analysis.loops) == (1100, ())
    assert analysis.collectives == {"all-gather": Collectives(1, WEIGHTS * 3 // 4, 0)}
    assert analysis.large_moves == ()


def test_trip_counts_are_derived_from_the_loop() -> None:
    for constant, old, new, trips in (("zero", 0, 3, 2), ("one", 1, 2, 3), ("five", 5, 0, 0)):
        line = f"%{constant} = s32[]{{:T(128)}} constant({old})"
        assert line in PROGRAM
        changed = PROGRAM.replace(line, line.replace(f"({old})", f"({new})"))
        assert [loop.trips for loop in analyse(changed).loops] == [trips]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("add(%copied, %one)", "add(%copied, %counter)"),
        ("add(%copied, %one)", "multiply(%copied, %one)"),
        ("compare(%counter.1, %five)", "compare(%five, %counter.1)"),
        ("constant(5)", "parameter(1)"),
    ],
)
def test_other_loops_have_an_unknown_length(old: str, new: str) -> None:
    assert old in PROGRAM
    assert [loop.trips for loop in analyse(PROGRAM.replace(old, new)).loops] == [None]


RECEIVED = {
    "all-gather": WEIGHTS * 3 // 4,
    "all-reduce": 2 * WEIGHTS // 4 * 3 // 4,
    "all-to-all": WEIGHTS // 4 * 3 // 4,
    "reduce-scatter": WEIGHTS // 4 * 3 // 4,
    "collective-permute": WEIGHTS // 4,
}


@pytest.mark.parametrize("kind", RECEIVED)
def test_received_bytes_follow_the_kind_of_collective(kind: str) -> None:
    """The operand has a quarter of the bytes of WEIGHTS; four devices exchange."""
    collectives = analyse(PROGRAM.replace("all-gather(", f"{kind}(")).collectives
    assert collectives == {kind: Collectives(5, 5 * RECEIVED[kind], 0)}


FUSED = """
%update (x: bf16[64,1024], new: bf16[1,1024], place: s32[]) -> bf16[64,1024] {
  %x = bf16[64,1024]{1,0} parameter(0)
  %new = bf16[1,1024]{1,0} parameter(1)
  %place = s32[]{:S(2)} parameter(2)
  %changed = bf16[64,1024]{1,0} dynamic-update-slice(%x, %new, %place, %place)
  ROOT %same = bf16[64,1024]{1,0} bitcast(%changed)
}
%view (y: bf16[64,1024]) -> bf16[64,1024] {
  %y = bf16[64,1024]{1,0} parameter(0)
  ROOT %seen = bf16[64,1024]{1,0} bitcast(%y)
}
%product (z: bf16[64,1024]) -> bf16[64,64] {
  %z = bf16[64,1024]{1,0} parameter(0)
  %fusion.1 = bf16[64,1024]{1,0} fusion(%z), kind=kLoop, calls=%view
  ROOT %dot = bf16[64,64]{1,0:S(1)} convolution(%fusion.1, %fusion.1), dim_labels=bf_oi->bf
}
%copies (w: bf16[64,1024]) -> bf16[64,1024] {
  %w = bf16[64,1024]{1,0} parameter(0)
  ROOT %copied = bf16[64,1024]{0,1} copy(%w)
}
%keeps (v: bf16[64,1024]) -> bf16[64,1024] {
  ROOT %v = bf16[64,1024]{1,0} parameter(0)
}
ENTRY %main (a: bf16[64,1024], b: bf16[1,1024], at: s32[]) -> bf16[64,1024] {
  %a = bf16[64,1024]{1,0} parameter(0)
  %b = bf16[1,1024]{1,0} parameter(1)
  %at = s32[]{:S(2)} parameter(2)
  INSTRUCTION
}
"""
ARRAY, ROW = 2 * 64 * 1024, 2 * 1024
TRAFFIC = {
    "a fusion that updates a row in place": ("bf16[64,1024]{1,0} fusion(%a, %b, %at), calls=%update", 2 * ROW),
    "an update in place": ("bf16[64,1024]{1,0} dynamic-update-slice(%a, %b, %at, %at)", 2 * ROW),
    "a scatter": ("bf16[64,1024]{1,0} scatter(%a, %at, %b), to_apply=%keeps", 2 * ROW),
    "a product of an array that a fusion in it views": ("bf16[64,64]{1,0:S(1)} fusion(%a), calls=%product", ARRAY),
    "a slice": ("bf16[1,1024]{1,0} dynamic-slice(%a, %at, %at)", 2 * ROW),
    "a slice to VMEM": ("((bf16[64,1024]{1,0}), bf16[1,1024]{1,0:S(1)}, s32[]{:S(2)}) slice-start(%a)", ROW),
    "a copy to VMEM": ("(bf16[64,1024]{1,0:S(1)}, bf16[64,1024]{1,0}, u32[]{:S(2)}) copy-start(%a)", ARRAY),
    "a copy": ("bf16[64,1024]{0,1} copy(%a)", 2 * ARRAY),
    "bookkeeping": ('bf16[64,1024]{1,0} custom-call(%a), custom_call_target="ConcatBitcast"', 0),
    "one of two branches": (
        "bf16[64,1024]{1,0} conditional(%at, %a, %a), branch_computations={%copies, %keeps}",
        2 * ARRAY // 2,
    ),
    "one of two, by a condition": (
        "bf16[64,1024]{1,0} conditional(%at, %a, %a), true_computation=%keeps, false_computation=%copies",
        2 * ARRAY // 2,
    ),
    "a call": ("bf16[64,1024]{1,0} call(%a), to_apply=%copies", 2 * ARRAY),
}


@pytest.mark.parametrize(("instruction", "num_bytes"), TRAFFIC.values(), ids=TRAFFIC.keys())
def test_hbm_traffic_follows_the_instruction(instruction: str, num_bytes: int) -> None:
    """Reads and writes. The array has 64 rows."""
    assert analyse(FUSED.replace("INSTRUCTION", f"ROOT %r = {instruction}")).hbm_bytes == num_bytes


@pytest.mark.skipif(not find_spec("jax_plugins"), reason="needs JAX's CUDA plugin (the extra `cuda`)")
def test_a_program_of_a_gpu_agrees_with_arithmetic(tmp_path: Path) -> None:
    name = "0.5B 16x1024 h100-1"
    (program,) = audit(name, tmp_path).values()
    assert program["loops"] == []
    assert (program["layers"], program["kernels"]) == (13, {"pallas_call": 13})  # attention
    assert program["hbm_bytes"] > program["ideal_hbm_bytes"]
    assert name in table({name: program})


SMALL = "0.5B, 2 layers, fsdp, 2x512 v5e-4"


@pytest.mark.skipif(find_spec("libtpu") is None, reason="needs libtpu (the extra `tpu`)")
def test_a_compiled_program_agrees_with_arithmetic(tmp_path: Path) -> None:
    """Two layers of Qwen2.5-0.5B, divided over four chips: each receives three quarters of the matrices, and exchanges
    the tokens' ids and embeddings."""
    programs = audit(SMALL, tmp_path)
    assert list(programs) == [f"{SMALL}: step"]
    program = programs[f"{SMALL}: step"]
    width, heads, kv_heads, head_dim, neurons, tokens = 896, 14, 2, 64, 4864, 2 * 512
    matrices = 2 * 2 * width * (2 * heads * head_dim + 2 * kv_heads * head_dim + 3 * neurons)
    received = sum(each["received_bytes"] for each in program["collectives"].values())
    assert received == pytest.approx(matrices * 3 / 4 + 3 * tokens * (2 * width + 4), rel=1e-4)
    assert [loop["trips"] for loop in program["loops"]] == [2]
    assert sum(program["kernels"].values()) == 2  # attention
    assert program["ideal_hbm_bytes"] == pytest.approx(matrices + tokens * (2 * width + 12), rel=0.01)
    assert program["hbm_bytes"] > program["ideal_hbm_bytes"]
    # The products alone, at the chip's peak.
    assert program["estimated_ms"] > matrices * tokens / 197e12 * 1e3
    stored = {"versions": {}, "programs": json.loads(json.dumps(programs))}
    assert compare(stored, {"versions": {}, "programs": programs}) == "no differences"
    assert SMALL in table(programs)


def test_an_audited_step_is_measured_where_there_are_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "small", SHAPES["Qwen2.5-0.5B"] | {"vocab_size": 1000})
    rows, sizes = 2 * jax.device_count(), ("batch.length=64", "capture.layers=[0]")
    case = Case("small", (f"topology=h100-{jax.device_count()}", f"batch.rows={rows}", *sizes), layers=1)
    measured = measure(case, num_steps=1)
    assert measured["tokens_per_s"] == pytest.approx(rows * 64 / measured["step_ms"] * 1e3)
    matrices = 896 * (2 * 14 * 64 + 2 * 2 * 64 + 3 * 4864)
    ratio = measured["flops_per_s"] * jax.device_count() / measured["tokens_per_s"] / (2 * matrices)
    assert 1 < ratio < 1.1  # and attention
    assert measured["attention"] == "attention xla"


def test_every_difference_is_shown() -> None:
    before = {"versions": {"libtpu": "1"}, "programs": {"a": {"bytes": 100, "loops": [1, 3], "of": {"x": 1}}}}
    assert compare(before, copy.deepcopy(before)) == "no differences"
    after = {"versions": {"libtpu": "2"}, "programs": {"a": {"bytes": 110, "loops": [2, 3], "of": {"y": 1}}, "b": {}}}
    assert compare(before, after).splitlines() == [
        'libtpu: "1" -> "2"',
        "a",
        "    bytes: 100 -> 110 (+10.0%)",
        "    loops: no longer 1",
        "    loops: now 2",
        "    of.x: 1 -> null",
        "    of.y: null -> 1",
        "b: new",
    ]
    assert compare(after, before | {"programs": {}}) == 'libtpu: "2" -> "1"'  # --cases selects
