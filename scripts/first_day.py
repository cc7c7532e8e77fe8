"""The first day on an accelerator: are results correct, how fast is the job, and does the prediction hold?

    python scripts/first_day.py [--models Qwen2.5-0.5B,Llama-3-8B] [--steps 100]      # also: make first-day
    python scripts/first_day.py --smoke        # tiny shapes, to try the script on a CPU; speeds are meaningless

Uses all devices of one machine. Writes build/first-day/report.md. The exit code is 1 if a store is wrong or a job
failed.

* Correctness: the bundled model's activations of every layer, in float32 and bfloat16, against float32 on this
  machine's CPU; and rows of 2,048 tokens with the device's attention kernel (splash, cuDNN), if it has one, against
  plain XLA.
* Speed: models of published shapes with random weights, from text to a durable store: tokens/s, MFU, idle devices, and
  what the run waited for. On a TPU, also the prediction of `pipeline.plan` for this slice.

Each job runs in a separate process, as users start it.
"""

import argparse
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "bench")]

from bench_gpu import PEAK_FLOPS, TINY  # noqa: E402
from device_idle import device_idle  # noqa: E402
from published_shapes import SHAPES  # noqa: E402

from pipeline.config.composing import PACKAGE  # noqa: E402
from pipeline.core.sites import Site, activation_keys  # noqa: E402
from pipeline.models.registry import open_model  # noqa: E402
from pipeline.planning.slice.chips import CHIPS  # noqa: E402
from pipeline.store import ActivationStore  # noqa: E402

BUILD = ROOT / "build" / "first-day"
BUNDLED = PACKAGE / "assets" / "tiny-qwen2"
TINY_QWEN = {name: size for name, size in TINY.items() if name in SHAPES["Qwen2.5-0.5B"]}
BOUNDS = {"float32": 1e-4, "bfloat16": 3e-2, "kernel": 3e-2}  # relative error of a layer's activations
TPU_KINDS = {"TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p", "TPU v6 lite": "v6e"}
KERNELS = {"tpu": "splash", "gpu": "cudnn"}
DEVICES = """
import jax, json
device = jax.devices()[0]
print(json.dumps({"platform": device.platform, "kind": device.device_kind, "devices": jax.device_count(),
                  "jax": jax.__version__, "memory": (device.memory_stats() or {}).get("bytes_limit")}))
"""


class Failed(Exception):
    """A job ended with a non-zero exit code. Contains its last message."""


@dataclass(frozen=True)
class Run:
    """A finished job: its store, the last line of its metrics, and its wall-clock seconds."""

    store: Path
    metrics: Mapping[str, object]
    seconds: float


def run_job(name: str, *overrides: str, platforms: str | None = None) -> Run:
    """Runs a job. Raises Failed."""
    store = BUILD / name
    environment = os.environ | ({"JAX_PLATFORMS": platforms} if platforms else {})
    common = ["data=fineweb", f"data.path={BUILD / 'text'}", "data.num_streams=1", f"store.path={store}"]
    command = [sys.executable, "-m", "pipeline.run", *common, "run.progress=false", *overrides]
    print(f"{name} ...", flush=True)
    began = time.perf_counter()
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        print(f"{done.stdout}\n{' '.join(command)}")
        raise Failed(f"{name} ended with exit code {done.returncode}: {done.stdout.strip().rpartition(chr(10))[2]}")
    [log] = (store / "_metrics").glob("*.jsonl")
    return Run(store, json.loads(log.read_text().splitlines()[-1]), time.perf_counter() - began)


def errors(got: Path, expected: Path) -> dict[str, float]:
    """The relative error of each captured array, over all valid tokens. Exits if the tokens are different."""
    left, right = ActivationStore.open(got), ActivationStore.open(expected)
    tokens = [store.read_tokens(store.rows) for store in (left, right)]
    if not all(np.array_equal(*(getattr(rows, name) for rows in tokens)) for name in ("tokens", "segments")):
        sys.exit(f"WRONG: {got} and {expected} have different tokens")
    valid, result = tokens[0].segments != 0, {}
    for key in left.keys:
        a, b = (store.read(key, store.rows)[valid].astype(np.float64) for store in (left, right))
        result[key.name] = float(np.linalg.norm(a - b) / np.linalg.norm(b))
    return result


