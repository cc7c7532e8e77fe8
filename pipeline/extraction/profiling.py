"""run.profile: a jax.profiler trace of some steps, for ui.perfetto.dev and scripts/bench/device_idle.py."""

import logging

import jax

from pipeline.cluster.devices import topology
from pipeline.config.schema import RunOptions

log = logging.getLogger("pipeline")


class ProfileWindow:
    """Traces `run.profile_steps` steps, after skipping `run.profile_after`, into a directory of this process."""

    def __init__(self, options: RunOptions) -> None:
        self._directory = f"{options.profile}/process-{topology(options).index}"
        self._first = options.profile_after
        self._stop = options.profile_after + options.profile_steps
        self._steps = 0
        self._is_on = False

    def before_step(self) -> None:
        """Call it before each step. At the right step, starts the trace, or stops and writes it (takes seconds)."""
        if self._steps == self._first:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # tracing every Python call would slow down the steps
            jax.profiler.start_trace(self._directory, create_perfetto_trace=True, profiler_options=options)
            self._is_on = True
        elif self._steps == self._stop:
            self.close()
        self._steps += 1

    def close(self) -> None:
        """Stops a running trace. Warns if the trace never started."""
        if self._is_on:
            self._is_on = False
            jax.profiler.stop_trace()
            log.info("wrote a trace of %d steps to %s", self._steps - self._first, self._directory)
        elif self._steps <= self._first:
            log.warning("no trace was written: the run had only %d steps. Lower run.profile_after.", self._steps)
