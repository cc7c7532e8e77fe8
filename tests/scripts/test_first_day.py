"""The report of a first day on an accelerator, on CPU devices."""

import os
import subprocess
import sys

import pytest

from tests.jobs import ROOT


@pytest.mark.slow
def test_first_day_writes_a_correct_report_on_cpus() -> None:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    command = [sys.executable, "-m", "scripts.first_day", "--smoke"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    report = (ROOT / "build" / "first-day" / "report.md").read_text()
    assert report in done.stdout
    assert "2 x cpu" in report
    assert (report.count("| correct |"), report.count("WRONG")) == (2, 0)
    assert "| Qwen2.5-0.5B |" in report
