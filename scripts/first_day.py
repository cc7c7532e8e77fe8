"""The first day on an accelerator: are results correct, how fast is the job, and does the prediction hold?

    python -m scripts.first_day [--models Qwen2.5-0.5B,Llama-3-8B] [--tokens 400000]      # also: make first-day
    python -m scripts.first_day --smoke        # tiny shapes, to try the script on a CPU; speeds are meaningless

Uses all devices of one machine. Writes build/first-day/report.md. The exit code is 1 if a store is wrong or a job
failed.

* Correctness: the bundled model's activations of every layer, in float32 and bfloat16, against float32 on this
  machine's CPU; and rows of 2,048 tokens with the device's attention kernel (splash, flash), if it has one, against
  plain XLA.
* Speed: models of published shapes with random weights in bfloat16, rows of 1024, `resid_post` at two thirds of the
  depth: tokens/s of the job and of its forward pass (see scripts/bench/bench_job.py), MFU of the layers that run, idle
  time of the devices, and the prediction of `pipeline.plan` for this slice or machine.
* The audited programs for this machine (docs/audit-*.json), if there are some: their time beside what was compiled.
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
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np

from pipeline.config.composing import PACKAGE
from pipeline.planning.slice.chips import CHIPS
from pipeline.store import ActivationStore
from scripts.audit.audit import TABLES, row
from scripts.audit.cases import CASES
from scripts.bench.bench_job import open_benchmark, open_case, whole_job
from scripts.bench.device_idle import device_idle
from scripts.bench.published_shapes import SHAPES
from scripts.demo.make_demo_text import documents, write_shards

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "first-day"
BUNDLED = PACKAGE / "assets" / "tiny-qwen2"
ROWS, LENGTH = 16, 1024  # of the timed runs, on each device
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "vocab_size": 2048}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2}
BOUNDS = {"float32": 1e-4, "bfloat16": 3e-2, "kernel": 3e-2}  # relative error of a layer's activations
Compared = list[tuple[str, float, float]]  # what, the largest relative error of a layer, its bound
KERNELS = {"tpu": "splash", "gpu": "flash"}
KINDS = {"TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p", "TPU v6 lite": "v6e"}
KINDS |= {"TPU7x": "tpu7x", "NVIDIA H100 80GB HBM3": "h100", "NVIDIA GeForce RTX 4090": "rtx4090"}
DEVICES = """
import jax, json
device = jax.devices()[0]
print(json.dumps({"platform": device.platform, "kind": device.device_kind, "devices": jax.device_count(),
                  "jax": jax.__version__, "memory": (device.memory_stats() or {}).get("bytes_limit")}))
