"""A run imports only what it uses, and quickly. (pyarrow imports pandas if it is installed.)"""

import subprocess
import sys

from tests.jobs import ROOT, write_text

HEAVY = ("torch", "transformers", "datasets", "gcsfs", "flax", "scipy", "aiohttp", "matplotlib")
HEAVY += ("jax.experimental.pallas",)
SHOW = f"import sys; print([name for name in {HEAVY} if name in sys.modules])"


def python(program: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    ).stdout


def test_a_run_on_local_files_imports_no_unused_heavy_packages(tmp_path):
    overrides = [f"data.path={write_text(tmp_path / 'text', files=1, documents=5)}", f"store.path={tmp_path / 'store'}"]
    program = f"""
from pipeline.config import composing
from pipeline.extraction.job_run import run
run(composing.compose({[*overrides, "data=fineweb", "run.progress=false"]}))
{SHOW}"""
    assert python(program).split("\n")[-2] == "[]"
    assert (tmp_path / "store" / "zarr.json").exists()


def test_importing_the_entry_point_is_quick():
    """The best CPU time of three, relative to the packages that every run needs, since machines differ."""
    program = "import time, {}; print(time.process_time())"

    def seconds(modules: str) -> float:
        return min(float(python(program.format(modules))) for _ in range(3))

    assert seconds("pipeline.run") < 2 * seconds("jax, tensorstore, pyarrow.parquet, hydra, tokenizers")
