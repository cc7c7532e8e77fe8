"""Measures the seconds from the command to the first committed block, by part. Writes build/bench-startup.json.

    python scripts/bench/bench_startup.py [--repetitions 3] [overrides of pipeline.run ...]

Every run is a separate process that writes a new store, with the bundled model and the demo's text unless overrides
differ: without a compilation cache, with an empty one, and with the same cache again. "import" begins with the process;
"data and model" opens the inputs and plans; the other parts are the weights, the step's compilation, and everything
until the first block is committed.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

BUILD = Path("build/bench-startup")
PARTS = ("import", "data and model", "weights", "compilation", "first block")
# `pipeline.run`, which records the time at the end of each part.
PROGRAM = """
import json, sys, time
marks = [float(sys.argv[1])]
from pipeline.extraction import job_run
from pipeline.config import composing
from pipeline.store.write.store_writer import StoreWriter
marks.append(time.time())

def mark(function, before=False):
    def marked(*args, **kwargs):
        if before: marks.append(time.time())
        result = function(*args, **kwargs)
        marks.append(time.time())
        return result
    return marked

job_run.open_job = mark(job_run.open_job)
job_run.compile_step = mark(job_run.compile_step, before=True)
StoreWriter.commit = mark(StoreWriter.commit)
job_run.run(composing.compose(sys.argv[2:]))
print(json.dumps([b - a for a, b in zip(marks[:5], marks[1:6])]))
"""


def parts_of_a_run(overrides: list[str]) -> list[float]:
    """Seconds of each of PARTS."""
    shutil.rmtree(BUILD / "store", ignore_errors=True)
    arguments = [str(time.time()), f"store.path={BUILD / 'store'}", "run.progress=false", *overrides]
    done = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    shutil.rmtree(BUILD, ignore_errors=True)
    subprocess.run([sys.executable, "scripts/demo/make_demo_text.py", "--out", str(BUILD / "text")], check=True)
    overrides = [f"data.path={BUILD / 'text'}", "run.max_tokens=20000", *options.overrides]
    measured: dict[str, list[list[float]]] = {"no cache": [], "empty cache": [], "filled cache": []}
    for _ in range(options.repetitions):
        cache = BUILD / "cache"
        shutil.rmtree(cache, ignore_errors=True)
        measured["no cache"].append(parts_of_a_run(overrides))
        for name in ("empty cache", "filled cache"):
            measured[name].append(parts_of_a_run([*overrides, f"run.compilation_cache={cache}"]))
    medians = {name: [statistics.median(part) for part in zip(*runs, strict=True)] for name, runs in measured.items()}
    print(f"| seconds | {' | '.join(PARTS)} | all |\n|---|{'---|' * (len(PARTS) + 1)}")
    for name, parts in medians.items():
        print(f"| {name} | {' | '.join(f'{part:.2f}' for part in parts)} | {sum(parts):.2f} |")
    Path("build/bench-startup.json").write_text(json.dumps({"parts": PARTS, "runs": measured}, indent=1) + "\n")


if __name__ == "__main__":
    main()
