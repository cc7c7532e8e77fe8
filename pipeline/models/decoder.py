"""The forward pass of a transformer, up to the layer of the last captured site.

Letters: B rows, T positions, D model dim, V vocabulary, P learned positions, Y token types, L layers, p dims of
per-layer inputs.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypedDict

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, PyTree

from pipeline.core.sites import ActivationKey, Site
from pipeline.models.architecture import Architecture, LayerKind, QueryScaling
from pipeline.models.attention.arithmetic import scaled
from pipeline.models.attention.pattern import attention_entropy
from pipeline.models.attention.spec import Attend
from pipeline.models.exchange.context import in_device_order, in_row_order
from pipeline.models.experts import experts_block
from pipeline.models.layers import (
    BlockWeights,
    LayerWeights,
    Rows,
    attention_block,
    layer_out,
    mlp_block,
    norm,
    norm_if_any,
)
from pipeline.models.partition import Partition
from pipeline.models.recurrent.delta_net import delta_block
from pipeline.models.recurrent.recur import Recur, WholeRows, conv_block
from pipeline.models.rope import RopeTable, rope_table
from pipeline.models.runs import LayerRun, layer_runs, residual_index


class Params(TypedDict, total=False):
    """A transformer's weights. `final_norm` is present only if it is captured, others only if the family has them.

    `runs` has one mapping per stack of each `LayerRun`. In a stack of several layers, the first axis is the layer.
    """

    embed: Float[Array, "V D"]
    position_embed: Float[Array, "P D"]
    type_embed: Float[Array, "Y D"]
    embed_norm: Float[Array, " D"]
    embed_norm_bias: Float[Array, " D"]
    layer_embed: Float[Array, "V L p"]
    layer_projection: Float[Array, "L p D"]
    layer_projection_norm: Float[Array, " p"]
    runs: tuple[LayerWeights, ...]
    final_norm: Float[Array, " D"]
    final_norm_bias: Float[Array, " D"]
    head: Float[Array, "V D"]  # only if loaded `with_head`; absent if the embedding is also the head
    head_bias: Float[Array, " V"]


STREAM_SITES = (Site.attn_in, Site.attn_out, Site.resid_mid, Site.mlp_in, Site.mlp_out)
"""The sites inside a layer that are as wide as the residual stream. A tuple, since all processes must trace them in the
same order, and the order of a set of strings differs between processes."""


class TokenBatch(NamedTuple):
    """Rows of packed tokens. Segment 0 is padding."""

    tokens: Int32[Array, "B T"]
    segments: Int32[Array, "B T"]
    positions: Int32[Array, "B T"]
    selected: Int32[Array, "B S"] | None = None  # row positions of the queries of `attn_pattern`, or -1; None: all


Finish = Callable[[ActivationKey, Float[Array, "B T width"]], PyTree]
"""Maps an activation to the value to return."""


def forward(
    arch: Architecture,
    params: Params,
    batch: TokenBatch,
    keys: Sequence[ActivationKey],
    attend: Attend | Sequence[Attend | Recur],
    partition: Partition,
    finish: Finish = lambda key, activation: activation,
) -> dict[ActivationKey, PyTree]:
    """Computes `finish` of each key's activation, in the weights' dtype. Values at padding are undefined.

    Pure, so it can be jitted. `params` must have been loaded for the same keys, and sharded by `partition`. If `attend`
    has an entry per layer, the keys must make each layer a run; `Recur` is for a layer with
    a DeltaNet or a convolution.
    """
    captured: dict[ActivationKey, PyTree] = {}

    def capture(x: Array, activations: dict[ActivationKey, Array]) -> Array:
        x, finished = _finish_first(x, activations, finish)
        captured.update(finished)
        return x

    layer = partial(layer_sites, arch, partition=partition)
    residual = partition.residual
    runs = layer_runs(keys, arch)
    with jax.named_scope("embed"):
        x = residual(embed(arch, params, batch.tokens, batch.positions, partition))
        rows = LayerRows(arch, params, batch, keys, x, runs[-1].stop if runs else 0, partition)
    x = capture(x, _residual_activations(arch, params, x, 0, keys, partition))
    stacks = iter(params["runs"])
    for run in runs:
        weights = [next(stacks) for _ in run.stacks]
        with jax.named_scope(f"layers_{run.first}_to_{run.stop - 1}"):
            if len(run) == 1:
                layer_attend = attend if callable(attend) else attend[run.first]
                if partition.fsdp and partition.is_on_gpus and arch.experts:  # XLA would gather all experts early
                    x, weights = jax.lax.optimization_barrier((x, weights))
                x, sites = layer(x, *weights, rows.layer(run.first), arch.kind(run.first), layer_attend)
                rows.keep(run.first, sites)
                inner = {ActivationKey(run.first, site): value for site, value in sites.items()}
                x = capture(x, {key: inner[key] for key in keys if key in inner})
            else:
                x = _scan(partial(layer, attend=attend), x, arch, run, weights, rows)
        x = residual(x)
        x = capture(x, _residual_activations(arch, params, x, run.stop, keys, partition))
    return {key: captured[key] for key in keys}


class LayerRows:
    """Provides each layer's `Rows` during a forward pass, and keeps the keys and values that later layers use."""

    def __init__(
        self,
        arch: Architecture,
        params: Params,
        batch: TokenBatch,
        keys: Sequence[ActivationKey],
        x: Float[Array, "B T D"],
        num_layers: int,
        partition: Partition = Partition(),  # noqa: B008  frozen
    ) -> None:
        """`keys` are captured, x is the input of layer 0, and the first `num_layers` layers are computed."""
        selected = batch.selected
        if all(key.site is not Site.attn_pattern for key in keys):
            selected = None
        elif selected is None:
            selected = jnp.broadcast_to(jnp.arange(batch.tokens.shape[1]), batch.tokens.shape)
        scales = None if arch.query_scaling is None else query_scales(arch.query_scaling, batch.positions)
        self._arch = arch
        segments, chunks = batch.segments, chunk_segments(arch, batch)
        self._rows = Rows(segments, chunks, rope_tables(arch, batch), selected, query_scales=scales)
        has_inputs = "layer_embed" in params
        self._inputs = layer_inputs(arch, params, x, batch.tokens, num_layers, partition) if has_inputs else None
        self._keys: dict[int, tuple[Array, Array]] = {}

    def keep(self, layer: int, sites: dict[Site, Array]) -> None:
        """Keeps a layer's keys and values if later layers may attend to them."""
        if self._arch.shared_keys is not None and self._arch.keys_of(layer) is None:
            self._keys[layer] = sites[Site.k], sites[Site.v]

    def layer(self, layer: int) -> Rows:
        return self.layer_with(layer, None if self._inputs is None else self._inputs[layer])

    def layer_with(self, layer: int, layer_input: Float[Array, "B T p"] | None) -> Rows:
        return self._rows._replace(shared=self._keys.get(self._arch.keys_of(layer)), layer_input=layer_input)

    def stack_inputs(self, layers: range) -> Float[Array, "L B T p"] | None:
        """The per-layer inputs of a stack's layers."""
        return None if self._inputs is None else self._inputs[layers.start : layers.stop : layers.step]


