"""The demo: runs the main job on text and on ARC tasks, verifies the stores, and shows their contents and features.

Needs no network. Everything is written to build/demo, which is deleted first.
"""

import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from pipeline.data.text.tokenizer import load_tokenizer
from pipeline.store import ActivationStore

ROOT = Path(__file__).resolve().parents[2]
DEMO = Path("build/demo")

JOBS = {
    "text": "FineWeb-schema documents made from this Python's documentation",
    "arc": "ARC-AGI-format tasks, each in its original and an augmented version",
}

SAE = "blocks.4.resid_post"  # the array that the bundled SAE encodes


def python(*arguments: str) -> None:
    """Runs a command of the project as a user would, and stops the demo with its exit code if it fails."""
    print("\n$ python", *arguments, flush=True)
    code = subprocess.run([sys.executable, *arguments], cwd=ROOT).returncode
    if code:
        sys.exit(code)


def main() -> None:
    began = time.monotonic()
    shutil.rmtree(ROOT / DEMO, ignore_errors=True)
    python("scripts/demo/make_demo_text.py", "--out", str(DEMO / "text"))
    python("scripts/demo/make_demo_tasks.py", "--out", str(DEMO / "tasks"), "--tasks", "60")
    for name, what in JOBS.items():
        print(f"\n== {what}", flush=True)
        python("-m", "pipeline.run", f"+experiment=demo_{name}")
        python("-m", "pipeline.verify", f"store.path={DEMO / 'stores' / name}")
    for name in JOBS:
        show(DEMO / "stores" / name)
    show_features(DEMO / "stores" / "text")
    page = f"inspect.html={DEMO / 'features.html'}"
    python("-m", "pipeline.inspect", f"store.path={DEMO / 'stores' / 'text'}", page)
    print(f"\nThe demo took {time.monotonic() - began:.0f} s.")


def show(path: Path) -> None:
    """Prints a store's contents and the lines that read it. These lines are also run here."""
    store = ActivationStore.open(str(ROOT / path))
    size_mib = sum(file.stat().st_size for file in (ROOT / path).rglob("*") if file.is_file()) / (1 << 20)
    key = store.keys[0].name
    sites = ", ".join(store.sites)
    activations = store.read(key, rows=0)
    print(f"\n{path}: {store.num_tokens:,} tokens, layers {store.layers}, sites {sites}, {size_mib:.1f} MiB")
    print("  from pipeline.store import ActivationStore")
    print(f'  store = ActivationStore.open("{path}")')
    print(f'  store.read("{key}", rows=0)  # {activations.dtype} {activations.shape}')


def show_features(path: Path) -> None:
    """Prints what some features of the bundled SAE fire on: their strongest firings with the surrounding text."""
    store, tokenizer = ActivationStore.open(str(ROOT / path)), load_tokenizer(str(ROOT / "pipeline/assets/tiny-qwen2"))
    statistics = store.feature_statistics(SAE)
    frequency = statistics.count / statistics.tokens
    explained = f"which explain {statistics.explained_variance:.1%} of its variance"
    print(f"\n{path}: {len(frequency)} features of {SAE}, {statistics.l0:.0f} per token, {explained}")
    print(f'  store.feature_statistics("{SAE}")  # how often each feature fires, mean, maximum')
    print(f'  store.feature("{SAE}", 12, top=2)  # the strongest firings of feature 12')
    for share in (0.004, 0.006, 0.01, 0.02):
        feature = int(abs(frequency - share).argmin())
        firings = store.feature(SAE, feature, top=3)
        print(f"  feature {feature} fires in {frequency[feature]:.2%} of tokens:")
        for row, slot, value in zip(firings.rows.tolist(), firings.slots.tolist(), firings.values, strict=True):
            rows = store.read_tokens(row)
            document = np.flatnonzero(rows.segments == rows.segments[slot])
            places = document[document < slot][-8:], [slot], document[document > slot][:4]
            parts = [tokenizer.decode(rows.tokens[at]) for at in places]
            print(f"    {value:5.1f}  {' '.join('{}[{}]{}'.format(*parts).split())}")


if __name__ == "__main__":
    main()
