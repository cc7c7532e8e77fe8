"""Runs one extractor in a separate process: python -m scripts.bench.peers.worker MODULE WORKLOAD.

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

from scripts.bench.peers.workload import WORKLOADS


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # so that output of libraries is not taken for an answer
    name, workload = sys.argv[1], WORKLOADS[sys.argv[2]]
    extractor = importlib.import_module(f"scripts.bench.peers.{name}").Extractor(workload)

    def measure(out: Path) -> dict[str, float]:
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        began = time.perf_counter()
        tokens = extractor.run(out)
        peak_kib = Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]
        return {"tokens_per_s": tokens / (time.perf_counter() - began), "peak_mib": int(peak_kib) // 1024}

    first = Path(f"{workload.directory}-{name}")
    print(json.dumps(measure(first)), file=answers)
    for line in sys.stdin:
        print(json.dumps(measure(Path(line.strip()))), file=answers)
    for layer, values in zip(workload.layers, extractor.stored(first), strict=True):  # last, since it takes memory
        np.save(first / f"compare-{layer}.npy", values)


if __name__ == "__main__":
    main()