def _finish_first(
    x: Float[Array, "B T D"],
    activations: dict[ActivationKey, Array],
    finish: Finish,
) -> tuple[Float[Array, "B T D"], dict[ActivationKey, PyTree]]:
    """Finishes activations before the next layers use x. Otherwise the compiler may keep the activations as well as the
    results.

    Compiled for v5e, 16 rows of 1024 with Qwen2.5-0.5B's shape: 225 -> 154 MiB of temporary memory with three layers
    captured, 606 -> 206 MiB with all 24.
    """
    if not activations:
        return x, {}
    flat = {key: value.reshape(*value.shape[:2], -1) for key, value in activations.items()}
    finished = {key: finish(key, value) for key, value in flat.items()}
    return jax.lax.optimization_barrier((x, finished))


def _residual_activations(
    arch: Architecture,
    params: Params,
    x: Float[Array, "B T D"],
    num_layers: int,
    keys: Sequence[ActivationKey],
    partition: Partition,
) -> dict[ActivationKey, Array]:
    """The activations captured from the residual stream x after `num_layers` layers."""
    keys = [key for key in keys if residual_index(key, arch.num_layers) == num_layers]
    normed = partial(norm, x, params, "final_norm", arch)
    return {key: partition.residual(normed()) if key.site is Site.final_norm else x for key in keys}


