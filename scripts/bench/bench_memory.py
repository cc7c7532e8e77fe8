"""A job's peak host memory against what its plan says; writes build/bench-memory.json.

The job of bench_host.py, whose step is faster than the writer, so that every buffer is in use, with one thing changed
at a time. Each in a process of its own, the second run of the process: "measured" is the peak of its resident memory,
less what was resident before. The plan does not count the step's own memory, or what the text takes.
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
MORE = 50  # MiB: text, the step's own memory, holes
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
    """Bytes that the plan says, and that the run took."""
    shutil.rmtree(BUILD / "store", ignore_errors=True)  # its blocks' shape would be this one's
    warm = open_broadcast_job(TOKENS // 4, *overrides)
    run_job(warm, broadcast_step(warm))  # libraries and the tokenizer are loaded then
    job = open_broadcast_job(TOKENS, *overrides)
    step = broadcast_step(job)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
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
