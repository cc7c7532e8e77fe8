"""The features that fire: what an SAE makes of activations, some tokens at a time.

No array holds the values of all features of all tokens: memory does not grow with the number of features. Products are
in the activations' dtype, summed in float32.

Letters: B rows, S slots of a row, D and F as in `spec`, n tokens of a tile, k slots for features.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Float32, Int32

from pipeline.models.sae.decoding import Reconstruction, decode, reconstruction_of
from pipeline.models.sae.params import SAEParams, params_partition, tensor_axis
from pipeline.models.sae.spec import Activation, InputScaling, SAESpec

TILE_VALUES = 1 << 25  # of features and tokens at once: 128 MiB
GROUP = 128  # features that `_largest` first takes for one: a TPU's lanes
_SMALLEST = float(jnp.finfo(jnp.float32).tiny)  # what is less may be 0 on some devices


class Features(NamedTuple):
    """The features that fire, by falling value; of equal values the lower index comes first."""

    index: Int32[Array, "B S k"]  # -1 in empty slots
    value: Float32[Array, "B S k"]  # 0 in empty slots
    n_active: Int32[Array, "B S"]  # also of those for which there is no slot
    reconstruction: Reconstruction | None  # where it is asked for


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
    """The features with a value above `threshold`, at least the smallest normal float32: of each token the `slots`
    largest, and how many there are; and, where it decodes, how well all of them reconstruct x.

    `x` has rows along the mesh's `data` axis. The features may be divided along `tensor`; then each device computes its
    part, and they exchange the largest of each.
    """
    compute = partial(_on_device, sae=sae, slots=slots, threshold=threshold, decodes=decodes)
    if mesh is None:
        return compute(x, params)
    rows, axis = PartitionSpec("data"), tensor_axis(sae, mesh)
    # check_vma=False: JAX does not see that what is made of gathered candidates is the same along `tensor`.
    divided = jax.shard_map(
        partial(compute, axis=axis),
        mesh=mesh,
        in_specs=(rows, {name: params_partition(name, sae, mesh) for name in params}),
        out_specs=Features(rows, rows, rows, Reconstruction(rows, rows) if decodes else None),
        check_vma=False,
    )
    return divided(x, params)


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
    """`params` are those of this device's features where the mesh's `axis` divides them."""
    most = sae.k if sae.activation is Activation.topk else sae.width  # that may fire
    used, width = min(slots, most), params["b_enc"].shape[0]
    of_tile = partial(_of_tile, sae, params, slots=used, threshold=threshold, decodes=decodes, axis=axis)
    index, value, n_active, reconstruction = _in_tiles(of_tile, x.reshape(-1, x.shape[2]), width)
    unused = ((0, 0), (0, slots - value.shape[1]))
    features = Features(
        jnp.pad(jnp.where(value > 0, index, -1), unused, constant_values=-1),
        jnp.pad(value, unused),
        jnp.minimum(n_active, most),
        reconstruction,
    )
    return jax.tree.map(lambda part: part.reshape(*x.shape[:2], *part.shape[1:]), features)


def _in_tiles(of_tile: Callable[[Array], Features], x: Float[Array, "tokens D"], width: int) -> Features:
    num_tokens, size = len(x), max(TILE_VALUES // width, 1)
    if num_tokens <= size:
        return of_tile(x)
    missing = -num_tokens % size
    tiles = jnp.pad(x, ((0, missing), (0, 0))).reshape(-1, size, x.shape[1])
    features = jax.lax.map(of_tile, tiles)
    return jax.tree.map(lambda part: part.reshape(num_tokens + missing, *part.shape[2:])[:num_tokens], features)


def _of_tile(
    sae: SAESpec,
    params: SAEParams,
    x: Float[Array, "n D"],
    *,
    slots: int,
    threshold: float,
    decodes: bool,
    axis: str | None,
) -> Features:
    """With room for all slots that there are features for."""
    values = _values(sae, params, _inputs(sae, params, x))
    values = jnp.where(values > max(threshold, _SMALLEST), values, 0)
    chosen = sae.k if decodes and sae.activation is Activation.topk else slots
    index, value = _largest(values, min(chosen, values.shape[1]))
    n_active = jnp.sum(values > 0, axis=1, dtype=jnp.int32)
    if axis:
        index, value = _joined(index, value, axis, chosen, values.shape[1])
        n_active = jax.lax.psum(n_active, axis)
    reconstruction = None
    if decodes:
        if sae.activation is Activation.topk:
            values = _only(values, index, value, axis)
        reconstruction = reconstruction_of(x, decode(sae, params, x, values, axis))
    return Features(index[:, :slots], value[:, :slots], n_active, reconstruction)


def _inputs(sae: SAESpec, params: SAEParams, x: Float[Array, "n D"]) -> Float[Array, "n D"]:
    """What the encoder's matrix multiplies, in the dtype of x."""
    scaled = x.astype(jnp.float32)
    match sae.input_scaling:
        case InputScaling.constant_norm:
            scaled *= jnp.sqrt(sae.d_in) / jnp.linalg.norm(scaled, axis=-1, keepdims=True)
        case InputScaling.layer_norm:
            scaled -= jnp.mean(scaled, axis=-1, keepdims=True)
            scaled /= jnp.std(scaled, axis=-1, keepdims=True, ddof=1) + sae.layer_norm_eps
    return (scaled - params["b_in"] if "b_in" in params else scaled).astype(x.dtype)


