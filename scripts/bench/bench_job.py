"""Compares the job with its forward pass alone, on this machine. Writes build/bench.json.

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
from published_shapes import SHAPES

from pipeline.cluster import preemption, sharding
from pipeline.config import composing
from pipeline.job.job import Job
from pipeline.job.loaded_step import LoadedStep, load_step, step_inputs
from pipeline.job.loop import fill
from pipeline.job.metrics import peak_rss_mib
from pipeline.job.opening import open_job
from pipeline.step.compiled_step import CompiledStep, compile_step, make_partition
from pipeline.store.write.store_writer import StoreWriter

BUILD = Path("build/bench")
MODEL = SHAPES["Qwen2.5-0.5B"] | {
    **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "vocab_size": 50304},
    **{"num_attention_heads": 12, "num_key_value_heads": 12},
}
ROWS, LENGTH, EARLY_LAYER, LAST_LAYER = 8, 256, 5, 11


@dataclass
class Case:
    """A set of captured layers, with a compiled step and the tokens/s of its forward pass and of its job, in pairs."""

    name: str
    job: Job
    step: LoadedStep
    bare_step: CompiledStep  # without statistics
    forward: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        return statistics.median(whole / bare for whole, bare in zip(self.whole, self.forward, strict=True))


def overrides(layers: str, max_tokens: int, *more: str) -> list[str]:
    return [
        "data=fineweb",
        f"data.path={BUILD / 'text'}",
        f"model.path={BUILD / 'model'}",
        "model.init=random",
        "model.dtype=float32",
        f"model.tokenizer={composing.PACKAGE / 'assets/tiny-qwen2'}",
        f"capture.layers={layers}",
        "capture.dtype=float32",
        f"batch.rows={ROWS}",
        f"batch.length={LENGTH}",
        f"run.max_tokens={max_tokens}",
        "run.progress=false",
        *more,
    ]


def open_case(name: str, layers: str, max_tokens: int, *more: str) -> Case:
    store = f"store.path={BUILD / 'stores' / name}"
    job = open_job(composing.compose(overrides(layers, max_tokens, store, *more)))
    return case_of(name, job, load_step(job))


def case_of(name: str, job: Job, step: LoadedStep) -> Case:
    mesh, weights = job.plan.mesh, job.plan.weights
    bare = compile_step(
        job.model,
        replace(job.plan.step, statistics=False),
        step.operands(None, slice(0)),
        make_partition(mesh.tensor, weights.sharding, None, weights.expert_group, mesh.context),
    )
    return Case(name, job, step, bare)


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
    path = case.job.config.store.path
    shutil.rmtree(path, ignore_errors=True)
    store = StoreWriter.open(path, case.job.metadata, case.job.layout)
    with preemption.stop_on_signals() as stop:
        metrics = fill(case.job, store, stop, case.step)
    store.finish()
    return metrics.tokens / metrics.elapsed_s


def peak_memory_mib(max_tokens: int) -> int:
    """Peak resident memory of a separate process that captures layer 0 of `max_tokens` tokens."""
    command = [sys.executable, __file__, "--memory-of", str(max_tokens)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def print_peak_memory(max_tokens: int) -> None:
    case = open_case(f"memory-{max_tokens}", "[0]", max_tokens)
    whole_job(case)
    print(peak_rss_mib())


def prepare() -> None:
    shutil.rmtree(BUILD, ignore_errors=True)
    (BUILD / "model").mkdir(parents=True)
    (BUILD / "model" / "config.json").write_text(json.dumps(MODEL, indent=1))
    subprocess.run([sys.executable, "scripts/demo/make_demo_text.py", "--out", str(BUILD / "text")], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=40_000, help="valid tokens per run")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--memory-of", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_of:
        return print_peak_memory(options.memory_of)

    prepare()
    cases = {
        "one": open_case("one", f"[{EARLY_LAYER}]", options.tokens),
        "last": open_case("last", f"[{LAST_LAYER}]", options.tokens // 2),
        "all": open_case("all", "all", options.tokens),
    }
    for case in cases.values():
        bare_forward(case)  # the first one is slower
        for _ in range(options.repeats):
            case.forward.append(bare_forward(case))
            case.whole.append(whole_job(case))
            print(
                f"{case.name:5} forward {case.forward[-1]:7.1f} tokens/s, job {case.whole[-1]:7.1f} tokens/s",
                flush=True,
            )
    early = statistics.median(cases["one"].whole) / statistics.median(cases["last"].whole)
    short, long = peak_memory_mib(options.tokens), peak_memory_mib(4 * options.tokens)
    result = {
        "forward_tokens_per_s": round(statistics.median(cases["all"].forward), 1),
        "job_tokens_per_s": round(statistics.median(cases["all"].whole), 1),
        "ratio_one_layer": round(cases["one"].ratio, 4),
        "ratio_all_layers": round(cases["all"].ratio, 4),
        "early_exit_speedup": round(early, 3),
        "peak_rss_mib": long,
        "peak_rss_mib_quarter_run": short,
        "runs": {case.name: {"forward": case.forward, "job": case.whole} for case in cases.values()},
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, jax {jax.__version__}",
    }
    Path("build/bench.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "runs"}, indent=1))


if __name__ == "__main__":
    main()
