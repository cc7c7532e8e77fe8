"""Audits the programs that the compiler makes for TPU slices, without a TPU, and compares them with recorded ones.

    python -m scripts.audit.audit_tpu [--cases NAME ...] [--write]

Compiles each case's step, or its prefill and decoding, in a separate process. Prints an analysis of the optimised
programs, and every difference from docs/audit-tpu.json; `--write` writes that file. Needs libtpu (the extra `tpu`) and
6 minutes on two cores. The programs' texts stay in build/audit.

Memory is reported by the compiler. The other figures are counted in the program's text, per chip:

* `received`: bytes from other chips.
* `HBM`: what instructions read and write, in bytes, and in ms at the chip's published rate.
* `ideal`: weights read once, rows in and outputs out; for decoding, weights and caches.
* E: XLA's estimate (`estimated_cycles`), without collectives and Pallas kernels (attention).

None of these times is a measurement. Figures of decoding are for one step of all rows, which makes a token per row.
"""

import argparse
import importlib.metadata
import json
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
from scripts.audit.cases import CASES

ROOT = Path(__file__).resolve().parents[2]
BUILD, TABLE = ROOT / "build" / "audit", ROOT / "docs" / "audit-tpu.json"
GIB, MB = 1 << 30, 1_000_000

# To convert cycles to milliseconds. v5e: 197 TFLOP/s are four arrays of 128 x 128 at 1.5 GHz
# (docs.cloud.google.com/tpu, v5e). v6e is assumed: 918 TFLOP/s are 1.75 GHz at 2^19 operations per cycle. The compiler
# estimates up to 456,000 operations per cycle for products of large matrices, just below 2^19; for v5e, up to 127,000,
# just below 2^17.
CLOCK_HZ = {"v5e": 1.5e9, "v6e": 1.75e9}

Record = dict[str, Any]
Records = Mapping[str, Record]


def audit(name: str, build: Path = BUILD) -> Records:
    """The programs of one case, by name. Raises CalledProcessError if it does not compile."""
    directory = build / re.sub(r"\W+", "_", name)
    shutil.rmtree(directory, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "scripts.audit.cases", name, str(directory)], check=True, cwd=ROOT)
    return {
        f"{name}: {path.stem}": record(json.loads(path.read_text()), analyse(path.with_suffix(".txt").read_text()))
        for path in sorted(directory.glob("*.json"))
    }


def record(facts: Record, analysis: Analysis) -> Record:
    """A program's record in docs/audit-tpu.json. Equal loops are one entry."""
    counted = json.loads(json.dumps(asdict(analysis)))
    loops = Counter(
        (re.sub(r"\d+_to_\d+", "N", loop.op_name), loop.trips, loop.runs, loop.cycles) for loop in analysis.loops
    )
    counted["loops"] = [
        {"op_name": op_name, "number": number, "trips": trips, "runs": runs, "cycles": cycles}
        for (op_name, trips, runs, cycles), number in loops.items()
    ]
    times = {
        "hbm_ms": round(analysis.hbm_bytes / CHIPS[facts["chip"]].hbm_bytes_per_s * 1e3, 3),
        "estimated_ms": round(analysis.cycles / CLOCK_HZ[facts["chip"]] * 1e3, 3),
    }
    return facts | counted | times


HEADER = (
    *("program", "weights", "argum.", "output", "temp.", "peak GiB", "received MB", "loops", "moves MB"),
    *("remat", "HBM MB", "ideal", "HBM ms", "E ms"),
)


def table(programs: Records) -> str:
    """A line per program, with aligned columns."""
    lines = [HEADER, *(_row(name, program) for name, program in programs.items())]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) if column < 2 else cell.rjust(width) for column, (cell, width) in enumerate(row))
        for row in (list(zip(line, widths, strict=True)) for line in lines)
    )


def _row(name: str, program: Record) -> tuple[str, ...]:
    received = sum(collectives["received_bytes"] for collectives in program["collectives"].values())
    moved = sum(move["num_bytes"] for move in program["large_moves"])
    loops = sum(loop["number"] * loop["runs"] for loop in program["loops"])
    memory = ("argument_bytes", "output_bytes", "temporary_bytes", "peak_bytes")
    return (
        *(name, f"{program['weights']}, {program['mesh']}"),
        *(f"{program[key] / GIB:.2f}" for key in memory),
        *(f"{received / MB:,.1f}", f"{loops:,.0f}", f"{moved / MB:,.0f}", str(len(program["remat"]))),
        *(f"{program['hbm_bytes'] / MB:,.0f}", f"{program['ideal_hbm_bytes'] / MB:,.0f}"),
        *(f"{program['hbm_ms']:,.2f}", f"{program['estimated_ms']:,.2f}"),
    )


def differences(before: Record, after: Record, path: str = "") -> Iterator[str]:
    """The differences between two records: changed values, with the change of numbers in per cent, and the elements
    that only one of two lists has."""
    for key in dict.fromkeys([*before, *after]):
        old, new, name = before.get(key), after.get(key), f"{path}{key}"
        if isinstance(old, dict) and isinstance(new, dict):
            yield from differences(old, new, f"{name}.")
        elif isinstance(old, list) and isinstance(new, list):
            yield from (f"{name}: no longer {json.dumps(item)}" for item in old if item not in new)
            yield from (f"{name}: now {json.dumps(item)}" for item in new if item not in old)
        elif old != new:
            is_ratio = all(isinstance(value, int | float) for value in (old, new)) and old
            yield f"{name}: {_shown(old)} -> {_shown(new)}" + (f" ({new / old - 1:+.1%})" if is_ratio else "")


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int | float) else json.dumps(value)


def compare(before: Record, after: Record) -> str:
    """The differences in the programs of `after`, and in the versions that they were compiled with."""
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
            sys.exit(f"{name} does not compile (exit code {error.returncode}). See the message above.")
    print(table(programs))
    before = json.loads(TABLE.read_text()) if TABLE.exists() else {"versions": {}, "programs": {}}
    versions = {name: importlib.metadata.version(name) for name in ("jax", "libtpu")}
    after = {"versions": versions, "programs": programs}
    print(f"\nDifferences from {TABLE.relative_to(ROOT)}:\n{compare(before, after)}")
    if options.write:
        kept = {name: program for name, program in before["programs"].items() if name.split(": ")[0] in CASES}
        TABLE.write_text(json.dumps({"versions": versions, "programs": kept | programs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
