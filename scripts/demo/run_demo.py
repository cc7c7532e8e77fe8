"""The demo: the main job on text and on ARC tasks, verified; where it went and how fast, and what features fire on.

Needs no network. Everything it makes is under build/demo, and made anew each time.
"""

import shutil
import subprocess
import sys
import time
from pathlib import Path

from pipeline.data.text.tokenizer import TextTokenizer, load_tokenizer
from pipeline.store import ActivationStore

ROOT = Path(__file__).resolve().parents[2]
DEMO = Path("build/demo")

JOBS = {
    "text": "FineWeb-schema documents made from this Python's own documentation",
    "arc": "ARC-AGI-format tasks, each once as it is and once augmented",
}

SAE = "blocks.4.resid_post"  # what the bundled SAE encodes
SHOWN_FREQUENCIES = (0.004, 0.006, 0.01, 0.02)  # about, of the features that are shown
SHOWN_FIRINGS = 3  # of each
TOKENS_BEFORE, TOKENS_AFTER = 8, 4


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
    page = [f"inspect.features_html={DEMO / 'features.html'}", "inspect.extremes=4"]
    python("-m", "pipeline.inspect", f"store.path={DEMO / 'stores' / 'text'}", *page)
    print(f"\nThe demo took {time.monotonic() - began:.0f} s.")


def show(path: Path) -> None:
    """What a store holds, and the lines that read it back: the lines are run, not only printed."""
    store = ActivationStore.open(str(ROOT / path))
    size_mib = sum(file.stat().st_size for file in (ROOT / path).rglob("*") if file.is_file()) / (1 << 20)
    layer, site = store.layers[0], str(store.sites[0])
    sites = ", ".join(store.sites)
    activations = store.read(layer=layer, site=site, rows=0)
    print(f"\n{path}: {store.num_tokens:,} tokens, layers {store.layers}, sites {sites}, {size_mib:.1f} MiB")
    print("  from pipeline.store import ActivationStore")
    print(f'  store = ActivationStore.open("{path}")')
    print(f'  store.read(layer={layer}, site="{site}", rows=0)  # {activations.dtype} {activations.shape}')


def show_features(path: Path) -> None:
    """What some features of the bundled SAE fire on: the firings of each that are its strongest, with text around."""
    store, tokenizer = ActivationStore.open(str(ROOT / path)), load_tokenizer(str(ROOT / "pipeline/assets/tiny-qwen2"))
    statistics = store.feature_statistics(SAE)
    frequency = statistics.count / statistics.tokens
    print(f"\n{path}: {len(frequency)} features of {SAE}, of which {statistics.l0:.0f} fire in a token")
    print(f'  store.feature_statistics("{SAE}")  # how often each fires, mean, maximum')
    print(f'  store.feature("{SAE}", 12, top=2)  # its strongest firings')
    for share in SHOWN_FREQUENCIES:
        feature = int(abs(frequency - share).argmin())
        firings = store.feature(SAE, feature, top=SHOWN_FIRINGS)
        print(f"  feature {feature} fires in {frequency[feature]:.2%} of tokens:")
        for row, slot, value in zip(firings.rows, firings.slots, firings.values, strict=True):
            print(f"    {value:5.1f}  {marked(store, tokenizer, int(row), int(slot))}")


def marked(store: ActivationStore, tokenizer: TextTokenizer, row: int, slot: int) -> str:
    """The text around a token of a row, the token in brackets."""
    rows = store.read_tokens(row)
    window = [
        t for t in range(max(0, slot - 8), min(slot + 5, store.length)) if rows.segments[t] == rows.segments[slot]
    ]
    parts = [tokenizer.decode(rows.tokens[[t]]) for t in window]
    parts[window.index(slot)] = f"[{parts[window.index(slot)]}]"
    return " ".join("".join(parts).split())


if __name__ == "__main__":
    main()
