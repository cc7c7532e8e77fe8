"""Damaged inputs end in blocks or in one error with exit code 2; see `fuzz_inputs`."""

import subprocess
import sys

import pytest

from tests.jobs import ROOT


@pytest.mark.parametrize(
    ("cases", "seed"),
    [
        (52, 0),
        pytest.param(5000, 1, marks=pytest.mark.slow),  # four minutes, since few cases reach some parts of each kind
    ],
)
def test_damage_ends_in_blocks_or_one_error(cases, seed):
    """In another process, which a case may end or block."""
    arguments = ["tests/data/fuzz_inputs.py", str(cases), str(seed)]
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert f"{cases} cases" in done.stdout
