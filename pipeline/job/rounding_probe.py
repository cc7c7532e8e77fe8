"""The errors that quantised weights, and an int8 cache of generation, cause in every captured activation.

Measured once, when a store is created. The same rows go through the layers with and without rounding, one layer at a
time, so that a model that fits into memory only as int8 or int4 can be measured too. The measurement uses one device of
one process and plain XLA attention, so the errors do not depend on the devices of the job.
"""

import logging
import math

from pipeline.core.sites import FINAL_NORM, ActivationKey
from pipeline.job.generation.cache import attend_rounded
from pipeline.job.job import Job
from pipeline.step.rounding_errors import Rounding, rounding_errors
from pipeline.store.write.store_writer import StoreWriter

_PROBE_TOKENS = 1024
_DIGITS = 3  # significant digits that do not depend on the number of threads or the type of device

log = logging.getLogger("pipeline")

Errors = dict[str, dict[str, float | None]]  # the fields of RoundingError by array name


def measure_rounding(job: Job, store: StoreWriter) -> None:
    """Records the errors of quantised weights, and of an int8 cache of generation, unless the store has them."""
    dtype = job.config.model.quantised
    if dtype and store.root.weights_error is None:
        store.record(weights_error=_measure(job, f"{dtype} weights", Rounding(weights=dtype)))
    has_int8_cache = job.plan.generation is not None and job.config.data.has_int8_cache
    if has_int8_cache and store.root.cache_error is None:
        # With the input of the head, because it determines which tokens are generated.
        error = _measure(job, "int8 keys and values", Rounding(attend=attend_rounded), FINAL_NORM)
        store.record(cache_error=error)


def _measure(job: Job, what: str, rounding: Rounding, *extra_keys: ActivationKey) -> Errors:
    """||a_rounded - a|| / ||a|| by array name, for the valid tokens of the data's first rows: of all together, and the
    median of each one's. {} if there are no rows.

    An error is None if it is undefined: a is 0 or not finite.
    """
    rows = job.first_rows(_PROBE_TOKENS)
    if rows is None:
        return {}
    keys = tuple(dict.fromkeys((*job.plan.step.keys, *(encoder.spec.key for encoder in job.encoders), *extra_keys)))
    errors_by_key = rounding_errors(job.model, keys, rows, str(job.config.model.dtype), rounding)
    errors = {
        key.name: {what: float(f"{e:.{_DIGITS}g}") if math.isfinite(e) else None for what, e in error._asdict().items()}
        for key, error in errors_by_key.items()
    }
    shown = (f"{name} {error['relative_error']} ({error['token_median']})" for name, error in errors.items())
    log.info("%s, relative error (median of tokens): %s", what, ", ".join(shown))
    return errors
