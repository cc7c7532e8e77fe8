"""Runs one extractor in a separate process: python scripts/bench/peers/worker.py MODULE WORKLOAD.

Loads the model, and runs once unmeasured, with a line of JSON as output. Then each line of the standard input, the name
of a directory to create, starts a measured run, which also outputs a line of JSON. At the end, writes the first run's
activations to files for comparison.
"""

import importlib
import json
import os
import shutil
import sys
import time
from pathlib import Path

import numpy as np
from workload import WORKLOADS


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # so that output of libraries is not taken for an answer
    name, workload = sys.argv[1], WORKLOADS[sys.argv[2]]
    extractor = importlib.import_module(name).Extractor(workload)

    def measure(out: Path) -> dict[str, float]:
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        began, cpu_began = time.perf_counter(), time.process_time()
        tokens = extractor.run(out)
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
        num_bytes = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
        return {"tokens": tokens, "seconds": seconds, "cpu_s": cpu_s, "bytes": num_bytes, "peak_mib": peak_mib()}

    first = Path(f"{workload.directory}-{name}")
    print(json.dumps(measure(first) | {"isolates": extractor.isolates}), file=answers)
    for line in sys.stdin:
        print(json.dumps(measure(Path(line.strip()))), file=answers)
    for layer, values in zip(workload.layers, extractor.stored(first), strict=True):  # last, since it takes memory
        np.save(first / f"compare-{layer}.npy", values)


def peak_mib() -> int:
    """The process's peak resident memory so far."""
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) // 1024


if __name__ == "__main__":
    main()
