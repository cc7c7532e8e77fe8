"""The watchdog reads metrics that other threads write at the same time."""

import threading
import time

from pipeline.job.metrics import Metrics, Stage
from pipeline.job.watchdog import Watchdog


def test_the_watchdog_reports_while_threads_enter_stages():
    metrics = Metrics(total_tokens=None, stored_tokens=0, progress=False, interval_s=10)
    watchdog, done = Watchdog(metrics, 600), threading.Event()

    def enter() -> None:
        number, stages = 0, list(Stage)
        while not done.is_set():
            metrics.stages = {} if number % 1000 == 0 else metrics.stages
            with metrics.stage(stages[number % len(stages)]):
                number += 1

    threads = [threading.Thread(target=enter) for _ in range(2)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:
        assert "no step has finished for 5 s" in watchdog._report(5.0)
    done.set()
    for thread in threads:
        thread.join()
    metrics.close()
