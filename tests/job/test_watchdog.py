"""The watchdog reads metrics that other threads write at the same time."""

from contextlib import closing

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
