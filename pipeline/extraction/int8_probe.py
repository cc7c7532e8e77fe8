"""What int8 costs, of weights and of the cache of generation: the error of every captured activation, measured once,
when a store is created.

The same rows go through the layers with and without int8, one layer at a time, so that a model that fits as int8 only
can be measured too. It happens on one device of one process, without the others, in plain XLA attention: the
figures do not depend on the devices of the job.
"""

import logging
import math

from pipeline.config.choices import ActivationsDtype
from pipeline.core.sites import FINAL_NORM, ActivationKey
from pipeline.generation.cache import attend_rounded
from pipeline.job.opening import Job
from pipeline.step.int8_errors import Rounding, int8_errors

_PROBE_TOKENS = 1024
_DIGITS = 3  # what does not depend on the number of threads or the kind of device

log = logging.getLogger("pipeline")


def of_weights(job: Job) -> dict[str, float | None]:
    """||a_int8 - a|| / ||a|| by array name, over the valid tokens of the data's first rows; {} where there are none.

    None where that is no number: a is 0, or not finite.
    """
    inputs = job.config.model.activations_dtype is ActivationsDtype.int8
    return _measure(job, "weights", (), Rounding(weights=True, inputs=inputs))


def of_cache(job: Job) -> dict[str, float | None]:
    """The same of int8 keys and values at all positions, and also of what the head reads, by which tokens are chosen.
    Of the weights as they are."""
    return _measure(job, "keys and values", (FINAL_NORM,), Rounding(attend=attend_rounded))


def _measure(job: Job, what: str, more: tuple[ActivationKey, ...], rounding: Rounding) -> dict[str, float | None]:
    rows = job.first_rows(_PROBE_TOKENS)
    if rows is None:
        return {}
    keys = tuple(dict.fromkeys((*job.plan.step.keys, *(encoder.spec.key for encoder in job.encoders), *more)))
    errors_by_key = int8_errors(job.model, keys, rows, str(job.config.model.dtype), rounding)
    errors = {key.name: float(f"{e:.{_DIGITS}g}") if math.isfinite(e) else None for key, e in errors_by_key.items()}
    log.info("int8 %s, relative error: %s", what, ", ".join(f"{name} {error}" for name, error in errors.items()))
    return errors
