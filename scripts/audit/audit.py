"""Audits the programs that the compiler makes for TPU slices and GPUs, without either, and compares them with recorded
ones.

    python -m scripts.audit.audit [--platform gpu|decode] [--cases NAME ...] [--write]

Compiles each case's step, or its prefill and decoding, in a separate process. Prints an analysis of the optimised
programs, and every difference from docs/audit-PLATFORM.json; `--write` writes that file. Needs libtpu (the extra `tpu`)
or JAX's CUDA plugin, or both for `decode`, and minutes on two cores. The programs' texts stay in build/audit.

Memory is reported by the compiler. The other figures are counted in the program's text, per device:

* `received`: bytes from other devices. `apart`: collectives with computation between start and end.
* `starts`: operations that a GPU starts, per layer.
* `moves`: copies and transposes of 8 MiB and more; on a GPU also slices of stacked weights.
* `f32` and `TxT`: the number of shapes of float32 arrays of 64 MiB and more, and of arrays [.., T, T].
* `HBM`: what instructions read and write, in bytes, and in ms at the chip's published rate.
* `ideal`: weights read once, rows in and outputs out; for decoding, weights and caches.
* `B/token`: of generation, bytes of the layers' caches for a token of a full row.
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
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pipeline.planning.slice.chips import CHIPS
from scripts.audit.analysis import analyse
from scripts.audit.cases import CASES

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "audit"
TABLES = {platform: ROOT / "docs" / f"audit-{platform}.json" for platform in CASES}
COMPILERS = {"tpu": {"libtpu"}, "gpu": {"jax-cuda12-pjrt"}, "decode": {"libtpu", "jax-cuda12-pjrt"}}
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
        f"{name}: {path.stem}": record(
            json.loads(path.read_text()), path.with_suffix(".txt").read_text(), path.stem == "decode"
        )
        for path in sorted(directory.glob("*.json"))
    }


_LEFT_OUT = {
    "tpu": {"length", "layers", "body", "launches", "overlapped", "squares"},
    "gpu": {"length", "body", "cycles", "unestimated", "remat"},
}


def record(facts: Record, text: str, is_decoding: bool) -> Record:
    """A program's record in docs/audit-*.json. Equal loops are one entry."""
    chip = CHIPS[facts["chip"]]
    analysis = analyse(text, chip.platform, facts["length"], is_decoding, facts.pop("block_loops"))
    loops = Counter(replace(loop, op_name=re.sub(r"\d+_to_\d+", "N", loop.op_name), body="") for loop in analysis.loops)
    counted = asdict(analysis) | {
        "loops": [{"op_name": loop.op_name, "number": number} | asdict(loop) for loop, number in loops.items()]
    }
    counted["hbm_ms"] = round(analysis.hbm_bytes * chip.devices_per_chip / chip.hbm_bytes_per_s * 1e3, 3)
    if chip.name in CLOCK_HZ:
        counted["estimated_ms"] = round(analysis.cycles / CLOCK_HZ[chip.name] * 1e3, 3)
    return _without(json.loads(json.dumps(facts | counted)), _LEFT_OUT[chip.platform])


def _without(value: Any, names: set[str]) -> Any:
    if isinstance(value, dict):
        return {key: _without(item, names) for key, item in value.items() if key not in names}
    return [_without(item, names) for item in value] if isinstance(value, list) else value


def table(programs: Records) -> str:
    """A line per program, with aligned columns. Those of TPUs and of GPUs differ."""
    rows = [row(name, program) for name, program in programs.items()]
    columns = tuple(dict.fromkeys(column for row in rows for column in row))
    lines = [columns, *(tuple(row.get(column, "") for column in columns) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) if column < 2 else cell.rjust(width) for column, (cell, width) in enumerate(row))
        for row in (list(zip(line, widths, strict=True)) for line in lines)
    )


def row(name: str, program: Record) -> dict[str, str]:
    """The figures of a program by column."""

    def total(what: str, key: str, scale: int = 1) -> str:
        parts = program[what].values() if isinstance(program[what], dict) else program[what]
        return f"{sum(part[key] for part in parts) / scale:,.0f}"

    memory = {"argum.": "argument", "output": "output", "temp.": "temporary", "peak GiB": "peak"}
    cells = {"program": name, "weights": f"{program['weights']}, {program['mesh']}"}
    cells |= {column: f"{program[f'{part}_bytes'] / GIB:.2f}" for column, part in memory.items()}
    cells["received MB"] = total("collectives", "received_bytes", MB)
    cells["loops"] = f"{sum(loop['number'] * loop['runs'] for loop in program['loops']):,.0f}"
    cells["moves MB"] = total("large_moves", "num_bytes", MB)
    if CHIPS[program["chip"]].platform == "gpu":
        cells["apart"] = f"{total('collectives', 'overlapped')} of {total('collectives', 'count')}"
        cells["starts"] = f"{program['launches'] / program['layers']:,.1f}"
        cells |= {"attention": program["attention"], "f32": str(len(program["large_float32"]))}
        cells["TxT"] = str(len(program["squares"]))
    else:
        cells |= {
            "remat": str(len(program["remat"])),
            "E ms": f"{program['estimated_ms']:,.2f}" if "estimated_ms" in program else "",
        }
    cells |= {"HBM MB": f"{program['hbm_bytes'] / MB:,.0f}", "ideal": f"{program['ideal_hbm_bytes'] / MB:,.0f}"}
    cells["HBM ms"] = f"{program['hbm_ms']:,.2f}"
    if program.get("token_cache_bytes"):
        cells["B/token"] = f"{program['token_cache_bytes']:,}"
    return cells


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
    parser.add_argument("--platform", choices=list(CASES), default="tpu")
    parser.add_argument("--cases", nargs="+", metavar="NAME", help="by default all of the platform")
    parser.add_argument("--write", action="store_true", help="write docs/audit-PLATFORM.json")
    options = parser.parse_args(arguments)
    cases, recorded = CASES[options.platform], TABLES[options.platform]
    if unknown := set(options.cases or ()) - set(cases):
        parser.error(f"unknown cases: {', '.join(sorted(unknown))}. There are:\n" + "\n".join(cases))
    programs: Record = {}
    for name in options.cases or cases:
        try:
            programs |= audit(name)
        except subprocess.CalledProcessError as error:
            sys.exit(f"{name} does not compile (exit code {error.returncode}). See the message above.")
    print(table(programs))
    before = json.loads(recorded.read_text()) if recorded.exists() else {"versions": {}, "programs": {}}
    installed = {package.name: package.version for package in importlib.metadata.distributions()}
    versions = {name: installed[name] for name in sorted({"jax"} | COMPILERS[options.platform]) if name in installed}
    print(f"\nDifferences from {recorded.relative_to(ROOT)}:")
    print(compare(before, {"versions": versions, "programs": programs}))
    if options.write:
        kept = {name: program for name, program in before["programs"].items() if name.split(": ")[0] in cases}
        recorded.write_text(json.dumps({"versions": versions, "programs": kept | programs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
