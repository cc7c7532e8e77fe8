"""A run imports only what it uses. (pyarrow imports pandas if it is installed.)"""

import subprocess
import sys

import pytest

from tests.jobs import ROOT, write_text

pytestmark = pytest.mark.heavy
HEAVY = ("torch", "transformers", "datasets", "gcsfs", "flax", "scipy", "aiohttp", "matplotlib")
HEAVY += ("jax.experimental.pallas",)


def test_a_run_on_local_files_imports_no_unused_heavy_packages(tmp_path):
    """Nor many other modules besides those that every run needs."""
    overrides = [f"data.path={write_text(tmp_path / 'text', files=1, documents=5)}", f"store.path={tmp_path / 'store'}"]
    program = f"""
import sys
import jax, tensorstore, pyarrow.parquet, hydra, tokenizers
needed = len(sys.modules)
from pipeline.config import composing
from pipeline.job.running import run
run(composing.compose({[*overrides, "data=fineweb", "run.progress=false"]}))
print([name for name in {HEAVY} if name in sys.modules])
print(needed, len(sys.modules))"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    heavy, numbers = done.stdout.splitlines()[-2:]
    assert heavy == "[]"
    needed, all_modules = map(int, numbers.split())
    assert all_modules < 2 * needed
    assert (tmp_path / "store" / "zarr.json").exists()
