"""The relative error of activations due to int8 weights, or int8 keys and values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array, Bool, Float, Int32

from pipeline.core.sites import FINAL_NORM, ActivationKey, Site
from pipeline.models.architecture import LayerKind
from pipeline.models.attention.choosing import Attend
from pipeline.models.attention.xla import attend_xla
from pipeline.models.decoder import Batch, LayerRows, LayerWeights, embed, layer_sites
from pipeline.models.int8_weights import with_int8_inputs
from pipeline.models.layers import Rows, norm
from pipeline.models.registry import Model
from pipeline.models.runs import layer_runs, residual_index
from pipeline.step.compiler import matmul_precision


@dataclass(frozen=True)
class Rounding:
    """What is rounded to int8."""

    weights: bool = False
    inputs: bool = False  # the inputs of these weights
    attend: Attend = attend_xla  # may round keys and values


def int8_errors(
    model: Model,
    keys: Sequence[ActivationKey],
    arrays: Mapping[str, Int32[np.ndarray, "B T"]],
    dtype: str,
    rounding: Rounding,
) -> dict[ActivationKey, float]:
    """The relative error of each key, or for `router_indices` the share of experts that changed. `arrays` are tokens,
    segments and positions; `dtype` is the compute dtype."""
    device = SingleDeviceSharding(jax.local_devices()[0])
    last = max((run.stop for run in layer_runs(keys, model.arch)), default=0)
    single = (*keys, *(ActivationKey(layer, Site.resid_pre) for layer in range(last)))  # every layer is a run
    leaves = model.leaves(single)
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
        x = x_int8 = embed(model.arch, params, tokens, positions)
        batch = Batch(tokens, segments, positions)
        rows, rows_int8 = (LayerRows(model.arch, params, batch, keys, x, last) for _ in range(2))
        residuals, inner = [0.0], {}
        for run, layer_leaves in zip(layer_runs(single, model.arch), run_leaves, strict=True):
            kind = model.arch.kind(run.first)
            inner_keys = [key for key in keys if residual_index(key, model.num_layers) is None]
            wanted = tuple(key.site for key in inner_keys if key.layer == run.first)
            weights = model.load_leaves(layer_leaves, dtype, device)
            x, sites = layer(x, rows.layer(run.first), weights, kind, wanted, attend_xla)
            rows.keep(run.first, sites)
            if rounding.weights:
                del weights
                weights = model.load_leaves(layer_leaves, dtype, device, with_int8=True)
                weights = with_int8_inputs(weights, rounding.inputs)
            x_int8, sites_int8 = layer(x_int8, rows_int8.layer(run.first), weights, kind, wanted, rounding.attend)
            rows_int8.keep(run.first, sites_int8)
            residuals.append(float(_relative_error(x_int8, x, segments != 0)))
            for site in wanted:
                measure = _changed_share if site is Site.router_indices else _relative_error
                error = measure(sites_int8[site], sites[site], segments != 0)
                inner[ActivationKey(run.first, site)] = float(error)
        if "final_norm" in params:
            normed = (norm(stream, params, "final_norm", model.arch) for stream in (x_int8, x))
            inner[FINAL_NORM] = float(_relative_error(*normed, segments != 0))
    return {key: inner[key] if key in inner else residuals[residual_index(key, model.num_layers)] for key in keys}


@jax.jit
def _relative_error(
    got: Float[Array, "B T *D"], expected: Float[Array, "B T *D"], valid: Bool[Array, "B T"]
) -> Float[Array, ""]:
    got, expected = (
        jnp.where(valid[:, :, None], values.reshape(*valid.shape, -1).astype(jnp.float32), 0)
        for values in (got, expected)
    )
    return jnp.linalg.norm((got - expected).ravel()) / jnp.linalg.norm(expected.ravel())


@jax.jit
def _changed_share(
    got: Int32[Array, "B T A"], expected: Int32[Array, "B T A"], valid: Bool[Array, "B T"]
) -> Float[Array, ""]:
    """The share of the tokens' experts that are not among the expected ones."""
    is_new = (got[..., None] != expected[:, :, None]).all(axis=-1)
    return jnp.mean(is_new, where=valid[:, :, None])
