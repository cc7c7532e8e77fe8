"""The watchdog ends a run that hangs, and no other."""

import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.heavy

HANGS = {
    "holds the lock of Python": "{{ n ** (n ** n) }}",
    "runs Python code": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
}
PROGRAM = """
    import time
    from types import SimpleNamespace
    from pipeline.data.text.templates import TextTemplate
    from pipeline.job.watchdog import Watchdog, time_limit

    metrics = SimpleNamespace(last_step=0.0, stages={"feed": "work"})
    with Watchdog(metrics, 0.4):
        for _ in range(10):
            time.sleep(0.1)
            metrics.last_step = time.monotonic()
    time.sleep(1)
    print("a run that goes on is left alone", flush=True)
    with %s:
        TextTemplate(%r)({"n": 9})
"""


@pytest.mark.parametrize(
    ("hang", "limit"),
    [*((hang, "Watchdog(metrics, 0.5)") for hang in HANGS), ("holds the lock of Python", "time_limit(0.5)")],
)
def test_a_template_that_hangs_ends_the_process(hang, limit):
    program = textwrap.dedent(PROGRAM) % (limit, HANGS[hang])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "a run that goes on is left alone\n")
    assert "in render" in done.stderr
