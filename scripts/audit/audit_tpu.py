"""Audits the programs that the compiler makes for TPU slices, without a TPU, and compares them with those before.

    python -m scripts.audit.audit_tpu [--cases NAME ...] [--write]

Compiles the step of each case, or its prefill and decoding, in a process of its own. Prints what the optimised programs
do, and every difference from docs/audit-tpu.json; `--write` writes that file. Needs libtpu (the extra `tpu`) and 6
minutes of two cores. The programs' texts stay in build/audit.

Memory is the compiler's. The rest is counted in the program's text, per chip: `received` is what it gets from the
others; `HBM` what instructions read and write, in bytes and at the chip's published rate; `ideal` weights read once,
rows in and outputs out (of decoding, weights and caches). E is XLA's own estimate (`estimated_cycles`), which lacks
collectives and Pallas kernels (attention). B is the larger of HBM's time and of the bundles that a core issues
(`bundles.py`), one a cycle, without Pallas kernels too; it ignores stalls. None of these times is a measurement.
Figures of decoding are those of one step for all rows: one token of each.
"""

import argparse
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline.planning.slice.chips import CHIPS
from scripts.audit.analysis import Analysis, analyse
from scripts.audit.bundles import LLO_FLAGS, Bundles, program_bundles
from scripts.audit.cases import CASES

ROOT = Path(__file__).resolve().parents[2]
BUILD, TABLE = ROOT / "build" / "audit", ROOT / "docs" / "audit-tpu.json"
GIB, MB = 1 << 30, 1_000_000

# To read cycles as milliseconds. v5e: 197 TFLOP/s are four arrays of 128 x 128 at 1.5 GHz (docs.cloud.google.com/tpu,
# v5e). v6e is assumed: 918 TFLOP/s are 1.75 GHz at 2^19 operations per cycle, the power of two above the most that the
# compiler estimates for products of large matrices, 456,000; for v5e it estimates up to 127,000 of 2^17.
CLOCK_HZ = {"v5e": 1.5e9, "v6e": 1.75e9}

Record = dict[str, Any]
Records = Mapping[str, Record]


def audit(name: str, build: Path = BUILD) -> Records:
    """The programs of one case, by name. Raises CalledProcessError where it does not compile."""
    directory = build / re.sub(r"\W+", "_", name)
    shutil.rmtree(directory, ignore_errors=True)
    flags = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {LLO_FLAGS.format(directory / 'llo')}"
    command = [sys.executable, "-m", "scripts.audit.cases", name, str(directory)]
    subprocess.run(command, check=True, cwd=ROOT, env=os.environ | {"LIBTPU_INIT_ARGS": flags})
    programs = dict(records(name, directory))
    shutil.rmtree(directory / "llo")
    return programs


def records(name: str, directory: Path) -> Iterator[tuple[str, Record]]:
    """Of programs that `cases` has written to a directory, with what libtpu dumped in `llo`."""
    for path in sorted(directory.glob("*.json")):
        text = path.with_suffix(".txt").read_text()
        bundles = program_bundles(text, directory / "llo")
        yield f"{name}: {path.stem}", record(json.loads(path.read_text()), analyse(text), bundles)


def record(facts: Record, analysis: Analysis, bundles: Bundles) -> Record:
    """What the table has of one program, as JSON has it. Equal loops are one entry."""
    known = json.loads(json.dumps(asdict(analysis)))
    loops = Counter(
        (re.sub(r"\d+_to_\d+", "N", each.op_name), each.trips, each.runs, each.cycles) for each in analysis.loops
    )
    known["loops"] = [
        {"op_name": op_name, "number": number, "trips": trips, "runs": runs, "cycles": cycles}
        for (op_name, trips, runs, cycles), number in loops.items()
    ]
    clock_hz, hbm_ms = CLOCK_HZ[facts["chip"]], analysis.hbm_bytes / CHIPS[facts["chip"]].hbm_bytes_per_s * 1e3
    times = {
        "hbm_ms": round(hbm_ms, 3),
        "estimated_ms": round(analysis.cycles / clock_hz * 1e3, 3),
        "bundles": bundles.program,
        "kernel_bundles": bundles.kernels,
        "bound_ms": round(max(hbm_ms, bundles.program / clock_hz * 1e3), 3),
    }
    return facts | known | times


HEADER = (
    *("program", "weights", "argum.", "output", "temp.", "peak GiB", "received MB", "loops", "moves MB"),
    *("remat", "HBM MB", "ideal", "HBM ms", "E ms", "B ms"),
)


def table(programs: Records) -> str:
    """A line for each program, with aligned columns."""
    lines = [HEADER, *(_row(name, program) for name, program in programs.items())]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) if place < 2 else cell.rjust(width) for place, (cell, width) in enumerate(row))
        for row in (list(zip(line, widths, strict=True)) for line in lines)
    )


