"""Compares the job on this machine's accelerators with its forward pass and, on a GPU, with torch: `make bench-gpu`.

    python scripts/bench/bench_gpu.py [--models GPT-2,Qwen2.5-0.5B,Llama-3-8B] [--tokens 400000] [--repetitions 3]
    python scripts/bench/bench_gpu.py --smoke     # tiny shapes, to check on a CPU that it works; ignore the results

The models have published shapes and random weights in bfloat16; 16 rows of 1024 tokens, `resid_post` at two thirds of
the depth. "forward" is the compiled step alone, without statistics; "job" is from text to a durable store. torch runs
transformers' model with SDPA on full rows, with a hook that stops it after the layer, and copies the layer to pinned
memory; it stores nothing. JAX and torch have separate processes (JAX does not reserve the GPU's memory), and the three
measurements alternate. MFU counts the operations of the layers that run. "device idle" is measured by
scripts/bench/device_idle.py for steps in the middle of another job. Writes build/bench-gpu.json.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

from published_shapes import SHAPES

BUILD = Path("build/bench-gpu")
ROWS, LENGTH = 16, 1024
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257}
MODELS = {"GPT-2": GPT2} | {name: SHAPES[name] for name in ("Qwen2.5-0.5B", "Llama-3-8B")}
TINY = {"n_embd": 64, "n_head": 4, "n_layer": 3, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 2048}
GPU_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "4090": 165e12}  # bf16
TPU_KINDS = {"TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p", "TPU v6 lite": "v6e"}
TPU_KINDS |= {"TPU7x": "tpu7x"}
GPU_KINDS = {"NVIDIA H100 80GB HBM3": "h100", "NVIDIA GeForce RTX 4090": "rtx4090"}


def chip_name(kind: str) -> str | None:
    """The name that plans have for JAX's `device_kind`; None if they do not know it."""
    return (TPU_KINDS | GPU_KINDS).get(kind)


def peak_flops(kind: str) -> float | None:
    """The peak FLOP/s of one device in bfloat16; None if it is unknown."""
    if kind in TPU_KINDS:
        from pipeline.planning.slice.chips import CHIPS  # torch's side imports this module without the package

        chip = CHIPS[TPU_KINDS[kind]]
        return chip.flops_per_s / chip.devices_per_chip
    return next((peak for gpu, peak in GPU_FLOPS.items() if gpu in kind), None)


def captured_layer(shape: dict) -> int:
    """The last layer of the first two thirds."""
    return shape.get("num_hidden_layers", shape.get("n_layer")) * 2 // 3 - 1


class Worker:
    """A process that does one measurement per line of input, and answers with its result."""

    def __init__(self, command: list[str]) -> None:
        environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONPATH": "."}
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.device: str = self._answer()

    def measure(self, what: str) -> float | dict:
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> float | dict | str:
        while line := self._process.stdout.readline():
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        sys.exit("a worker failed; see its messages above")


def answer(value: float | dict | str) -> None:
    print(f"answer {json.dumps(value)}", flush=True)


