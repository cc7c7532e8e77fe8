"""Compares the job with its forward pass alone, on this machine: `make bench` writes build/bench.json.

    python -m scripts.bench.bench_job [--tokens 40000] [--repeats 3]

The model is Qwen2-shaped with 12 layers, d=768 and random weights in float32; it runs 8 rows of 256 tokens of the
demo's text. The forward pass, without statistics, and the whole job (text to durable store, without start-up) alternate
in one process over the same tokens. Ratios are medians over neighbouring pairs, because the speed of a shared machine
drifts. Memory is measured in separate processes.
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
from dataclasses import dataclass, field, replace
from pathlib import Path

import jax

from pipeline.cluster import preemption, sharding
from pipeline.config import composing
from pipeline.job.job import Job
from pipeline.job.loaded_step import LoadedStep, load_step, step_inputs
from pipeline.job.loop import fill
from pipeline.job.metrics import Metrics, peak_rss_mib
from pipeline.job.opening import open_job
from pipeline.step.compiled_step import CompiledStep, compile_step
from pipeline.store.write.store_writer import StoreWriter
from scripts.bench.published_shapes import SHAPES
from scripts.demo.make_demo_text import documents, write_shards

BUILD = Path("build/bench")
MODEL = SHAPES["Qwen2.5-0.5B"] | {
    **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "vocab_size": 50304},
    **{"num_attention_heads": 12, "num_key_value_heads": 12},
}
LAYERS = {"one": "[5]", "last": "[11]", "all": "all"}


@dataclass
class Case:
    """A job with its compiled step, and the tokens/s of its forward pass and of the whole job, in pairs."""

    job: Job
    step: LoadedStep
    bare_step: CompiledStep  # without statistics
    forward: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        return statistics.median(whole / bare for whole, bare in zip(self.whole, self.forward, strict=True))

    def measure(self, name: str, repeats: int) -> None:
        """Measures pairs, after one run of each that is slower."""
        bare_forward(self)
        whole_job(self)
        for _ in range(repeats):
            self.forward.append(bare_forward(self))
            self.whole.append(whole_job(self))
            rates = f"forward {self.forward[-1]:9.1f} tokens/s, job {self.whole[-1]:9.1f} tokens/s"
            print(f"{name:5} {rates}", flush=True)


def prepare(build: Path) -> None:
    """Writes the model and the text to a new folder."""
    shutil.rmtree(build, ignore_errors=True)
    (build / "model").mkdir(parents=True)
    (build / "model" / "config.json").write_text(json.dumps(MODEL))
    write_shards(documents(), build / "text")


def open_benchmark(build: Path, name: str, *overrides: str) -> Job:
    """Opens a job on the text in `build`, with random weights."""
    common = ["data=fineweb", f"data.path={build / 'text'}", "model.init=random", "run.progress=false"]
    common += [f"model.tokenizer={composing.PACKAGE / 'assets/tiny-qwen2'}", f"store.path={build / 'stores' / name}"]
    return open_job(composing.compose([*common, *overrides]))


def open_case(build: Path, name: str, *overrides: str) -> Case:
    """Opens a job, and compiles its step and the step without statistics."""
    job = open_benchmark(build, name, *overrides)
    step = load_step(job)
    bare = compile_step(
        job.model,
        replace(job.plan.step, statistics=False),
        step.operands(None, slice(0)),
        job.plan.weights.partition(),
    )
    return Case(job, step, bare)


def small_case(name: str, layers: str, max_tokens: int) -> Case:
    overrides = [f"model.path={BUILD / 'model'}", "model.dtype=float32", "capture.dtype=float32", "batch.rows=8"]
    overrides += ["batch.length=256", f"capture.layers={layers}", f"run.max_tokens={max_tokens}"]
    return open_case(BUILD, name, *overrides)


def bare_forward(case: Case) -> float:
    """Valid tokens per second of the forward pass alone over the job's batches; results stay on the device."""
    mesh = case.step.compiled.mesh
    blocks = [block for item in case.job.work() for block in item.blocks(lambda: False)]
    rows = case.step.process_rows
    batches = [
        sharding.put_rows(mesh, step_inputs(block, slice(row, row + rows), case.job.plan.step))
        for block in blocks
        for row in range(0, block.num_rows, rows)
    ]
    began = time.perf_counter()
    for batch in batches:
        outputs = case.bare_step(case.step.operands(None, slice(0)), *batch.values())
    jax.block_until_ready(outputs)
    return sum(block.num_tokens for block in blocks) / (time.perf_counter() - began)


def whole_job(case: Case) -> float:
    """Valid tokens per second from text to a durable store, from the first document read to the last commit."""
    metrics = fill_store(case.job, case.step, case.job.config.store.path)
    return metrics.tokens / metrics.elapsed_s


def fill_store(job: Job, step: LoadedStep, path: str) -> Metrics:
    """Runs a job with all its threads, into a new store."""
    shutil.rmtree(path, ignore_errors=True)
    store = StoreWriter.open(path, job.metadata, job.layout)
    with preemption.stop_on_signals() as stop:
        metrics = fill(job, store, stop, step)
    store.finish()
    return metrics


def peak_memory_mib(max_tokens: int) -> int:
    """Peak resident memory of a separate process that captures layer 0 of `max_tokens` tokens."""
    command = [sys.executable, "-m", "scripts.bench.bench_job", "--memory-of", str(max_tokens)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=40_000, help="valid tokens per run")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--memory-of", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_of:
        whole_job(small_case(f"memory-{options.memory_of}", "[0]", options.memory_of))
        return print(peak_rss_mib())

    prepare(BUILD)
    cases = {name: small_case(name, layers, options.tokens) for name, layers in LAYERS.items()}
    for name, case in cases.items():
        case.measure(name, options.repeats)
    result = {
        "job / forward": {name: round(case.ratio, 3) for name, case in cases.items()},
        "peak_rss_mib": {tokens: peak_memory_mib(tokens) for tokens in (options.tokens, 4 * options.tokens)},
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, jax {jax.__version__}",
    }
    print(json.dumps(result, indent=1))
    runs = {name: {"forward": case.forward, "job": case.whole} for name, case in cases.items()}
    Path("build/bench.json").write_text(json.dumps(result | {"runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
