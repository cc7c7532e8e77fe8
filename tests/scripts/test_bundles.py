"""Bundles in libtpu's dumps: `>` marks the depth, `LB` begins a loop; empty bundles and branches have no marks."""

from pathlib import Path

import pytest

from scripts.audit.bundles import Bundles, count_bundles, program_bundles, read_dump

KEY = "= control target key start\nLB: loop body\n= control target key end\n\n"
FIRST = "     0   :  { %s1 = smov 0 }\n"
LAST = "   0x9   :  { %s7 = smov 0 }\n"


def loop(trips: int | str, depth: int = 1, inner: str = "") -> str:
    """A loop of four bundles and those of `inner`."""
    marks = ">" * depth
    return (
        f"   0x1 LB: {marks} {{ %s5 = sadd.s32 1, %s4 }}\n   0x2   :  {{}} /* End region 2 */\n{inner}"
        f"   0x3 PF: {marks} {{ %p1_p2 = scmp.ge.s32.totalorder %s3_s4, {trips} /* loop exit test */ }}\n"
        f"   0x6   :  {{ %9 = sbr.rel (!%p1_p2) target = $region4 }}\n"
    )


TEXTS = {
    "no loop": (FIRST + LAST, 2),
    "one loop": (FIRST + loop(18) + LAST, 1 + 18 * 4 + 1),
    "two loops": (FIRST + loop(18) + loop(5) + LAST, 1 + 18 * 4 + 5 * 4 + 1),
    "a loop in a loop": (FIRST + loop(7, inner=loop(3, depth=2)) + LAST, 1 + 7 * (4 + 3 * 4) + 1),
    "a loop at the end": (FIRST + loop(7, inner=loop(3, depth=2)), 1 + 7 * (4 + 3 * 4)),
    "a loop whose end is no constant": (FIRST + loop("%s8") + LAST, 1 + 4 + 1),
}


@pytest.mark.parametrize(("text", "bundles"), TEXTS.values(), ids=TEXTS.keys())
def test_bundles_are_counted_as_often_as_their_loops_run(text: str, bundles: int) -> None:
    assert count_bundles(KEY + text) == bundles


def dump(directory: Path, instruction: str, text: str) -> None:
    folder = directory / f"jit_step.{instruction}.deduplicated"
    folder.mkdir(parents=True)
    (folder / f"0001-{instruction}-final_bundles.txt").write_text(text)
    (folder / f"0000-{instruction}-schedule-analysis_final_bundles.txt").write_text(loop(99))


def test_deduplicated_instructions_are_counted(tmp_path: Path) -> None:
    """The audited program runs `layer` and `kernel.4` five times, and `turned` once."""
    text = Path(__file__).with_name("audited_program.txt").read_text()
    dump(tmp_path, "layer", FIRST + LAST)
    dump(tmp_path, "kernel.4", FIRST)
    (tmp_path / "jit_step" / "TLP").mkdir(parents=True)
    equal = "key:layer\nordinal:3\nequivalent_hlos[size=2]:\n  layer\n  turned\nkey:alone\nequivalent_hlos[size=0]:\n"
    (tmp_path / "jit_step" / "TLP" / "0000-TLP-deduplication-map.txt").write_text(equal)
    assert read_dump(tmp_path, "jit_step") == {"layer": 2, "turned": 2, "kernel.4": 1}
    assert program_bundles(text, tmp_path) == Bundles(program=5 * 2 + 2, kernels=5)
    with pytest.raises(FileNotFoundError, match="no final bundles of jit_other"):
        read_dump(tmp_path, "jit_other")
