"""Compares this project with other ways to get the same activations from the same checkpoint, text, rows and layers.

    make bench-peers                     # everything; about 30 minutes on two free cores
    python scripts/bench/bench_peers.py --workloads W1 --peers ours,hf_hook --repetitions 3

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
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import NoReturn

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "peers"))
from workload import BUILD, WORKLOADS, Workload  # noqa: E402

PEERS_PYTHON = Path(".venv-peers/bin/python")
REFERENCE = "hf_hook"
PEERS = {  # module -> name
    "ours": "this project",
    REFERENCE: "HF hook, stops",
    "transformer_lens_cache": "TransformerLens",
    "saelens_cache": "SAELens",
    "nnsight_trace": "nnsight",
}
RESULT = Path("build/bench-peers.json")


def takes_part(peer: str, workload: Workload) -> bool:
    """SAELens captures one layer per run."""
    return peer != "saelens_cache" or len(workload.layers) == 1


@dataclass
class Worker:
    """A process of peers/worker.py, ready for measured runs."""

    peer: str
    workload: Workload
    facts: dict = field(init=False)
    runs: list[dict] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        python = sys.executable if self.peer == "ours" else str(PEERS_PYTHON)
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": "."}
        self._log = BUILD / f"{self.workload.name}-{self.peer}.log"
        command = [python, str(HERE / "peers" / "worker.py"), self.peer, self.workload.name]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        self.facts = self._answer()

    def run(self) -> None:
        """Measures a run."""
        os.sync()  # otherwise, a run that syncs its files would also wait for those of others
        time.sleep(1)  # OpenMP's threads spin for a while after a run, also of another process
        self._process.stdin.write(f"{BUILD / 'out'}\n")
        self._process.stdin.flush()
        self.runs.append(self._answer())

    def close(self) -> None:
        """Waits until the process has written its files for comparison."""
        self._process.stdin.close()
        if self._process.wait():
            self._fail()

    def kill(self) -> None:
        self._process.kill()

    def _answer(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            self._fail()
        return json.loads(line)

    def _fail(self) -> NoReturn:
        sys.exit(f"{self.peer} on {self.workload.name} has failed; see {self._log}")

    def summary(self) -> dict:
        rates = [run["tokens"] / run["seconds"] for run in self.runs]
        return {
            "tokens_per_s": statistics.median(rates),
            "tokens_per_s_all": rates,
            "cpu_s_per_1000_tokens": statistics.median(run["cpu_s"] / run["tokens"] * 1000 for run in self.runs),
            "tokens": self.runs[-1]["tokens"],
            "peak_mib": self.runs[-1]["peak_mib"],
            "bytes_per_token": self.runs[-1]["bytes"] / self.runs[-1]["tokens"],
            "isolates": self.facts["isolates"],
            "difference": difference(self.workload, self.peer),
        }


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
    """Results by peer. The order of the runs is reversed in every second repetition."""
    workers = [Worker(peer, workload) for peer in peers if takes_part(peer, workload)]
    try:
        for repetition in range(repetitions):
            for worker in workers if repetition % 2 == 0 else reversed(workers):
                worker.run()
                rate = worker.runs[-1]["tokens"] / worker.runs[-1]["seconds"]
                print(f"{workload.name} {worker.peer:22} {rate:8.1f} tokens/s", flush=True)
        for worker in workers:
            worker.close()
    finally:
        for worker in workers:
            worker.kill()
    return {worker.peer: worker.summary() for worker in workers}


def prepare(workloads: Sequence[str]) -> None:
    """Checkpoints and texts."""
    shutil.rmtree(BUILD / "text", ignore_errors=True)
    text = BUILD / "demo-text"
    subprocess.run([sys.executable, "scripts/demo/make_demo_text.py", "--out", str(text)], check=True)
    command = [str(PEERS_PYTHON), str(HERE / "peers" / "prepare.py"), str(text), "pipeline/assets/tiny-qwen2"]
    subprocess.run([*command, *workloads], check=True)


def machine() -> dict[str, object]:
    """The machine and the versions used."""
    command = [str(PEERS_PYTHON), "-m", "pip", "list", "--format=json", "--disable-pip-version-check"]
    theirs = {item["name"].lower(): item["version"] for item in json.loads(subprocess.check_output(command))}
    names = ("torch", "transformers", "transformer-lens", "sae-lens", "nnsight")
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpus = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "processor": cpus[0] if cpus else platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {"jax": metadata.version("jax")} | {name: theirs[name] for name in names},
    }


def table(measured: dict[str, dict[str, dict]]) -> Iterator[str]:
    """A line per workload and tool. The ratio is the median over the repetitions, whose runs are close in time."""
    yield "| | tool | tokens/s | all runs | ours / theirs | CPU s per 1000 tokens | peak, MiB | isolated | difference |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for name, peers in measured.items():
        for peer, result in peers.items():
            rates, ratio = result["tokens_per_s_all"], ""
            if "ours" in peers and peer != "ours":
                pairs = zip(peers["ours"]["tokens_per_s_all"], rates, strict=True)
                ratio = f"{statistics.median(ours / theirs for ours, theirs in pairs):.2f}"
            runs = ", ".join(f"{rate:.0f}" for rate in sorted(rates))
            columns = [name, PEERS[peer], f"{result['tokens_per_s']:.0f}", runs, ratio]
            columns += [f"{result['cpu_s_per_1000_tokens']:.2f}", str(result["peak_mib"])]
            columns.append("yes" if result["isolates"] else "no")
            columns.append("other rows" if result["difference"] is None else f"{result['difference']:.1e}")
            yield f"| {' | '.join(columns)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    workloads, peers = options.workloads.split(","), options.peers.split(",")
    if unknown := (set(workloads) - set(WORKLOADS)) | (set(peers) - set(PEERS)):
        parser.error(f"unknown: {', '.join(sorted(unknown))}. There are {', '.join((*WORKLOADS, *PEERS))}.")
    if not PEERS_PYTHON.exists():
        parser.error(".venv-peers is missing; `make bench-peers` creates it")
    prepare(workloads)
    measured = {name: measure(WORKLOADS[name], peers, options.repetitions) for name in workloads}
    result = {"machine": machine(), "repetitions": options.repetitions, "workloads": measured}
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(result["machine"], *table(measured), sep="\n")


if __name__ == "__main__":
    main()