def _scan(
    layer: Callable[..., tuple[Array, dict[Site, Array]]],
    x: Float[Array, "B T D"],
    arch: Architecture,
    run: LayerRun,
    weights: Sequence[LayerWeights],
    rows: LayerRows,
) -> Float[Array, "B T D"]:
    """The stream after a run of layers with stacked weights. Each step of the scan computes one layer of each stack."""
    first_layers = [stack[0] for stack in run.stacks]  # all layers of a stack are of one kind

    def compute_period(x: Array, slices: list[tuple[LayerWeights, Array | None]]) -> tuple[Array, None]:
        for first, (layer_weights, layer_input) in zip(first_layers, slices, strict=True):
            x, _ = layer(x, layer_weights, rows.layer_with(first, layer_input), arch.kind(first))
        return x, None

    inputs = [(stacked, rows.stack_inputs(stack)) for stacked, stack in zip(weights, run.stacks, strict=True)]
    return jax.lax.scan(compute_period, x, inputs)[0]


def layer_sites(
    arch: Architecture,
    x: Float[Array, "B T D"],
    weights: LayerWeights,
    rows: Rows,
    kind: LayerKind,
    attend: Attend | Recur,
    partition: Partition = Partition(),  # noqa: B008  frozen
) -> tuple[Float[Array, "B T D"], dict[Site, Array]]:
    """The residual stream after a layer, and the layer's sites. Weights are gathered first, and what is as wide as the
    stream is replicated along `tensor`."""
    weights = partition.gather(weights)
    attention, mlp = weights["attention"], weights.get("mlp")
    if mlp is None:
        sites = _mixer_sites(arch, x, weights, rows, kind, attend, partition)
        stream = x + sites[Site.attn_out]
    elif arch.blocks is not None:
        sites = _mlp_sites(x, mlp | {"norm": attention["norm"]}, arch, partition)
        stream = x + sites[Site.mlp_out]
    else:
        sites = _mixer_sites(arch, x, weights, rows, kind, attend, partition)
        sites[Site.attn_out] = _scaled_output(sites[Site.attn_out], arch)
        stream = norm_if_any(x + sites[Site.attn_out], attention, "sum_norm", arch)
        sites[Site.resid_mid] = stream
        read = x if arch.parallel else stream
        if arch.parallel and "norm" not in mlp:
            read = sites[Site.attn_in]
        sites |= _mlp_sites(read, mlp, arch, partition)
        sites[Site.mlp_out] = _scaled_output(sites[Site.mlp_out], arch)
        stream = norm_if_any(stream + sites[Site.mlp_out], mlp, "sum_norm", arch)
        stream = layer_out(stream, mlp, arch, rows.layer_input)
    sites |= {site: partition.residual(sites[site]) for site in STREAM_SITES if site in sites}
    return partition.residual(stream), sites


def _scaled_output(x: Float[Array, "B T D"], arch: Architecture) -> Float[Array, "B T D"]:
    return x if arch.residual_scale == 1.0 else scaled(x, arch.residual_scale)


def _mixer_sites(
    arch: Architecture,
    x: Float[Array, "B T D"],
    weights: LayerWeights,
    rows: Rows,
    kind: LayerKind,
    attend: Attend | Recur,
    partition: Partition,
) -> dict[Site, Array]:
    """The sites of attention, or of what is in its place."""
    attention, recur = weights["attention"], WholeRows(partition) if callable(attend) else attend
    if "delta" in weights:
        return delta_block(x, attention, weights["delta"], arch, rows.segments, partition, recur)
    if "conv" in weights:
        return conv_block(x, attention, weights["conv"], arch, rows.segments, recur)
    attend, entropy = partition.over_context(attend), partition.over_context(attention_entropy)
    return attention_block(x, attention, arch, rows, kind, attend, entropy)