def _row(name: str, program: Record) -> tuple[str, ...]:
    received = sum(each["received_bytes"] for each in program["collectives"].values())
    moved = sum(each["num_bytes"] for each in program["large_moves"])
    loops = sum(each["number"] * each["runs"] for each in program["loops"])
    memory = ("argument_bytes", "output_bytes", "temporary_bytes", "peak_bytes")
    return (
        *(name, f"{program['weights']}, {program['mesh']}"),
        *(f"{program[key] / GIB:.2f}" for key in memory),
        *(f"{received / MB:,.1f}", f"{loops:,.0f}", f"{moved / MB:,.0f}", str(len(program["remat"]))),
        *(f"{program['hbm_bytes'] / MB:,.0f}", f"{program['ideal_hbm_bytes'] / MB:,.0f}"),
        *(f"{program['hbm_ms']:,.2f}", f"{program['estimated_ms']:,.2f}", f"{program['bound_ms']:,.2f}"),
    )


def details(programs: Records) -> Iterator[str]:
    """What is behind the table: collectives, kernels, loops, copies, large arrays."""
    for name, program in programs.items():
        yield name
        for kind, each in program["collectives"].items():
            yield f"    collectives: {each['count']:g} {kind}, {each['received_bytes'] / MB:,.1f} MB received"
        for kernel, count in program["kernels"].items():
            yield f"    kernel, not in E and B: {count:g} x {kernel}"
        if program["kernel_bundles"]:
            ms = program["kernel_bundles"] / CLOCK_HZ[program["chip"]] * 1e3
            yield f"    kernels: {ms:,.2f} ms of bundles at most, if they skipped no block"
        for loop in program["loops"]:
            ms = loop["cycles"] / CLOCK_HZ[program["chip"]] * 1e3
            yield f"    loops: {loop['number']} of {loop['trips']} x {ms:.3f} ms (E), {_place(loop)}"
        for move in program["large_moves"]:
            size = f"{move['count']:g} of {move['shape']}, {move['num_bytes'] / MB:,.0f} MB"
            yield f"    copies: {size}, {_place(move)}"
        for title, key in (("float32 in HBM", "large_float32"), ("computed again", "remat")):
            if program[key]:
                yield f"    {title}: {', '.join(program[key])}"


def _place(part: Record) -> str:
    """The end of the traced operation's name."""
    return "/".join(part["op_name"].split("/")[-4:]) or "inserted by the compiler"


def differences(before: Record, after: Record, path: str = "") -> Iterator[str]:
    """The values that differ between two records, with their change in per cent where they are numbers; of lists, the
    elements that only one has."""
    for key in dict.fromkeys([*before, *after]):
        old, new, place = before.get(key), after.get(key), f"{path}{key}"
        if isinstance(old, dict) and isinstance(new, dict):
            yield from differences(old, new, f"{place}.")
        elif isinstance(old, list) and isinstance(new, list):
            yield from (f"{place}: no longer {json.dumps(each)}" for each in old if each not in new)
            yield from (f"{place}: now {json.dumps(each)}" for each in new if each not in old)
        elif old != new:
            is_ratio = all(isinstance(each, int | float) for each in (old, new)) and old
            yield f"{place}: {_shown(old)} -> {_shown(new)}" + (f" ({new / old - 1:+.1%})" if is_ratio else "")


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int | float) else json.dumps(value)


def compare(before: Record, after: Record) -> str:
    """The differences of the programs that `after` has, and of the versions they were compiled with."""
    lines = list(differences(before["versions"], after["versions"]))
    for name, program in after["programs"].items():
        if name not in before["programs"]:
            lines.append(f"{name}: new")
            continue
        changed = list(differences(before["programs"][name], program))
        lines += [name, *(f"    {line}" for line in changed)] if changed else []
    return "\n".join(lines) or "no differences"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), metavar="NAME")
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.relative_to(ROOT)}")
    parser.add_argument("--list", action="store_true", help="only print the names of the cases")
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(CASES))
        return
    programs: Record = {}
    for name in options.cases:
        try:
            programs |= audit(name)
        except subprocess.CalledProcessError as error:
            sys.exit(f"{name} does not compile, for the reason above. Exit code {error.returncode}.")
    print(table(programs), *details(programs), sep="\n")
    before = json.loads(TABLE.read_text()) if TABLE.exists() else {"versions": {}, "programs": {}}
    versions = {name: importlib.metadata.version(name) for name in ("jax", "libtpu")}
    after = {"versions": versions, "programs": programs}
    print(f"\nDifferences from {TABLE.relative_to(ROOT)}:\n{compare(before, after)}")
    if options.write:
        kept = {name: program for name, program in before["programs"].items() if name.split(": ")[0] in CASES}
        TABLE.write_text(json.dumps({"versions": versions, "programs": kept | programs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
