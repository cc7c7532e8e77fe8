"""How far int8 weights take activations from those of the weights as they are."""

from collections.abc import Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array, Bool, Float, Int32

from pipeline.core.sites import FINAL_NORM, ActivationKey, Site
from pipeline.models.architecture import LayerKind
from pipeline.models.attention.xla import attend_xla
from pipeline.models.decoder import Batch, LayerWeights, embed, layer_rows, layer_sites
from pipeline.models.int8_weights import with_int8_inputs
from pipeline.models.layers import norm
from pipeline.models.registry import Model
from pipeline.models.runs import layer_runs, residual_index
from pipeline.step.compiler import matmul_precision


def int8_errors(
    model: Model,
    keys: Sequence[ActivationKey],
    rows: Mapping[str, Int32[np.ndarray, "B T"]],
    dtype: str,
    with_inputs: bool = False,
) -> dict[ActivationKey, float]:
    """The relative error of each key; `rows` are tokens, segments and positions, and `dtype` is of computing.
    `with_inputs`: what the int8 weights multiply is int8, too."""
    device = SingleDeviceSharding(jax.local_devices()[0])
    last = max((run.stop for run in layer_runs(keys, model.arch)), default=0)
    single = (*keys, *(ActivationKey(layer, Site.resid_pre) for layer in range(last)))  # every layer is a run
    leaves = model.leaves(single)
    run_leaves = leaves.pop("runs")
    tokens, segments, positions = (jnp.asarray(rows[name]) for name in ("tokens", "segments", "positions"))

    @partial(jax.jit, static_argnames=("kind", "wanted"))
    def layer(
        x: Array, weights: LayerWeights, kind: LayerKind, wanted: tuple[Site, ...]
    ) -> tuple[Array, dict[Site, Array]]:
        of_layers = layer_rows(model.arch, Batch(tokens, segments, positions), keys)
        x, sites = layer_sites(model.arch, x, weights, of_layers, kind, attend_xla)
        return x, {site: sites[site] for site in wanted}

    with jax.default_matmul_precision(matmul_precision(dtype)):
        params = model.load_leaves(leaves, dtype, device)
        x = x_int8 = embed(model.arch, params, tokens, positions)
        residuals, inner = [0.0], {}
        for run, leaves_of_run in zip(layer_runs(single, model.arch), run_leaves, strict=True):
            kind = model.arch.kind(run.first)
            inner_keys = [key for key in keys if residual_index(key, model.num_layers) is None]
            wanted = tuple(key.site for key in inner_keys if key.layer == run.first)
            x, sites = layer(x, model.load_leaves(leaves_of_run, dtype, device), kind, wanted)
            weights = model.load_leaves(leaves_of_run, dtype, device, with_int8=True)
            x_int8, sites_int8 = layer(x_int8, with_int8_inputs(weights) if with_inputs else weights, kind, wanted)
            residuals.append(float(_relative_error(x_int8, x, segments != 0)))
            for site in wanted:
                measure = _share_of_others if site is Site.router_indices else _relative_error
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
def _share_of_others(
    got: Int32[Array, "B T A"], expected: Int32[Array, "B T A"], valid: Bool[Array, "B T"]
) -> Float[Array, ""]:
    """Of a token's experts, those that it was not sent to before."""
    is_other = (got[..., None] != expected[:, :, None]).all(axis=-1)
    return jnp.mean(is_other, where=valid[:, :, None])
