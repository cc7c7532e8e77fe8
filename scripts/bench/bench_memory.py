"""Compares a job's peak host memory with its plan. Writes build/bench-memory.json.

Runs the job of bench_host.py, whose step is faster than the writer, so that every buffer is in use, with one setting
changed at a time. Each case has a separate process, and its second run there is measured: "measured" is the peak of
resident memory minus the memory that was resident before. The plan excludes the memory of the step itself and of the
text.
"""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

from bench_host import BUILD, broadcast_step, open_broadcast_job, prepare, run_job

from pipeline.store.format.layout import MIB

TOKENS = 200_000
MORE = 50  # MiB: text, the step's own memory, fragmentation
CASES: dict[str, list[str]] = {
    "as it is": [],
    "a quarter of the tokens": [f"run.max_tokens={TOKENS // 4}"],
    "twice the tokens": [f"run.max_tokens={TOKENS * 2}"],
    "twice the rows": ["batch.rows=16"],
    "one layer": ["capture.layers=[11]"],
    "six layers": ["capture.layers=[3,7,11,15,19,23]"],
    "blocks of a quarter": ["store.shard_mib=8"],
    "blocks twice as large": ["store.shard_mib=64"],
}


def measure(overrides: list[str]) -> tuple[int, int]:
    """The planned and the measured bytes."""
    shutil.rmtree(BUILD / "store", ignore_errors=True)  # its block shape would be used again
    warm = open_broadcast_job(TOKENS // 4, *overrides)
    run_job(warm, broadcast_step(warm))  # loads libraries and the tokenizer
    job = open_broadcast_job(TOKENS, *overrides)
    step = broadcast_step(job)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = resident("VmRSS")
    run_job(job, step)
    return job.plan.memory.host_bytes, resident("VmHWM") - before


def resident(what: str) -> int:
    return int(Path("/proc/self/status").read_text().partition(f"{what}:")[2].split()[0]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        return print(*measure(CASES[options.case]))
    prepare()
    result = {}
    print(f"| | plan, MiB | measured, MiB | measured / (plan + {MORE}) |\n|---|---|---|---|")
    for case in CASES:
        command = [sys.executable, __file__, "--case", case]
        printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        planned, measured = map(int, printed.splitlines()[-1].split())
        result[case] = {"planned": planned, "measured": measured}
        print(
            f"| {case} | {planned / MIB:.0f} | {measured / MIB:.0f} | {measured / (planned + MORE * MIB):.2f} |",
            flush=True,
        )
    Path("build/bench-memory.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
