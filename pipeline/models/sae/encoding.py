"""Encodes activations: which features of an SAE fire, and their values; and how well these reconstruct the activations.

Tokens are processed in tiles, so that no array holds the values of all features for all tokens. Products are computed
in the activations' dtype and accumulated in float32.

Letters: B rows, S slots of a row, D, F and O as in `spec`, n tokens of a tile, k slots for features.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Float32, Int32

from pipeline.models.attention.arithmetic import map_parts
from pipeline.models.exchange.context import context_axis
from pipeline.models.sae.params import SAEParams, params_partition, tensor_axis
from pipeline.models.sae.spec import FeatureActivation, InputScaling, SAESpec

TILE_VALUES = 1 << 25  # tokens times features per tile: 128 MiB
GROUP = 128  # features whose maximum `_largest` compares first: a TPU's lanes
_SMALLEST = float(jnp.finfo(jnp.float32).tiny)  # some devices flush smaller values to 0


class Reconstruction(NamedTuple):
    """Per token: |x - out|^2, and the cosine similarity of the two, which is 0 if one of them is 0."""

    squared_error: Float32[Array, " *n"]
    cosine: Float32[Array, " *n"]


class Features(NamedTuple):
    """The features that fire, in descending order of value. Ties go to the lower index."""

    index: Int32[Array, "B S k"]  # -1 in empty slots
    value: Float32[Array, "B S k"]  # 0 in empty slots
    n_active: Int32[Array, "B S"]  # including features that did not fit in the slots
    reconstruction: Reconstruction | None  # None unless requested


@jax.named_scope("features")
def encode(
    sae: SAESpec,
    params: SAEParams,
    x: Float[Array, "B S D"],
    slots: int,
    threshold: float = 0.0,
    mesh: Mesh | None = None,
    decodes: bool = False,
) -> Features:
    """For each token, the `slots` largest values above `threshold`, and how many there are. With `decodes`, also how
    well all features above the threshold reconstruct x. A threshold below the smallest normal float32 is raised to it.

    The rows of x are divided along the mesh's `data` axis, and slots along `context` if they are divisible. If features
    are divided along `tensor`, each device computes its part, and the devices exchange their largest values.
    """
    compute = partial(_on_device, sae=sae, slots=slots, threshold=threshold, decodes=decodes)
    if mesh is None:
        return compute(x, params)
    rows, axis = PartitionSpec("data", context_axis(mesh, x.shape[1])), tensor_axis(sae, mesh)
    # check_vma=False: JAX does not infer that results computed from gathered candidates are equal along `tensor`.
    sharded_compute = jax.shard_map(
        partial(compute, axis=axis),
        mesh=mesh,
        in_specs=(rows, {name: params_partition(name, sae, mesh) for name in params}),
        out_specs=Features(rows, rows, rows, Reconstruction(rows, rows) if decodes else None),
        check_vma=False,
    )
    return sharded_compute(x, params)


def _on_device(
    x: Float[Array, "B S D"],
    params: SAEParams,
    *,
    sae: SAESpec,
    slots: int,
    threshold: float,
    decodes: bool,
    axis: str | None = None,
) -> Features:
    """If the mesh's `axis` divides the features, `params` contains this device's part."""
    max_active = sae.k if sae.activation is FeatureActivation.topk else sae.width
    used_slots, width = min(slots, max_active), params["b_enc"].shape[0]
    encode_tile = partial(_encode_tile, sae, params, slots=used_slots, threshold=threshold, decodes=decodes, axis=axis)
    tile_tokens = max(TILE_VALUES // width, 1)
    index, value, n_active, reconstruction = map_parts(encode_tile, x.reshape(-1, x.shape[2]), tile_tokens, axis=0)
    padding = ((0, 0), (0, slots - value.shape[1]))
    features = Features(
        jnp.pad(jnp.where(value > 0, index, -1), padding, constant_values=-1),
        jnp.pad(value, padding),
        jnp.minimum(n_active, max_active),
        reconstruction,
    )
    return jax.tree.map(lambda part: part.reshape(*x.shape[:2], *part.shape[1:]), features)


def _encode_tile(
    sae: SAESpec,
    params: SAEParams,
    x: Float[Array, "n D"],
    *,
    slots: int,
    threshold: float,
    decodes: bool,
    axis: str | None,
) -> Features:
    """The features of one tile of tokens. `slots` is at most the number of features that may fire."""
    values = _values(sae, params, _inputs(sae, params, x))
    values = jnp.where(values > max(threshold, _SMALLEST), values, 0)
    num_chosen = sae.k if decodes and sae.activation is FeatureActivation.topk else slots
    index, value = _largest(values, min(num_chosen, values.shape[1]))
    n_active = jnp.sum(values > 0, axis=1, dtype=jnp.int32)
    if axis:
        index, value = _merge_devices(index, value, axis, num_chosen, values.shape[1])
        n_active = jax.lax.psum(n_active, axis)
    reconstruction = None
    if decodes:
        if sae.activation is FeatureActivation.topk:
            values = _mask_unchosen(values, index, value, axis)
        reconstruction = measure_reconstruction(x, decode(sae, params, x, values, axis))
    return Features(index[:, :slots], value[:, :slots], n_active, reconstruction)


def _inputs(sae: SAESpec, params: SAEParams, x: Float[Array, "n D"]) -> Float[Array, "n D"]:
    """The input of the encoder's matrix product, in the dtype of x."""
    scaled = x.astype(jnp.float32)
    match sae.input_scaling:
        case InputScaling.centred:
            scaled -= jnp.mean(scaled, axis=-1, keepdims=True)
        case InputScaling.constant_norm:
            scaled *= jnp.sqrt(sae.d_in) / jnp.linalg.norm(scaled, axis=-1, keepdims=True)
        case InputScaling.layer_norm:
            scaled -= jnp.mean(scaled, axis=-1, keepdims=True)
            scaled /= jnp.std(scaled, axis=-1, keepdims=True, ddof=1) + sae.layer_norm_eps
    return (scaled - params["b_in"] if "b_in" in params else scaled).astype(x.dtype)


