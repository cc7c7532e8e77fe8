"""Odd values in the configuration give a plan or one message with exit code 2: a sample of cases, and a long run."""

import os
import subprocess
import sys

import pytest

from tests.jobs import ROOT


@pytest.mark.parametrize(
    ("cases", "seed"),
    [
        (15, 0),
        pytest.param(1500, 1, marks=pytest.mark.slow),  # every key with every kind of value, twice
    ],
)
def test_odd_values_for_any_key_give_a_plan_or_one_message(cases, seed):
    """In another process, since a case may hang, use much memory, or change process-wide settings."""
    arguments = ["-m", "tests.config.fuzz_config", "--cases", str(cases), "--seed", str(seed)]
    offline = os.environ | {"HF_HUB_OFFLINE": "1"}  # otherwise unknown names would be looked up on the Hub
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=offline, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert f"{cases} cases" in done.stdout
    assert " 0 problems" in done.stdout
