"""Compares this project with other ways to get the same activations from the same checkpoint, text, rows and layers.

    make bench-peers                     # everything; about 30 minutes on two free cores
    python -m scripts.bench.bench_peers --workloads W1 --peers ours,hf_hook --repetitions 3

W1: GPT-2's shape, long documents, rows of 256, block 5. W2: the same, all 12 blocks. W3: documents of 20 to 250 tokens,
block 5. W4: Qwen2.5-0.5B's shape, rows of 1024, layer 15 of 24. All float32. Each tool has a separate process, which
loads and compiles, runs once unmeasured, and then takes turns with the others; runs go from the text to files. Peak
memory is the process's peak over all its runs. Prints a table, and writes build/bench-peers.json.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import NoReturn

import numpy as np

from scripts.bench.peers.workload import BUILD, WORKLOADS, Workload
from scripts.demo.make_demo_text import documents, write_shards

PEERS_PYTHON = Path(".venv-peers/bin/python")
REFERENCE = "hf_hook"
PEERS = {  # module -> name
    "ours": "this project",
    REFERENCE: "HF hook, stops after the layer",
    "transformer_lens_cache": "TransformerLens",
    "saelens_cache": "SAELens",
    "nnsight_trace": "nnsight",
}


class Worker:
    """A process of peers/worker.py, ready for measured runs."""

    def __init__(self, peer: str, workload: Workload) -> None:
        self.peer, self.workload, self.runs = peer, workload, []
        python = sys.executable if peer == "ours" else str(PEERS_PYTHON)
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": "."}
        self._log = BUILD / f"{workload.name}-{peer}.log"
        command = [python, "-m", "scripts.bench.peers.worker", peer, workload.name]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with self._log.open("w") as log:
            self.process = subprocess.Popen(command, env=environment, stderr=log, **pipes)
        self._answer()

    def run(self) -> None:
        """Measures a run."""
        os.sync()  # otherwise, a run that syncs its files would also wait for those of others
        time.sleep(1)  # OpenMP's threads spin for a while after a run, also of another process
        self.process.stdin.write(f"{BUILD / 'out'}\n")
        self.process.stdin.flush()
        self.runs.append(self._answer())
        print(f"{self.workload.name} {self.peer:22} {self.runs[-1]['tokens_per_s']:8.1f} tokens/s", flush=True)

    def close(self) -> None:
        """Waits until the process has written its files for comparison."""
        self.process.stdin.close()
        if self.process.wait():
            self._fail()

    def _answer(self) -> dict:
        line = self.process.stdout.readline()
        return json.loads(line) if line else self._fail()

    def _fail(self) -> NoReturn:
        sys.exit(f"{self.peer} on {self.workload.name} has failed; see {self._log}")

    def summary(self) -> dict:
        median = statistics.median(run["tokens_per_s"] for run in self.runs)
        result = {"tokens_per_s": median, "peak_mib": self.runs[-1]["peak_mib"], "runs": self.runs}
        return result | {"difference": difference(self.workload, self.peer)}


def difference(workload: Workload, peer: str) -> float | None:
    """The largest absolute difference from the HF hook's values; None if rows differ or there is no reference."""
    largest = 0.0
    for layer in workload.layers:
        files = [Path(f"{workload.directory}-{name}") / f"compare-{layer}.npy" for name in (peer, REFERENCE)]
        if not all(file.exists() for file in files):
            return None
        ours, theirs = (np.load(file, mmap_mode="r") for file in files)
        if ours.shape != theirs.shape:
            return None
        largest = max(largest, float(np.abs(ours - theirs).max()))
    return largest


def measure(workload: Workload, peers: Sequence[str], repetitions: int) -> dict[str, dict]:
    """Results by peer. The order of the runs is reversed in every second repetition. SAELens captures one layer."""
    taking_part = [peer for peer in peers if peer != "saelens_cache" or len(workload.layers) == 1]
    workers = [Worker(peer, workload) for peer in taking_part]
    try:
        for repetition in range(repetitions):
            for worker in workers if repetition % 2 == 0 else reversed(workers):
                worker.run()
        for worker in workers:
            worker.close()
    finally:
        for worker in workers:
            worker.process.kill()
    return {worker.peer: worker.summary() for worker in workers}


def prepare(workloads: Sequence[str]) -> None:
    """Checkpoints and texts."""
    shutil.rmtree(BUILD / "text", ignore_errors=True)
    write_shards(documents(), BUILD / "demo-text")
    command = [str(PEERS_PYTHON), "-m", "scripts.bench.peers.prepare", str(BUILD / "demo-text")]
    subprocess.run([*command, "pipeline/assets/tiny-qwen2", *workloads], check=True)


def machine() -> str:
    """The machine and the versions used."""
    command = [str(PEERS_PYTHON), "-m", "pip", "list", "--format=json", "--disable-pip-version-check"]
    theirs = {item["name"].lower(): item["version"] for item in json.loads(subprocess.check_output(command))}
    names = ("torch", "transformers", "transformer-lens", "sae-lens", "nnsight")
    versions = [f"Python {platform.python_version()}", f"jax {metadata.version('jax')}"]
    versions += [f"{name} {theirs[name]}" for name in names if name in theirs]
    processor = Path("/proc/cpuinfo").read_text().partition("model name\t: ")[2].partition("\n")[0]
    return f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores of {processor}, {', '.join(versions)}"


def table(measured: dict[str, dict[str, dict]], peers: Sequence[str]) -> Iterator[str]:
    """A line per tool. The ratio is the median over the repetitions, whose runs are close in time."""
    yield f"| tokens/s (peak, MiB; difference from the HF hook; ours / theirs) | {' | '.join(measured)} |"
    yield "|---" * (1 + len(measured)) + "|"
    for peer in peers:
        yield f"| {' | '.join([PEERS[peer], *(cell(results, peer) for results in measured.values())])} |"


def cell(results: dict[str, dict], peer: str) -> str:
    if peer not in results:
        return ""
    result = results[peer]
    difference = "other rows" if result["difference"] is None else f"{result['difference']:.1e}"
    parts = [str(result["peak_mib"]), difference]
    if "ours" in results and peer != "ours":
        pairs = zip(results["ours"]["runs"], result["runs"], strict=True)
        parts.append(f"{statistics.median(ours['tokens_per_s'] / run['tokens_per_s'] for ours, run in pairs):.2f}")
    return f"{result['tokens_per_s']:.0f} ({'; '.join(parts)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    workloads, peers = options.workloads.split(","), options.peers.split(",")
    if unknown := (set(workloads) - set(WORKLOADS)) | (set(peers) - set(PEERS)):
        parser.error(f"unknown: {', '.join(sorted(unknown))}. There are {', '.join((*WORKLOADS, *PEERS))}.")
    prepare(workloads)
    measured = {name: measure(WORKLOADS[name], peers, options.repetitions) for name in workloads}
    result = {"machine": machine(), "workloads": measured}
    BUILD.with_name("bench-peers.json").write_text(json.dumps(result, indent=1) + "\n")
    print(result["machine"], *table(measured, peers), sep="\n")


if __name__ == "__main__":
    main()