def _values(sae: SAESpec, params: SAEParams, inputs: Float[Array, "n D"]) -> Float32[Array, "n F"]:
    """The values of all features, before the choice of a top-k SAE."""
    products = jnp.einsum("nD,DF->nF", inputs, params["w_enc"], preferred_element_type=jnp.float32)
    match sae.activation:
        case FeatureActivation.gated:
            values = jax.nn.relu(products * params["gate_scale"] + params["b_enc"])
            return jnp.where(products + params["gate_bias"] > 0, values, 0)
        case FeatureActivation.jumprelu:
            values = products + params["b_enc"]
            return jnp.where(values > params["threshold"], jax.nn.relu(values), 0)
    return jax.nn.relu((products + params["b_enc"]) * params.get("feature_scale", 1))


def _largest(values: Float32[Array, "n F"], num: int) -> tuple[Int32[Array, "n k"], Float32[Array, "n k"]]:
    """The indices and values of the `num` largest, with ties as in `lax.top_k`.

    On a TPU, `lax.top_k` searches for one value after another, which takes several times as long as the product. The
    `num` largest values are in the `num` groups with the largest maxima, so only these groups are searched.
    """
    num_tokens, width = values.shape
    if width // GROUP <= 2 * num or width % GROUP:
        value, index = jax.lax.top_k(values, num)
        return index, value
    groups = values.reshape(num_tokens, -1, GROUP)
    _, chosen = jax.lax.top_k(jnp.max(groups, axis=2), num)
    chosen = jnp.sort(chosen, axis=1)
    candidates = jnp.take_along_axis(groups, chosen[:, :, None], axis=1).reshape(num_tokens, -1)
    value, place = jax.lax.top_k(candidates, num)
    return jnp.take_along_axis(chosen, place // GROUP, axis=1) * GROUP + place % GROUP, value


def _merge_devices(
    index: Int32[Array, "n k"], value: Float32[Array, "n k"], axis: str, slots: int, width: int
) -> tuple[Int32[Array, "n slots"], Float32[Array, "n slots"]]:
    """The largest values over all devices along `axis`, each of which has `width` features."""
    index = index + jax.lax.axis_index(axis) * width
    index, value = (jax.lax.all_gather(part, axis, axis=1, tiled=True) for part in (index, value))
    value, place = jax.lax.top_k(value, slots)  # devices are ordered by feature, so ties go to the lower index
    return jnp.take_along_axis(index, place, axis=1), value


def _mask_unchosen(
    values: Float32[Array, "n F"], index: Int32[Array, "n k"], value: Float32[Array, "n k"], axis: str | None
) -> Float32[Array, "n F"]:
    """The values of the chosen features, and 0 for all others. `index` counts over all devices' features."""
    width = values.shape[1]
    index = index - (jax.lax.axis_index(axis) * width if axis else 0)
    index = jnp.where((index >= 0) & (index < width), index, width)  # other devices' features are dropped
    return jnp.zeros_like(values).at[jnp.arange(len(values))[:, None], index].set(value, mode="drop")


def decode(
    sae: SAESpec, params: SAEParams, x: Float[Array, "n D"], values: Float32[Array, "n F"], axis: str | None = None
) -> Float32[Array, "n O"]:
    """Decodes the values of all features. If the mesh's `axis` divides the features, `params` and `values` contain this
    device's part."""
    if "feature_scale" in params:
        scale = params["feature_scale"]
        values = jnp.where(scale > 0, values / jnp.where(scale > 0, scale, 1), 0)
    out = jnp.einsum("nF,FO->nO", values.astype(x.dtype), params["w_dec"], preferred_element_type=jnp.float32)
    if axis:
        out = jax.lax.psum(out, axis)
    if "b_out" in params:
        out += params["b_out"]
    wide = x.astype(jnp.float32)
    if sae.undo_scaling:
        match sae.input_scaling:
            case InputScaling.centred:
                out += jnp.mean(wide, axis=-1, keepdims=True)
            case InputScaling.constant_norm:
                out *= jnp.linalg.norm(wide, axis=-1, keepdims=True) / jnp.sqrt(sae.d_in)
            case InputScaling.layer_norm:
                out *= jnp.std(wide, axis=-1, keepdims=True, ddof=1)
                out += jnp.mean(wide, axis=-1, keepdims=True)
    if "w_skip" in params:
        out += jnp.einsum("nD,DO->nO", x, params["w_skip"], preferred_element_type=jnp.float32)
    return out


def measure_reconstruction(x: Float[Array, "n D"], out: Float32[Array, "n D"]) -> Reconstruction:
    """Compares the decoder's output with x."""
    x = x.astype(jnp.float32)
    squared_error = jnp.sum(jnp.square(x - out), axis=-1)
    lengths = jnp.linalg.norm(x, axis=-1) * jnp.linalg.norm(out, axis=-1)
    return Reconstruction(squared_error, jnp.where(lengths > 0, jnp.sum(x * out, axis=-1) / lengths, 0))
