"""The errors that quantised weights, and an int8 cache of generation, cause in every captured activation.

Measured once, when a store is created. The same rows go through the layers with and without rounding, one layer at a
time, so that a model that fits into memory only as int8 or int4 can be measured too. The measurement uses one device of
one process and plain XLA attention, so the errors do not depend on the devices of the job.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array, Bool, Float, Int32, Num

from pipeline.core.sites import FINAL_NORM, ActivationKey, Site
from pipeline.job.generation.cache import attend_rounded
from pipeline.job.job import Job
from pipeline.models.architecture import LayerKind
from pipeline.models.attention.spec import Attend
from pipeline.models.attention.xla import attend_xla
from pipeline.models.decoder import LayerRows, LayerWeights, TokenBatch, embed, layer_sites
from pipeline.models.layers import Rows, norm
from pipeline.models.registry import Model
from pipeline.models.runs import layer_runs, residual_index, single_layers
from pipeline.step.compiler import matmul_precision
from pipeline.store.write.store_writer import StoreWriter

_PROBE_TOKENS = 1024
_DIGITS = 3  # significant digits that do not depend on the number of threads or the type of device

log = logging.getLogger("pipeline")

Errors = dict[str, dict[str, float | None]]  # the fields of RoundingError by array name


def measure_rounding(job: Job, store: StoreWriter) -> None:
    """Records the errors of quantised weights, and of an int8 cache of generation, unless the store has them."""
    dtype = job.config.model.quantised
    if dtype and store.root.weights_error is None:
        store.record(weights_error=_measure(job, f"{dtype} weights", quantised=dtype))
    has_int8_cache = job.plan.generation is not None and job.config.data.has_int8_cache
    if has_int8_cache and store.root.cache_error is None:
        # With the input of the head, because it determines which tokens are generated.
        error = _measure(job, "int8 keys and values", FINAL_NORM, attend_rounded=attend_rounded)
        store.record(cache_error=error)


def _measure(job: Job, what: str, *extra_keys: ActivationKey, **rounding: str | Attend) -> Errors:
    """||a_rounded - a|| / ||a|| by array name, for the valid tokens of the data's first rows: of all together, and the
    median of each one's. {} if there are no rows.

    An error is None if it is undefined: a is 0 or not finite.
    """
    rows = job.first_rows(_PROBE_TOKENS)
    if rows is None:
        return {}
    keys = tuple(dict.fromkeys((*job.plan.step.keys, *(encoder.spec.key for encoder in job.encoders), *extra_keys)))
    errors_by_key = rounding_errors(job.model, keys, rows, str(job.config.model.dtype), **rounding)
    errors = {
        key.name: {what: float(f"{e:.{_DIGITS}g}") if math.isfinite(e) else None for what, e in error._asdict().items()}
        for key, error in errors_by_key.items()
    }
    shown = (f"{name} {error['relative_error']} ({error['token_median']})" for name, error in errors.items())
    log.info("%s, relative error (median of tokens): %s", what, ", ".join(shown))
    return errors


class RoundingError(NamedTuple):
    """The relative error of all tokens together, in which few tokens with large values weigh most, and the median of
    each token's."""

    relative_error: float
    token_median: float


def rounding_errors(
    model: Model,
    keys: Sequence[ActivationKey],
    arrays: Mapping[str, Int32[np.ndarray, "B T"]],
    dtype: str,
    quantised: str | None = None,
    attend_rounded: Attend = attend_xla,
) -> dict[ActivationKey, RoundingError]:
    """The error of each key, or for `router_indices` the share of experts that changed. `arrays` are tokens,
    segments and positions; `dtype` is the compute dtype. quantised: the dtype that weights are rounded to.
    attend_rounded: may round keys and values."""
    device = SingleDeviceSharding(jax.local_devices()[0])
    single = (*keys, *single_layers(keys, model.arch))
    runs, leaves = layer_runs(single, model.arch), model.leaves(single)
    run_leaves = leaves.pop("runs")
    tokens, segments, positions = (jnp.asarray(arrays[name]) for name in ("tokens", "segments", "positions"))

    @partial(jax.jit, static_argnames=("kind", "wanted", "attend"))
    def layer(
        x: Array, rows: Rows, weights: LayerWeights, kind: LayerKind, wanted: tuple[Site, ...], attend: Attend
    ) -> tuple[Array, dict[Site, Array]]:
        x, sites = layer_sites(model.arch, x, weights, rows, kind, attend)
        return x, {site: sites[site] for site in dict.fromkeys((*wanted, Site.k, Site.v)) if site in sites}

    with jax.default_matmul_precision(matmul_precision(dtype)):
        params = model.load_leaves(leaves, dtype, device)
        x = x_rounded = embed(model.arch, params, tokens, positions)
        batch = TokenBatch(tokens, segments, positions)
        rows, rows_rounded = (LayerRows(model.arch, params, batch, keys, x, len(runs)) for _ in range(2))
        residuals, inner = [RoundingError(0.0, 0.0)], {}
        for run, layer_leaves in zip(runs, run_leaves, strict=True):
            kind = model.arch.kind(run.first)
            inner_keys = [key for key in keys if residual_index(key, model.num_layers) is None]
            wanted = tuple(key.site for key in inner_keys if key.layer == run.first)
            weights = model.load_leaves(layer_leaves, dtype, device)
            x, sites = layer(x, rows.layer(run.first), weights, kind, wanted, attend_xla)
            rows.keep(run.first, sites)
            if quantised:
                del weights
                weights = model.load_leaves(layer_leaves, dtype, device, quantised=quantised)
            x_rounded, sites_rounded = layer(
                x_rounded, rows_rounded.layer(run.first), weights, kind, wanted, attend_rounded
            )
            rows_rounded.keep(run.first, sites_rounded)
            residuals.append(_error(x_rounded, x, segments != 0))
            for site in wanted:
                inner[ActivationKey(run.first, site)] = _error(sites_rounded[site], sites[site], segments != 0)
        if "final_norm" in params:
            normed = (norm(stream, params, "final_norm", model.arch) for stream in (x_rounded, x))
            inner[FINAL_NORM] = _error(*normed, segments != 0)
    return {key: inner[key] if key in inner else residuals[residual_index(key, model.num_layers)] for key in keys}


def _error(got: Num[Array, "B T *D"], expected: Num[Array, "B T *D"], valid: Bool[Array, "B T"]) -> RoundingError:
    return RoundingError(*map(float, (_changed if got.dtype == jnp.int32 else _relative)(got, expected, valid)))


@jax.jit
def _relative(
    got: Float[Array, "B T *D"], expected: Float[Array, "B T *D"], valid: Bool[Array, "B T"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    got, expected = (values.reshape(*valid.shape, -1).astype(jnp.float32) for values in (got, expected))
    errors, norms = (jnp.where(valid, jnp.linalg.norm(x, axis=-1), 0) for x in (got - expected, expected))
    each = jnp.where(valid, errors / norms, jnp.nan)
    return jnp.linalg.norm(errors.ravel()) / jnp.linalg.norm(norms.ravel()), jnp.nanmedian(each)


@jax.jit
def _changed(
    got: Int32[Array, "B T A"], expected: Int32[Array, "B T A"], valid: Bool[Array, "B T"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The share of the tokens' experts that are not among the expected ones."""
    shares = jnp.where(valid, (got[..., None] != expected[:, :, None]).all(axis=-1).mean(axis=-1), jnp.nan)
    return jnp.nanmean(shares), jnp.nanmedian(shares)
