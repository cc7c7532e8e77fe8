"""Counts the bundles of a program from libtpu's dump. A bundle is a long instruction word; a core issues one per cycle.

libtpu writes a file of final bundles for each instruction of the optimised program, and marks loops and their exit
tests. Bundles in a loop count as often as it runs; a loop without a constant exit counts once. Every branch counts as
taken, so the count is an upper bound for Pallas kernels, which skip masked blocks by branches, and for waits for
collectives. Stalls do not count, not even those of products that wait for the matrix units, so large products seem to
take a few per cent less than at the chip's peak. This is an estimate, not a measurement.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from scripts.audit.analysis import executions, is_kernel
from scripts.audit.hlo import parse

LLO_FLAGS = (
    "--xla_jf_dump_to={} --xla_jf_dump_llo_text=true --xla_jf_dump_use_subdirectories=true "
    "--xla_jf_dump_llo_pass_label_regex=^(final_bundles|deduplication-map)$"
)
"""For LIBTPU_INIT_ARGS, to be formatted with a folder. Writes 16 MB for two layers; all stages would be 562 MB."""

_BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+([A-Z]{2})?\s*:\s+((?:> ?)*)(\{.*)")
_UNMARKED = re.compile(r"\{\}|\{ %\S+ = sbr\.rel [^;]*$")  # empty or only a branch: without their loop's marks
_EXIT = re.compile(r"scmp\.ge\.\S+ %\S+, (\d+) /\* loop exit test")


@dataclass
class _Loop:
    depth: int
    trips: int = 1
    bundles: int = 0  # per iteration, including inner loops


def count_bundles(text: str) -> int:
    """The number of bundles that one instruction issues, over all iterations of its loops. `text` are its final
    bundles."""
    stack = [_Loop(depth=0)]

    def leave() -> None:
        inner = stack.pop()
        stack[-1].bundles += inner.trips * inner.bundles

    for line in text.splitlines():
        match = _BUNDLE.match(line)
        if match is None:
            continue
        is_first = match[1] == "LB"
        depth = stack[-1].depth if _UNMARKED.match(match[3]) else match[2].count(">")
        while stack[-1].depth > depth or (is_first and stack[-1].depth == depth):
            leave()
        if is_first:
            stack.append(_Loop(depth))
        stack[-1].bundles += 1
        if (test := _EXIT.search(line)) and len(stack) > 1:
            stack[-1].trips = int(test[1])
    while len(stack) > 1:
        leave()
    return stack[0].bundles


@dataclass(frozen=True)
class Bundles:
    """The bundles of a program, or of one iteration of its decoding loop, without the few between instructions."""

    program: int
    kernels: int  # Pallas kernels, upper bound


def program_bundles(text: str, directory: Path) -> Bundles:
    """Counts a program's bundles, from its optimised HLO and the folder into which libtpu dumped when compiling it.

    Raises FileNotFoundError if the folder has no bundles of this program.
    """
    module = parse(text)
    dumped = read_dump(directory, re.match(r"HloModule ([^\s,]+)", text)[1])
    totals: Counter[bool] = Counter()
    for name, count in executions(module)[0].items():
        for instruction in module.computations[name].instructions.values():
            totals[is_kernel(instruction)] += count * dumped.get(instruction.name, 0)
    return Bundles(round(totals[False]), round(totals[True]))


def read_dump(directory: Path, module: str) -> Mapping[str, int]:
    """The bundles of a module's instructions, by name. Equal instructions share a file. Raises FileNotFoundError."""
    bundles: dict[str, int] = {}
    for folder in directory.glob(f"{module}.*.deduplicated"):
        for path in folder.glob("*-final_bundles.txt"):
            if "schedule-analysis" not in path.name:
                name = folder.name.removeprefix(f"{module}.").removesuffix(".deduplicated")
                bundles[name] = count_bundles(path.read_text())
    if not bundles:
        raise FileNotFoundError(f"{directory} has no final bundles of {module}. Set LIBTPU_INIT_ARGS to LLO_FLAGS.")
    for path in directory.glob(f"{module}/**/*deduplication-map.txt"):
        for key, equal in _equal_instructions(path.read_text()):
            bundles |= {name: bundles[key] for name in equal if key in bundles}
    return bundles


def _equal_instructions(text: str) -> Iterator[tuple[str, list[str]]]:
    for entry in text.split("key:")[1:]:
        key, *lines = entry.splitlines()
        yield key, [line.strip() for line in lines if line.startswith("  ")]