def check(machine: Mapping[str, object], smoke: bool) -> list[tuple[str, float, float]]:
    """Compares activations: (what was compared, the largest relative error of a layer, its bound)."""
    rows = 2 * machine["devices"]
    tokens = 4_000 if smoke else 100_000
    bundled = [f"model.path={BUNDLED}", "capture.layers=all", "capture.dtype=float32", f"run.max_tokens={tokens}"]
    short = [*bundled, f"batch.rows={rows}", "batch.length=512"]
    expected = run_job("cpu-float32", *short, "model.dtype=float32", platforms="cpu").store
    compared = []
    for dtype in ("float32", "bfloat16"):
        worst = max(errors(run_job(dtype, *short, f"model.dtype={dtype}").store, expected).values())
        compared.append((f"{dtype} here, float32 on the CPU", worst, BOUNDS[dtype]))
    kernel = KERNELS.get(machine["platform"])
    if kernel is None:
        return compared
    model = write_model("kernel", SHAPES["Qwen2.5-0.5B"] | (TINY_QWEN if smoke else {}) | {"num_hidden_layers": 4})
    long = [*model, "capture.layers=all", "capture.dtype=float32", f"run.max_tokens={tokens}", f"batch.rows={rows}"]
    long += ["batch.length=2048", "model.dtype=bfloat16"]
    stores = [run_job(f"attention-{kind}", *long, f"model.attention={kind}").store for kind in (kernel, "xla")]
    what = f"attention {kernel}, and xla: Qwen2.5-0.5B's shape, bfloat16, rows of 2,048"
    compared.append((what, max(errors(*stores).values()), BOUNDS["kernel"]))
    return compared


def write_model(name: str, shape: Mapping[str, object]) -> list[str]:
    """The overrides for a model of this shape with random weights and the bundled tokenizer."""
    path = BUILD / "models" / name
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(shape))
    return [f"model.path={path}", "model.init=random", f"model.tokenizer={BUNDLED}"]


def measure(name: str, machine: Mapping[str, object], num_steps: int, smoke: bool) -> dict[str, object]:
    """The measured and the predicted speed of one model. Raises Failed."""
    shape = SHAPES[name] | (TINY_QWEN if smoke else {})
    model = write_model(name, shape)
    rows, length = (2, 256) if smoke else (16, 1024)
    layer = 2 * shape["num_hidden_layers"] // 3
    num_tokens = num_steps * rows * machine["devices"] * length
    add_text(num_tokens)
    job = [*model, f"capture.layers=[{layer}]", f"run.max_tokens={num_tokens}"]
    job += [f"batch.rows={rows * machine['devices']}", f"batch.length={length}"]
    profile = [f"run.profile={BUILD / 'trace' / name}", "run.profile_after=3", "run.profile_steps=5"]
    run_job(f"{name}-first", *job)  # fills the caches of the compiler and the file system
    timed = run_job(name, *job)
    run_job(f"{name}-traced", *job, *profile)
    keys = activation_keys((layer,), (Site.resid_post,))
    flops = open_model(str(BUILD / "models" / name), init="random").flops_per_token(keys, length)
    rate, peak = timed.metrics["tokens_per_s"], peak_flops(str(machine["kind"]))
    threads = timed.metrics["seconds"].items()
    stages = {f"{thread} {stage}": seconds for thread, stages in threads for stage, seconds in stages.items()}
    slots = timed.metrics["steps"] * rows * machine["devices"] * length
    return {
        "model": name,
        "tokens_per_s": rate,
        "mfu": peak and rate * slots / timed.metrics["tokens"] * flops / (peak * machine["devices"]),
        "device_idle": max(device_idle(BUILD / "trace" / name).values()),
        "longest": ", ".join(
            f"{stage} {s:.1f} s" for stage, s in sorted(stages.items(), key=lambda item: -item[1])[:3]
        ),
        "start_s": timed.seconds - timed.metrics["elapsed_s"],
        "predicted": predict(job, machine),
    }


