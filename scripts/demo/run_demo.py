"""The demo: the main job on text and on ARC tasks, verified, with where it went and how fast.

Needs no network. Everything it makes is under build/demo, and made anew each time.
"""

import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEMO = Path("build/demo")

JOBS = {
    "text": "FineWeb-schema documents made from this Python's own documentation",
    "arc": "ARC-AGI-format tasks, each once as it is and once augmented",
}


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
    print(f"\nThe demo took {time.monotonic() - began:.0f} s.")


def show(path: Path) -> None:
    """What a store holds, and the lines that read it back: the lines are run, not only printed."""
    from pipeline.store import ActivationStore

    store = ActivationStore.open(str(ROOT / path))
    size_mib = sum(file.stat().st_size for file in (ROOT / path).rglob("*") if file.is_file()) / (1 << 20)
    layer, site = store.layers[0], str(store.sites[0])
    sites = ", ".join(store.sites)
    activations = store.read(layer=layer, site=site, rows=0)
    print(f"\n{path}: {store.num_tokens:,} tokens, layers {store.layers}, sites {sites}, {size_mib:.1f} MiB")
    print("  from pipeline.store import ActivationStore")
    print(f'  store = ActivationStore.open("{path}")')
    print(f'  store.read(layer={layer}, site="{site}", rows=0)  # {activations.dtype} {activations.shape}')


if __name__ == "__main__":
    main()
