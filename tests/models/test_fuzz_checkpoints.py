"""Random damage to a checkpoint's files ends in a model or in one clear error, in bounded time and memory."""

import json
import queue
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

from tests.jobs import ROOT
from tests.models.fuzz_checkpoints import run_case

pytestmark = pytest.mark.heavy
LIMIT_CPU_S, LIMIT_MIB = 10, 2048
CASES = 3000


@pytest.mark.parametrize("first", range(0, 150, 10))
def test_damage_ends_in_a_model_or_in_one_error(first: int, tmp_path: Path) -> None:
    for seed in range(first, first + 10):
        folder = tmp_path / str(seed)
        folder.mkdir()
        assert_clear(run_case(seed, folder))


def assert_clear(result: dict) -> None:
    assert result["outcome"] in ("ok", 1, 2), result
    assert result["outcome"] == "ok" or 40 < len(result["message"]) < 2000, result
    assert result["cpu_s"] < LIMIT_CPU_S, result


@pytest.mark.slow
def test_thousands_of_damaged_checkpoints_stay_within_memory() -> None:
    """In another process, whose memory is measured, and which is killed if a case takes too long."""
    command = [sys.executable, "-m", "tests.models.fuzz_checkpoints", "1000", str(1000 + CASES)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=lambda: [lines.put(line) for line in process.stdout], daemon=True).start()
        outcomes = Counter()
        try:
            for _ in range(CASES):
                result = json.loads(lines.get(timeout=120))  # a case that hangs needs no CPU
                assert_clear(result)
                assert result["peak_mib"] < LIMIT_MIB, result
                outcomes[result["outcome"]] += 1
        finally:
            process.kill()
    print(f"{CASES} cases: {dict(outcomes)}, peak {result['peak_mib']} MiB")
    assert outcomes["ok"] > 100
    assert outcomes[2] > 1000
