"""What int8 weights cost: the error of every captured activation, measured once, when a store is created.

The same rows go through the layers with float and with int8 weights, one layer at a time, so that a model that fits as
int8 only can be measured too. It happens on one device of one process, without the others, in plain XLA attention: the
figures do not depend on the devices of the job.
"""

import logging
import math

from pipeline.config.choices import ActivationsDtype
from pipeline.job.opening import Job
from pipeline.step.weights_error import int8_errors

_PROBE_TOKENS = 1024
_DIGITS = 3  # what does not depend on the number of threads or the kind of device

log = logging.getLogger("pipeline")


def measure(job: Job) -> dict[str, float | None]:
    """||a_int8 - a|| / ||a|| by array name, over the valid tokens of the data's first rows; {} where there are none.

    None where that is no number: a is 0, or not finite.
    """
    rows = job.first_rows(_PROBE_TOKENS)
    if rows is None:
        return {}
    options = job.config.model
    keys = tuple(dict.fromkeys((*job.plan.step.keys, *(encoder.spec.key for encoder in job.encoders))))
    with_inputs = options.activations_dtype is ActivationsDtype.int8
    errors_by_key = int8_errors(job.model, keys, rows, str(options.dtype), with_inputs)
    errors = {key.name: float(f"{e:.{_DIGITS}g}") if math.isfinite(e) else None for key, e in errors_by_key.items()}
    log.info("int8 weights, relative error: %s", ", ".join(f"{name} {error}" for name, error in errors.items()))
    return errors
