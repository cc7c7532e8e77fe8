"""Stop requests by SIGTERM and SIGINT, on which all processes of a job agree."""

import itertools
import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from jax.experimental import multihost_utils

from pipeline.cluster import processes
from pipeline.core.errors import Interrupted

log = logging.getLogger("pipeline")


_steps = itertools.count()  # over all jobs of a sweep, since a sync point's number must be new


class StopRequest:
    """A request to stop, by SIGTERM or SIGINT to any process of the job. All processes stop before the same step.

    A second SIGINT raises KeyboardInterrupt as usual.

    noticed: whether this process should stop. With several processes, true only after they have agreed on the step.
    """

    def __init__(self) -> None:
        self.noticed = False
        self._shared = processes.count() > 1
        self.signal_name = "SIGTERM"

    def before_step(self) -> bool:
        """Whether to stop before the next step. Every process calls this exactly once per step."""
        if self._shared and not self.noticed and multihost_utils.reached_preemption_sync_point(next(_steps)):
            self.noticed = True
        return self.noticed

    def check(self) -> None:
        """Raises Interrupted if a stop was requested. For use before the first step."""
        if self.noticed:
            raise Interrupted(f"stopped by {self.signal_name} before the first step. Run the same command again.")

    def on_signal(self, number: int, _frame: object) -> None:
        name = signal.Signals(number).name
        log.warning("%s received: stopping before the next step; Ctrl-C aborts at once", name)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._shared:
            os.kill(os.getpid(), signal.SIGTERM)  # JAX's own handler notifies the other processes
        else:
            self.signal_name = name
            self.noticed = True


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Turns SIGTERM and SIGINT into a StopRequest. With several processes, JAX handles SIGTERM.

    Does not change signal handling in threads other than the main thread, which alone may do so.
    """
    stop = StopRequest()
    numbers = (signal.SIGINT,) if processes.count() > 1 else (signal.SIGTERM, signal.SIGINT)
    if threading.current_thread() is not threading.main_thread():
        numbers = ()
    previous = {number: signal.signal(number, stop.on_signal) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