def _mlp_sites(
    x: Float[Array, "B T D"], mlp: BlockWeights, arch: Architecture, partition: Partition
) -> dict[Site, Array]:
    if "router" in mlp:
        return experts_block(x, mlp, arch, partition)
    return mlp_block(x, mlp, arch, partition.context)


def embed(
    arch: Architecture,
    params: Params,
    tokens: Int32[Array, "B T"],
    positions: Int32[Array, "B T"],
    partition: Partition = Partition(),  # noqa: B008  frozen
) -> Float[Array, "B T D"]:
    """The input of layer 0. All tokens are of type 0."""
    x = partition.token_vectors(params["embed"], tokens)
    if arch.embed_scale != 1.0:
        x *= jnp.asarray(arch.embed_scale, x.dtype)
    if "type_embed" in params:
        x += params["type_embed"][0]
    if "position_embed" in params:
        x += params["position_embed"][learned_positions(arch, tokens, positions, partition)]
    return norm_if_any(x, params, "embed_norm", arch)


def learned_positions(
    arch: Architecture, tokens: Int32[Array, "B T"], positions: Int32[Array, "B T"], partition: Partition
) -> Int32[Array, "B T"]:
    """The row of each token in the learned positions."""
    if arch.uncounted_token is None:
        return positions + arch.position_offset if arch.position_offset else positions
    if partition.context > 1:
        in_rows = [in_row_order(ids, partition.mesh) for ids in (tokens, positions)]
        return in_device_order(learned_positions(arch, *in_rows, Partition()), partition.mesh)
    is_uncounted = tokens == arch.uncounted_token
    num_uncounted = jnp.cumsum(is_uncounted, axis=1)  # from the first token of the row, then of the window
    first = jnp.arange(tokens.shape[1]) - positions
    num_uncounted -= jnp.take_along_axis(num_uncounted - is_uncounted, first, axis=1)
    return arch.position_offset + jnp.where(is_uncounted, -1, positions - num_uncounted)


def layer_inputs(
    arch: Architecture,
    params: Params,
    x: Float[Array, "B T D"],
    tokens: Int32[Array, "B T"],
    num_layers: int,
    partition: Partition,
) -> Float[Array, "L B T p"]:
    """The per-layer inputs of the first `num_layers` layers: an embedding of the token plus a projection of the input
    of layer 0."""
    projected = jnp.einsum("BTD,LpD->LBTp", x, params["layer_projection"][:num_layers])
    projected = norm(scaled(projected, arch.d_model**-0.5), params, "layer_projection_norm", arch)
    embedded = partition.token_vectors(params["layer_embed"], tokens, slice(num_layers))
    embedded = jnp.moveaxis(embedded, 2, 0) * arch.layer_inputs**0.5
    return scaled(projected + embedded, 2**-0.5)


def chunk_segments(arch: Architecture, batch: TokenBatch) -> Int32[Array, "B T"]:
    """The segments of local layers: those of the batch or, with chunked attention, of each chunk of a document."""
    if arch.local is None or not arch.local.chunked:
        return batch.segments
    chunks = batch.segments.shape[1] // arch.local.window + 2  # at most, of a document in a row
    return batch.segments * chunks + jnp.where(batch.segments > 0, batch.positions // arch.local.window % chunks, 0)


def query_scales(scaling: QueryScaling, positions: Int32[Array, "B T"]) -> Float32[Array, "B T 1 1"]:
    """The factors of all heads' queries. The axes of size 1 broadcast over heads and their dimensions."""
    periods = (positions[:, :, None, None] + scaling.shift) // scaling.period
    return 1 + scaling.beta * jnp.log1p(periods.astype(jnp.float32))


def rope_tables(arch: Architecture, batch: TokenBatch) -> tuple[RopeTable, RopeTable] | None:
    """The tables for global and for local layers; the same object twice if they are equal."""
    if arch.rope is None:
        return None
    dim = arch.rotary_dim or arch.head_dim
    global_dim = dim if arch.global_heads is None else arch.global_heads.head_dim
    global_table = rope_table(arch.rope, global_dim, batch.positions, batch.segments)
    if arch.local is None or (arch.local.rope == arch.rope and global_dim == dim):
        return global_table, global_table
    return global_table, rope_table(arch.local.rope, dim, batch.positions, batch.segments)
