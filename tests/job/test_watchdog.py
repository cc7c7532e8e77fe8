"""The watchdog reads metrics that other threads write at the same time, and ends a run that hangs."""

import subprocess
import sys
import textwrap
from contextlib import closing

import pytest

from pipeline.job.metrics import Metrics, Stage
from pipeline.job.watchdog import Watchdog


def test_the_watchdog_reports_while_threads_enter_stages():
    class Label(str):
        """While this label is printed, a thread enters its first stage."""

        def __format__(self, _: str) -> str:
            metrics.stages[Stage.WRITER_IDLE.thread] = Stage.WRITER_IDLE.label
            return str(self)

    with closing(Metrics(total_tokens=None, stored_tokens=0, progress=False, interval_s=10)) as metrics:
        metrics.stages = {"feed": Label("work"), "loop": "data"}
        assert "no step has finished for 5 s (feed: work, loop: data; " in Watchdog(metrics, 600)._report(5.0)
        assert metrics.stages["writer"] == "idle"


HANGS = {
    "holds the lock of Python": "{{ n ** (n ** n) }}",
    "runs Python code": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
}
PROGRAM = """
    from types import SimpleNamespace
    from pipeline.data.text.templates import TextTemplate
    from pipeline.job.watchdog import Watchdog, time_limit

    template = TextTemplate({template!r})
    with {limit}:
        template({{"n": 9}})
"""


@pytest.mark.parametrize("limit", ["Watchdog(SimpleNamespace(last_step=0.0, stages={}), 0.5)", "time_limit(0.5)"])
@pytest.mark.parametrize("hang", HANGS)
def test_a_template_that_hangs_ends_the_process(hang, limit):
    program = textwrap.dedent(PROGRAM).format(template=HANGS[hang], limit=limit)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "in render" in done.stderr


def test_the_watchdog_lets_a_run_go_on():
    program = """
        import time
        from types import SimpleNamespace
        from pipeline.job.watchdog import Watchdog

        metrics = SimpleNamespace(last_step=0.0, stages={})
        with Watchdog(metrics, 0.5):
            for _ in range(15):
                time.sleep(0.1)
                metrics.last_step = time.monotonic()
        time.sleep(1.5)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=60)
