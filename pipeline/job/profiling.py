"""run.profile: a jax.profiler trace of some steps, for ui.perfetto.dev and scripts/bench/device_idle.py."""

import logging

import jax

from pipeline.cluster.devices import topology
from pipeline.config.schema import RunOptions

log = logging.getLogger("pipeline")

_FIRST, _STOP = 3, 23  # the traced steps: the first ones are slower


class ProfileWindow:
    """Traces 20 steps, after the first three, into a directory of this process."""

    def __init__(self, options: RunOptions) -> None:
        self._directory = f"{options.profile}/process-{topology(options).index}"
        self._steps = 0
        self._is_on = False

    def before_step(self) -> None:
        """Call it before each step. At the right step, starts the trace, or stops and writes it (takes seconds)."""
        if self._steps == _FIRST:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # tracing every Python call would slow down the steps
            jax.profiler.start_trace(self._directory, create_perfetto_trace=True, profiler_options=options)
            self._is_on = True
        elif self._steps == _STOP:
            self.close()
        self._steps += 1

    def close(self) -> None:
        """Stops a running trace. Warns if the trace never started."""
        if self._is_on:
            self._is_on = False
            jax.profiler.stop_trace()
            log.info("wrote a trace of %d steps to %s", self._steps - _FIRST, self._directory)
        elif self._steps <= _FIRST:
            log.warning("no trace was written: the run had only %d steps. Raise run.max_tokens.", self._steps)
