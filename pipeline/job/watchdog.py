"""Reports a run that makes no progress, and ends it if that does not change.

A thread that waits lets the watchdog's thread report and end the run. A thread that computes without releasing Python's
lock, such as a template that multiplies huge numbers, stops that thread, too: `faulthandler`'s timer then ends the run.
"""

import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Protocol

from pipeline.core.errors import EXIT_FAILED

log = logging.getLogger("pipeline")

_BEFORE_EXIT_S = 10.0
_MAX_S = 1e8  # a longer timeout, three years, stands for none: a library must not end its process


class Watched(Protocol):
    """When the last step ended (`time.monotonic`), and the current stage of each thread."""

    last_step: float
    stages: Mapping[str, str]


class Watchdog:
    """Context manager that logs what each thread is doing, with tracebacks, if no step finishes within `timeout_s`.

    After twice that time it calls `before_exit`, for at most 10 s, and ends the process with exit code 1, because a
    collective, or a server that neither answers nor fails, cannot be interrupted. Committed blocks stay valid, and the
    next start resumes.
    """

    def __init__(self, metrics: Watched, timeout_s: float, before_exit: Callable[[], None] = lambda: None) -> None:
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._before_exit = before_exit
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> None:
        self._metrics.last_step = time.monotonic()
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        reported = 0.0  # `last_step` at the last report
        with time_limit(self._timeout_s) as restart:
            while not self._done.wait(min(self._timeout_s / 4, 10)):
                restart()
                last_step = self._metrics.last_step
                stalled_s = time.monotonic() - last_step
                if stalled_s >= 2 * self._timeout_s:
                    try:
                        self._report(logging.ERROR, stalled_s, " Exiting; run the same command again to resume.")
                        last = threading.Thread(target=self._before_exit, daemon=True)
                        last.start()
                        last.join(_BEFORE_EXIT_S)
                        logging.shutdown()
                    finally:
                        os._exit(EXIT_FAILED)
                if stalled_s >= self._timeout_s and reported != last_step:
                    reported = last_step
                    self._report(logging.WARNING, stalled_s)

    def _report(self, level: int, stalled_s: float, then: str = "") -> None:
        """Logs what each thread is doing, and prints the stack of every thread."""
        stages = ", ".join(f"{thread}: {stage}" for thread, stage in list(self._metrics.stages.items()))
        what = f"no step has finished for {stalled_s:.0f} s ({stages}; pipeline/job/metrics.py explains the stages)."
        log.log(level, "%s%s", what, then)
        with suppress(Exception):  # standard error may not be a file, as in a notebook
            faulthandler.dump_traceback()


@contextmanager
def time_limit(timeout_s: float) -> Iterator[Callable[[], None]]:
    """Prints the stacks and ends the process, with exit code 1, after twice `timeout_s`, even if no thread can run
    Python code. Yields a function that starts the time anew."""

    def restart() -> None:
        faulthandler.dump_traceback_later(2 * timeout_s, exit=True, file=sys.__stderr__)

    if timeout_s > _MAX_S:
        yield lambda: None
        return
    restart()
    try:
        yield restart
    finally:
        faulthandler.cancel_dump_traceback_later()