"""


def run_job(name: str, *overrides: str, platforms: str | None = None) -> Path:
    """Runs a job in a separate process, as users start it. Returns its store."""
    store = BUILD / name
    environment = os.environ | ({"JAX_PLATFORMS": platforms} if platforms else {})
    common = ["data=fineweb", f"data.path={BUILD / 'text'}", "data.num_streams=1", f"store.path={store}"]
    command = [sys.executable, "-m", "pipeline.run", *common, "run.progress=false", *overrides]
    print(f"{name} ...", flush=True)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        print(f"{done.stdout}{done.stderr}\n{' '.join(command)}")
        sys.exit(f"{name} ended with exit code {done.returncode}")
    return store


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


def check(machine: Mapping[str, object], smoke: bool) -> Compared:
    """Compares activations."""
    rows = 2 * machine["devices"]
    tokens = 4_000 if smoke else 100_000
    bundled = [f"model.path={BUNDLED}", "capture.layers=all", "capture.dtype=float32", f"run.max_tokens={tokens}"]
    short = [*bundled, f"batch.rows={rows}", "batch.length=512"]
    expected = run_job("cpu-float32", *short, "model.dtype=float32", platforms="cpu")
    compared = []
    for dtype in ("float32", "bfloat16"):
        worst = max(errors(run_job(dtype, *short, f"model.dtype={dtype}"), expected).values())
        compared.append((f"{dtype} here, float32 on the CPU", worst, BOUNDS[dtype]))
    kernel = KERNELS.get(machine["platform"])
    if kernel is None:
        return compared
    model = write_model("kernel", SHAPES["Qwen2.5-0.5B"] | (TINY if smoke else {}) | {"num_hidden_layers": 4})
    long = [*model, "capture.layers=all", "capture.dtype=float32", f"run.max_tokens={tokens}", f"batch.rows={rows}"]
    long += ["batch.length=2048", "model.dtype=bfloat16"]
    stores = [run_job(f"attention-{kind}", *long, f"model.attention={kind}") for kind in (kernel, "xla")]
    what = f"attention {kernel}, and xla: Qwen2.5-0.5B's shape, bfloat16, rows of 2,048"
    compared.append((what, max(errors(*stores).values()), BOUNDS["kernel"]))
    return compared


def write_model(name: str, shape: Mapping[str, object]) -> list[str]:
    """The overrides for a model of this shape with random weights and the bundled tokenizer."""
    path = BUILD / "models" / name
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(shape))
    return [f"model.path={path}", "model.init=random", f"model.tokenizer={BUNDLED}"]


def topology(machine: Mapping[str, object]) -> str | None:
    """The name of this machine's devices for `pipeline.plan`; None if it does not know them."""
    chip = CHIPS.get(KINDS.get(str(machine["kind"])))
    return chip and f"{chip.name}-{machine['devices'] * chip.cores_per_chip // chip.devices_per_chip}"


def answer(*arguments: str) -> dict:
    """The JSON in the last line that a separate process of Python prints, which has the devices for itself."""
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(arguments)} ended with exit code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def predict(job: list[str], machine: Mapping[str, object]) -> str:
    """The plan's prediction for these devices; empty if it does not know them."""
    devices = topology(machine)
    if devices is None:
        return ""
    settings = [f"topology={devices}", "data.path=/nowhere", f"store.path={BUILD / 'planned'}", "plan.json=true"]
    command = [sys.executable, "-m", "pipeline.plan", *job, *settings]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        return f"no plan: {done.stderr.strip().rpartition(chr(10))[2]}"
    plan = json.loads(done.stdout)
    return f"{plan['tokens_per_s']:,.0f}, bound by {plan['binding'].replace('_', ' ')}, at MFU {plan['mfu']:.2f}"


def measure_audited(machine: Mapping[str, object]) -> list[str]:
    """Runs the audited steps for these devices. Returns the audit's table with what was measured as the lines of a
    Markdown table; none without such steps."""
    rows, platform = [], machine["platform"]
    recorded = json.loads(TABLES[platform].read_text())["programs"] if platform in TABLES else {}
    for name, case in CASES.get(platform, {}).items():
        compiled = recorded.get(f"{name}: step")
        if compiled is None or f"topology={topology(machine)}" not in case.overrides:
            continue
        print(f"audited {name} ...", flush=True)
        ran, chip = answer("-m", "scripts.audit.measured", name), CHIPS[compiled["chip"]]
        mfu = ran["flops_per_s"] * chip.devices_per_chip / chip.flops_per_s
        measured = {"measured ms": f"{ran['step_ms']:.1f}", "MFU": f"{mfu:.1%}", "attention here": ran["attention"]}
        rows.append(row(name, compiled) | measured | {"temp. here": f"{ran['temporary_bytes'] / 2**30:.2f}"})
    lines = [*rows[:1], ["---"] * len(rows[0]) if rows else [], *(cells.values() for cells in rows)]
    return [f"| {' | '.join(line)} |" for line in lines] + [""] if rows else []