def add_text(num_tokens: int) -> None:
    """Repeats the text until it has at least `num_tokens` tokens, assuming at most three characters per token."""
    files = sorted((BUILD / "text").glob("*.parquet"))
    num_copies = math.ceil(3 * num_tokens / sum(file.stat().st_size for file in files))
    for copy in range(1, num_copies):
        for file in files:
            shutil.copy(file, file.with_name(f"{copy:03d}-{file.name}"))


def peak_flops(kind: str) -> float | None:
    """The peak FLOP/s of one device in bfloat16; None if it is unknown."""
    if kind in TPU_KINDS:
        return CHIPS[TPU_KINDS[kind]].flops_per_s
    return next((peak for gpu, peak in PEAK_FLOPS.items() if gpu in kind), None)


def predict(job: list[str], machine: Mapping[str, object]) -> str | None:
    """The plan's prediction for this slice; None unless the devices are TPUs."""
    chip = TPU_KINDS.get(str(machine["kind"]))
    if chip is None:
        return None
    topology = f"{chip}-{machine['devices'] * CHIPS[chip].cores_per_chip}"
    settings = [f"topology={topology}", "data.path=/nowhere", f"store.path={BUILD / 'planned'}", "plan.json=true"]
    command = [sys.executable, "-m", "pipeline.plan", *job, *settings]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        return f"no plan: {done.stderr.strip().rpartition(chr(10))[2]}"
    plan = json.loads(done.stdout)
    return (
        f"{plan['tokens_per_s']:,.0f} tokens/s, bound by {plan['binding'].replace('_', ' ')} (at MFU {plan['mfu']:.2f})"
    )


def report(machine: Mapping[str, object], compared: list[tuple[str, float, float]], speeds: list[dict]) -> str:
    memory = "" if machine["memory"] is None else f" with {machine['memory'] / 2**30:.1f} GiB"
    lines = [
        "# First day",
        "",
        f"{machine['devices']} x {machine['kind']}{memory}; jax {machine['jax']}, Python {platform.python_version()}, "
        f"{os.cpu_count()} host cores; {time.strftime('%Y-%m-%d')}.",
        "",
        *header("compared", "largest relative error of a layer", "bound", "verdict"),
        *(row(what, f"{e:.1e}", f"{bound:.0e}", "correct" if e <= bound else "WRONG") for what, e, bound in compared),
        "",
        *header("model", "tokens/s", "MFU", "device idle", "longest stages", "start", "predicted"),
    ]
    for speed in speeds:
        if "failed" in speed:
            lines.append(row(speed["model"], *["-"] * 5, speed["failed"]))
            continue
        mfu = "-" if speed["mfu"] is None else f"{speed['mfu']:.1%}"
        idle, start = f"{speed['device_idle']:.1%}", f"{speed['start_s']:.0f} s"
        predicted = speed["predicted"] or "-"
        lines.append(
            row(speed["model"], f"{speed['tokens_per_s']:,.0f}", mfu, idle, speed["longest"], start, predicted)
        )
    return "\n".join([*lines, ""])


def header(*names: str) -> list[str]:
    return [row(*names), "|---" * len(names) + "|"]


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="Qwen2.5-0.5B", help="names from scripts/bench/published_shapes.py")
    parser.add_argument("--steps", type=int, default=100, help="steps of each timed run")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    shutil.rmtree(BUILD, ignore_errors=True)
    make_text = ["scripts/demo/make_demo_text.py", "--out", str(BUILD / "text")]
    subprocess.run([sys.executable, *make_text], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    done = subprocess.run([sys.executable, "-c", DEVICES], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    machine = json.loads(done.stdout.splitlines()[-1])
    compared = check(machine, options.smoke)
    speeds: list[dict] = []
    for name in [None, *options.models.split(",")]:
        if name is not None:
            try:
                speeds.append(measure(name, machine, 12 if options.smoke else options.steps, options.smoke))
            except Failed as error:
                speeds.append({"model": name, "failed": str(error)})
        (BUILD / "report.md").write_text(report(machine, compared, speeds))
    print((BUILD / "report.md").read_text())
    return int(any(error > bound for _, error, bound in compared) or any("failed" in speed for speed in speeds))


if __name__ == "__main__":
    sys.exit(main())