def _values(sae: SAESpec, params: SAEParams, inputs: Float[Array, "n D"]) -> Float32[Array, "n F"]:
    """The values of all features; of a top-k SAE before its choice."""
    products = jnp.einsum("nD,DF->nF", inputs, params["w_enc"], preferred_element_type=jnp.float32)
    match sae.activation:
        case Activation.gated:
            values = jax.nn.relu(products * params["gate_scale"] + params["b_enc"])
            return jnp.where(products + params["gate_bias"] > 0, values, 0)
        case Activation.jumprelu:
            values = products + params["b_enc"]
            return jnp.where(values > params["threshold"], jax.nn.relu(values), 0)
    return jax.nn.relu((products + params["b_enc"]) * params.get("feature_scale", 1))


def _largest(values: Float32[Array, "n F"], num: int) -> tuple[Int32[Array, "n k"], Float32[Array, "n k"]]:
    """Index and value of the `num` largest, of equal values the first: as `lax.top_k`.

    That looks for one after the other, which takes a TPU several times as long as the product. The `num` largest values
    are in the `num` groups with the largest maxima, so it need not look into the others.
    """
    num_tokens, width = values.shape
    if width // GROUP <= 2 * num or width % GROUP:
        value, index = jax.lax.top_k(values, num)
        return index, value
    groups = values.reshape(num_tokens, -1, GROUP)
    _, chosen = jax.lax.top_k(jnp.max(groups, axis=2), num)
    chosen = jnp.sort(chosen, axis=1)
    candidates = jnp.take_along_axis(groups, chosen[:, :, None], axis=1).reshape(num_tokens, -1)
    value, at = jax.lax.top_k(candidates, num)
    return jnp.take_along_axis(chosen, at // GROUP, axis=1) * GROUP + at % GROUP, value


def _joined(
    index: Int32[Array, "n k"], value: Float32[Array, "n k"], axis: str, slots: int, width: int
) -> tuple[Int32[Array, "n slots"], Float32[Array, "n slots"]]:
    """The largest that the devices along `axis`, each of which has `width` features, have seen together."""
    index = index + jax.lax.axis_index(axis) * width
    index, value = (jax.lax.all_gather(part, axis, axis=1, tiled=True) for part in (index, value))
    value, at = jax.lax.top_k(value, slots)  # devices stand in the order of their features
    return jnp.take_along_axis(index, at, axis=1), value


def _only(
    values: Float32[Array, "n F"], index: Int32[Array, "n k"], value: Float32[Array, "n k"], axis: str | None
) -> Float32[Array, "n F"]:
    """The values of the chosen features, zeros elsewhere. `index` is of all devices' features."""
    width = values.shape[1]
    index = index - (jax.lax.axis_index(axis) * width if axis else 0)
    index = jnp.where((index >= 0) & (index < width), index, width)  # of others: dropped
    return jnp.zeros_like(values).at[jnp.arange(len(values))[:, None], index].set(value, mode="drop")