def measure_speed(name: str, machine: Mapping[str, object], tokens: int, smoke: bool) -> str:
    """A line of the table of speeds, with the prediction."""
    shape = SHAPES[name] | (TINY if smoke else {})
    rows, repeats = (2, 1) if smoke else (ROWS, 3)
    layer = shape["num_hidden_layers"] * 2 // 3 - 1
    settings = [*write_model(f"timed-{name}", shape), f"capture.layers=[{layer}]"]
    settings += [f"batch.rows={rows * machine['devices']}", f"batch.length={LENGTH}", "model.dtype=bfloat16"]
    timed = ["--repeats", str(repeats), "--speed-of", *settings, f"run.max_tokens={tokens}"]
    speed = answer("-m", "scripts.first_day", *timed)
    chip = CHIPS.get(KINDS.get(str(machine["kind"])))
    mfu = chip and f"{speed['flops_per_s'] * chip.devices_per_chip / chip.flops_per_s:.1%}"
    idle = ", ".join(f"{share:.1%}" for share in speed["device_idle"].values())
    rates = f"{speed['forward']:,.0f} | {speed['job']:,.0f} | {speed['ratio']:.2f}"
    return f"| {name} | {speed['attention']} | {rates} | {mfu or ''} | {idle} | {predict(settings, machine)} |"


def serve_speed(settings: list[str], repeats: int) -> dict[str, object]:
    """The speed of a job and of its forward pass on this process's devices."""
    case = open_case(BUILD, "timed", *settings)
    case.measure("", repeats)
    blocks = [block for item in case.job.work() for block in item.blocks(lambda: False)]
    slots = sum(-(-block.num_rows // case.step.process_rows) for block in blocks) * case.step.process_rows * LENGTH
    padded = slots / sum(block.num_tokens for block in blocks)
    flops = case.job.model.flops_per_token(case.job.plan.step.forward_keys, LENGTH) * padded / jax.device_count()
    traced = open_benchmark(BUILD, "timed", *settings, f"run.profile={BUILD / 'trace'}")
    whole_job(replace(case, job=traced))
    forward, job = statistics.median(case.forward), statistics.median(case.whole)
    return {
        **{"forward": forward, "job": job, "ratio": case.ratio, "flops_per_s": job * flops},
        **{"attention": case.step.compiled.attention.describe(), "device_idle": device_idle(BUILD / "trace")},
    }


def report(machine: Mapping[str, object], compared: Compared, speeds: list[str], audited: list[str]) -> str:
    memory = "" if machine["memory"] is None else f" with {machine['memory'] / 2**30:.1f} GiB"
    lines = [
        "# First day",
        "",
        f"{machine['devices']} x {machine['kind']}{memory}; jax {machine['jax']}, Python {platform.python_version()}, "
        f"{os.cpu_count()} host cores; {time.strftime('%Y-%m-%d')}.",
        "",
        "| compared | largest relative error of a layer | bound | verdict |",
        "|---|---|---|---|",
        *(
            f"| {what} | {error:.1e} | {bound:.0e} | {'correct' if error <= bound else 'WRONG'} |"
            for what, error, bound in compared
        ),
        "",
        "| model | attention | forward, tokens/s | job, tokens/s | job / forward | MFU | idle | predicted, tokens/s |",
        "|---|---|---|---|---|---|---|---|",
        *speeds,
        "",
        *audited,
    ]
    return "\n".join([*lines, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="Qwen2.5-0.5B", help="names from scripts/bench/published_shapes.py")
    parser.add_argument("--tokens", type=int, default=400_000, help="of each timed run")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--repeats", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--speed-of", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.speed_of:
        print(json.dumps(serve_speed(options.speed_of, options.repeats)))
        return 0
    shutil.rmtree(BUILD, ignore_errors=True)
    write_shards(documents(), BUILD / "text")
    machine = answer("-c", DEVICES)
    compared = check(machine, options.smoke)
    audited = [] if options.smoke else measure_audited(machine)
    speeds: list[str] = []
    for name in options.models.split(","):
        (BUILD / "report.md").write_text(report(machine, compared, speeds, audited))
        speeds.append(measure_speed(name, machine, 20_000 if options.smoke else options.tokens, options.smoke))
    text = report(machine, compared, speeds, audited)
    (BUILD / "report.md").write_text(text)
    print(text)
    return int(any(error > bound for _, error, bound in compared))


if __name__ == "__main__":
    sys.exit(main())
