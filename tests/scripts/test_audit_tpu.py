"""The audit of compiled programs: counts in an HLO text, and a small program compiled by libtpu."""

import copy
import importlib.util
import json
from pathlib import Path

import pytest

from pipeline.planning.slice.compile_check import count_collectives
from scripts.audit.analysis import Collectives, Loop, Move, analyse, group_size
from scripts.audit.audit_tpu import audit, compare, details, table
from scripts.audit.cases import CASES
from scripts.audit.hlo import parse

# A loop over five layers: a slice of stacked weights, a gather that is fused with an addition, a kernel; then a copy.
PROGRAM = Path(__file__).with_name("audited_program.txt").read_text()
MATRIX = 4 * 2048 * 2048  # bytes, carried by the loop
WEIGHTS = 2 * 256 * 512  # bytes per layer


def test_an_hlo_text_is_counted() -> None:
    analysis = analyse(PROGRAM)
    assert not analysis.is_of_one_iteration
    assert analysis.cycles == 5 * (100 + 1000) + 10
    assert analysis.loops == (Loop("jit(step)/layers_0_to_4/while", trips=5, runs=1, cycles=1100),)
    assert analysis.collectives == {"all-gather": Collectives(5, 5 * WEIGHTS * 3 // 4)}  # in two fusions, but one chain
    assert analysis.large_moves == (Move("jit(step)/transpose", "f32[2048,2048]", 1, 2 * MATRIX),)
    assert analysis.large_float32 == ("f32[2048,2048]",)
    assert analysis.remat == ("fused.remat",)
    assert analysis.kernels == {"kernel": 5}
    gather, addition, kernel = WEIGHTS + WEIGHTS // 4, 2 * MATRIX, 2 * MATRIX
    scalars = 5 * 25
    assert analysis.hbm_bytes == 5 * (WEIGHTS + gather + addition + kernel) + 2 * MATRIX + scalars


def test_collectives_of_one_channel_are_counted_by_instruction() -> None:
    """All collectives inside `shard_map` have the same channel."""
    unchained = PROGRAM.replace(', frontend_attributes={chain_id="0"}', "")
    assert analyse(unchained).collectives["all-gather"].count == 10
    for text, count in ((PROGRAM, 1), (unchained, 2)):
        assert count_collectives(text) == {"all-gather": count}


def test_a_loop_of_unknown_length_is_counted_for_one_iteration() -> None:
    analysis = analyse(PROGRAM.replace("direction=LT", "direction=NE"))
    assert analysis.is_of_one_iteration
    assert (analysis.cycles, analysis.loops) == (1100, ())
    assert analysis.collectives == {"all-gather": Collectives(1, WEIGHTS * 3 // 4)}
    assert analysis.large_moves == ()


TRIPS = {
    "from 0 to 5": ("", "", 5),
    "from 3": ("%zero = s32[]{:T(128)} constant(0)", "%zero = s32[]{:T(128)} constant(3)", 2),
    "by 2": ("%one = s32[]{:T(128)} constant(1)", "%one = s32[]{:T(128)} constant(2)", 3),
    "none": ("%five = s32[]{:T(128)} constant(5)", "%five = s32[]{:T(128)} constant(0)", 0),
}


@pytest.mark.parametrize(("old", "new", "trips"), TRIPS.values(), ids=TRIPS.keys())
def test_trip_counts_are_derived_from_the_loop(old: str, new: str, trips: int) -> None:
    assert not old or old in PROGRAM
    assert [loop.trips for loop in analyse(PROGRAM.replace(old, new)).loops] == [trips]


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
    assert analyse(PROGRAM.replace(old, new)).is_of_one_iteration


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
    assert collectives == {kind: Collectives(5, 5 * RECEIVED[kind])}


def test_an_asynchronous_collective_has_its_operand_in_its_result() -> None:
    started = PROGRAM.replace(
        "= bf16[256,512]{1,0:T(8,128)(2,1)} all-gather(", "= (bf16[64,512], bf16[256,512]) all-gather-start("
    )
    assert started.count("all-gather-start(") == 2
    assert analyse(started).collectives == {"all-gather": Collectives(5, 5 * RECEIVED["all-gather"])}
    assert analyse(started).hbm_bytes == analyse(PROGRAM).hbm_bytes


@pytest.mark.parametrize(
    ("notation", "size"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", 4),
        ("replica_groups=[16,8]<=[128]", 8),
        ("replica_groups=mesh['axis_0'=64,'axis_1'=1] {'axis_0'}", 64),
        ("replica_groups=mesh['a'=8,'b'=4] {'a','b'}", 32),
        ("replica_groups=mesh['a'=64] {'a':(4)2}", 2),
        ("replica_groups=mesh['a'=4,'b'=1,'c'=16], device_ids=([16,4]T(1,0)) {'a'}", 4),
        ("source_target_pairs={{0,1},{1,0}}", 2),
    ],
)
def test_group_sizes_are_parsed(notation: str, size: int) -> None:
    assert group_size(f", channel_id=1, {notation}, dimensions={{0}}") == size


def test_unknown_notations_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown notation of a collective's groups"):
        group_size(", channel_id=1, replica_groups=some")
    with pytest.raises(ValueError, match="expected an HLO module"):
        parse("HloModule nothing")


@pytest.mark.parametrize(
    ("array", "num_bytes", "is_in_hbm"),
    [
        ("bf16[16,1024,14,64]{3,1,2,0:T(8,128)(2,1)}", 16 * 14 * 1024 * 128 * 2, True),  # 64 are padded to 128
        ("f32[3,5]{0,1:T(8,128)S(1)}", 4 * 8 * 128, False),
        ("pred[4]{0:T(512)(128)(4,1)}", 512, True),
        ("s4[256]{0}", 128, True),
        ("u32[]{:S(2)}", 4, False),
        ("token[]", 0, True),
    ],
)
def test_arrays_have_the_bytes_of_their_layout(array: str, num_bytes: int, is_in_hbm: bool) -> None:
    module = parse(f"ENTRY %main (a: x) -> y {{\n  ROOT %a = {array} parameter(0)\n}}\n")
    assert [(each.num_bytes, each.is_in_hbm) for each in module.entry.root.arrays] == [(num_bytes, is_in_hbm)]


def test_a_closing_brace_with_an_execution_thread_ends_a_computation() -> None:
    text = "ENTRY %main (a: x) -> y {\n  ROOT %a = s32[] parameter(0)\n}\n"
    module = parse(text.replace("ENTRY ", "").replace("}\n", '}, execution_thread="sparsecore"\n\n') + text)
    assert [*module.computations] == ["main"]
    assert (
        len(parse(text.replace("ENTRY %main", "%sum").replace("}\n", '}, execution_thread="x"\n') + text).computations)
        == 2
    )


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


SMALL = "0.5B, 2 layers, fsdp, 2x512 v5e-4"


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu (the extra `tpu`)")
def test_a_compiled_program_agrees_with_arithmetic(tmp_path: Path) -> None:
    """Two layers of Qwen2.5-0.5B, divided over four chips: each receives three quarters of the matrices."""
    programs = audit(SMALL, tmp_path)
    assert list(programs) == [f"{SMALL}: step"]
    program = programs[f"{SMALL}: step"]
    width, heads, kv_heads, head_dim, neurons, tokens = 896, 14, 2, 64, 4864, 2 * 512
    matrices = 2 * 2 * width * (2 * heads * head_dim + 2 * kv_heads * head_dim + 3 * neurons)
    received = sum(each["received_bytes"] for each in program["collectives"].values())
    assert received == pytest.approx(matrices * 3 / 4, rel=0.1)
    assert [loop["trips"] for loop in program["loops"]] == [2]
    assert sum(program["kernels"].values()) == 2  # attention
    assert program["ideal_hbm_bytes"] == pytest.approx(matrices + tokens * (2 * width + 12), rel=0.01)
    assert program["hbm_bytes"] > program["ideal_hbm_bytes"]
    # The products alone, at the chip's peak.
    assert program["estimated_ms"] > matrices * tokens / 197e12 * 1e3
    assert program["bundles"] == pytest.approx(program["cycles"], rel=0.5)
    assert program["kernel_bundles"] > 0
    assert program["bound_ms"] > program["hbm_ms"]
    stored = {"versions": {}, "programs": json.loads(json.dumps(programs))}
    assert compare(stored, {"versions": {}, "programs": programs}) == "no differences"
    assert SMALL in table(programs)
    assert "all-gather" in "\n".join(details(programs))


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


def test_cases_have_names_that_fit_a_table() -> None:
    assert all(len(name) <= 40 and ": " not in name for name in CASES)