def serve_jax(model: Path, num_tokens: int, rows: int) -> None:
    """Measures the JAX side (forward, job or trace) for each line of the standard input."""
    from dataclasses import replace

    import jax
    from bench_job import bare_forward, case_of, whole_job
    from device_idle import device_idle

    from pipeline.config import composing
    from pipeline.job.job import Job
    from pipeline.job.loaded_step import load_step
    from pipeline.job.opening import open_job

    rows *= jax.device_count()

    def open_with(*overrides: str) -> Job:
        layer = captured_layer(json.loads((model / "config.json").read_text()))
        settings = [f"capture.layers=[{layer}]", f"batch.rows={rows}", f"batch.length={LENGTH}", "run.progress=false"]
        settings += [f"data.path={BUILD / 'text'}", f"model.path={model}", "model.init=random", "model.dtype=bfloat16"]
        settings += [f"model.tokenizer={composing.PACKAGE / 'assets/tiny-qwen2'}", f"run.max_tokens={num_tokens}"]
        return open_job(composing.compose(["data=fineweb", *settings, f"store.path={BUILD / 'store'}", *overrides]))

    job = open_with()
    case = case_of(model.name, job, load_step(job))
    blocks = [block for item in job.work() for block in item.blocks(lambda: False)]
    num_tokens = sum(block.num_tokens for block in blocks)
    num_steps = sum(-(-block.num_rows // rows) for block in blocks)

    flops = job.model.flops_per_token(job.plan.step.forward_keys, LENGTH)

    def facts() -> dict:
        shutil.rmtree(BUILD / "trace", ignore_errors=True)
        traced = open_with(f"run.profile={BUILD / 'trace'}")
        whole_job(replace(case, job=traced))
        return {
            "flops_per_token": flops * num_steps * rows * LENGTH / num_tokens / jax.device_count(),
            "attention": case.step.compiled.attention.describe(),
            "device_idle": device_idle(BUILD / "trace"),
        }

    measurements = {"forward": lambda: bare_forward(case), "job": lambda: whole_job(case), "facts": facts}
    bare_forward(case)
    whole_job(case)
    answer(jax.devices()[0].device_kind)
    for line in sys.stdin:
        answer(measurements[line.strip()]())


def measure(
    name: str, shape: dict, tokens: int, rows: int = ROWS, repetitions: int = 3, torch_python: str | None = None
) -> dict:
    """Measures one model; with torch only if `torch_python` is its Python."""
    model = BUILD / name
    shutil.rmtree(model, ignore_errors=True)
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(shape))
    if not (BUILD / "text").exists():
        subprocess.run([sys.executable, "scripts/demo/make_demo_text.py", "--out", str(BUILD / "text")], check=True)
    arguments = [str(model), str(tokens), str(rows)]
    jax_side = Worker([sys.executable, __file__, "--serve-jax", *arguments])
    sides = {"forward": jax_side, "job": jax_side}
    if torch_python:
        sides["torch"] = Worker([torch_python, str(Path(__file__).with_name("gpu_torch.py")), *arguments])
    rates: dict[str, list[float]] = {what: [] for what in sides}
    try:
        for _ in range(repetitions):
            for what, side in sides.items():
                rates[what].append(side.measure(what))
            print(name, {what: round(measured[-1]) for what, measured in rates.items()}, flush=True)
        facts = jax_side.measure("facts")
    finally:
        for side in set(sides.values()):
            side.close()
    medians = {what: statistics.median(measured) for what, measured in rates.items()}
    ratios = {
        f"job / {what}": statistics.median(a / b for a, b in zip(rates["job"], measured, strict=True))
        for what, measured in rates.items()
        if what != "job"
    }
    peak = peak_flops(jax_side.device)
    mfu = peak and medians["job"] * facts["flops_per_token"] / peak
    return facts | {"device": jax_side.device, "tokens_per_s": medians, "all": rates, "ratios": ratios, "mfu": mfu}


def table(results: dict[str, dict]) -> list[str]:
    """The lines of a Markdown table."""
    lines = ["| model | device | tokens/s | ratios | MFU | device idle |", "|---|---|---|---|---|---|"]
    for name, result in results.items():
        rates = ", ".join(f"{what} {rate:,.0f}" for what, rate in result["tokens_per_s"].items())
        ratios = ", ".join(f"{what} {ratio:.2f}" for what, ratio in result["ratios"].items())
        mfu = "" if result["mfu"] is None else f"{result['mfu']:.1%}"
        idle = ", ".join(f"{idle:.1%}" for idle in result["device_idle"].values())
        lines.append(f"| {name} | {result['device']} | {rates} | {ratios} | {mfu} | {idle} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--tokens", type=int, default=400_000)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument(
        "--torch-python", default=".venv-peers/bin/python", help="with torch for this GPU, transformers"
    )
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--serve-jax", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve_jax:
        model, num_tokens, rows = options.serve_jax
        return serve_jax(Path(model), int(num_tokens), int(rows))
    if options.smoke:
        options.tokens, options.rows, options.repetitions = 8_000, 2, 1
    shutil.rmtree(BUILD, ignore_errors=True)
    result = {}
    for name in options.models.split(","):
        shape = MODELS[name]
        if options.smoke:
            shape = shape | {key: value for key, value in TINY.items() if key in shape}
        arguments = (options.tokens, options.rows, options.repetitions, options.torch_python)
        result[name] = measure(name, shape, *arguments)
    print("\n".join(table(result)))
    Path("build/bench-gpu.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
