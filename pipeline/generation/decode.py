"""The two compiled programs of generation: prefill of new rows, and a segment of decoding steps.

Both are compiled once, and caches are written in place. Prompts lie at the left, position p in slot p, with padding
after them, so that a row's numbers do not depend on the lengths of its neighbours.

Letters: B rows, R rows of one prefill, P prompt slots, C completion slots, S = P + C, D width of a site, K key-value
heads, H head dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int32, PyTree, UInt32

from pipeline.distributed import activation_sharding, replicated, row_sharding
from pipeline.forward import matmul_precision
from pipeline.generation.cache import CachedLayer
from pipeline.generation.sampling import Sampling, document_keys, sample
from pipeline.models.attention import Attention, choose_attention
from pipeline.models.decoder import Params
from pipeline.models.head import logits
from pipeline.models.partition import Partition
from pipeline.models.registry import Model
from pipeline.sites import ActivationKey, Site

FINAL = ActivationKey(-1, Site.final_norm)


class State(NamedTuple):
    """The rows, on the devices. Rows are divided along `data`, key-value heads along `tensor`."""

    caches: tuple[tuple[Float[Array, "B K S H"], Float[Array, "B K S H"]], ...]  # keys and values of each layer
    activations: tuple[Float[Array, "B S D"], ...]  # in the order of the captured keys
    tokens: Int32[Array, " B"]  # each row's latest, which no layer has seen yet
    positions: Int32[Array, " B"]  # of those
    counts: Int32[Array, " B"]  # tokens of the completion so far
    has_ended: Bool[Array, " B"]  # whether the latest is the last
    is_active: Bool[Array, " B"]  # whether there is more to compute
    keys: UInt32[Array, "B 2"]  # random, of each row's document
    completions: Int32[Array, "B C"]


class Report(NamedTuple):
    """What the host reads after a segment."""

    is_active: Bool[Array, " B"]
    counts: Int32[Array, " B"]
    completions: Int32[Array, "B C"]
    steps: Int32[Array, ""]


class NewRows(NamedTuple):
    """Prompts for some rows. Each device along `data` has as many; `rows` are places among its own, and a place that
    it does not have stands for no prompt."""

    prompts: Int32[Array, "R P"]
    lengths: Int32[Array, " R"]
    numbers: UInt32[Array, "R 2"]  # of the documents: high and low half
    rows: Int32[Array, " R"]


@dataclass(frozen=True)
class Programs:
    """Compiled for one number of rows, room for prompts and completions, and way of sampling."""

    mesh: jax.sharding.Mesh
    attention: Attention  # of the prefill
    prefill: jax.stages.Compiled  # (params, state, new rows) -> state
    segment: jax.stages.Compiled  # (params, state) -> state, report
    new_rows: NewRows  # their shapes
    empty: jax.stages.Compiled  # () -> state without active rows


def compile_programs(
    model: Model,
    params: Params,
    partition: Partition,
    *,
    rows: int,
    prefill_rows: int,
    max_prompt: int,
    max_new_tokens: int,
    end_tokens: Sequence[int],
    sampling: Sampling,
    keys: Sequence[ActivationKey],
    dtype: str,
    attention: str,
    segment_steps: int,
) -> Programs:
    """Lowers and compiles. `rows` and `prefill_rows` are global; activations of `keys` are kept as `dtype`.

    `params` are those of `model.generation_leaves(keys)`, or their shapes, on devices that are only described.
    """
    mesh, arch, keys = partition.mesh, model.arch, tuple(keys)
    wanted = model.generation_keys(keys)
    compute_dtype = params["embed"].dtype
    length = max_prompt + max_new_tokens
    chosen = choose_attention(attention, arch, mesh, max_prompt, compute_dtype.name)
    by_rows = row_sharding(mesh)

    def is_last(tokens: Array, counts: Array) -> Array:
        is_end = jnp.isin(tokens, jnp.array(end_tokens, jnp.int32)) if end_tokens else jnp.zeros_like(tokens, bool)
        return is_end | (counts == max_new_tokens)

    def prefill(params: Params, state: State, new: NewRows) -> State:
        order = jnp.broadcast_to(jnp.arange(max_prompt, dtype=jnp.int32), new.prompts.shape)
        segments = (order < new.lengths[:, None]).astype(jnp.int32)
        captured = model.apply(params, new.prompts, segments, order, wanted, chosen.attend, partition)

        def cached(layer: int, site: Site) -> Float[Array, "R K P H"]:
            heads = captured[ActivationKey(layer, site)].reshape(*order.shape, arch.num_kv_heads, arch.head_dim)
            return jnp.einsum("RPKH->RKPH", heads)

        last = jnp.take_along_axis(captured[FINAL], jnp.maximum(new.lengths - 1, 0)[:, None, None], axis=1)[:, 0]
        random = document_keys(sampling.seed, new.numbers[:, 0], new.numbers[:, 1])
        counts = jnp.ones_like(new.lengths)
        tokens = sample(logits(model.head, params, last), random, counts - 1, sampling)
        has_ended = is_last(tokens, counts)
        values = State(
            caches=tuple((cached(layer, Site.k), cached(layer, Site.v)) for layer in range(arch.num_layers)),
            activations=tuple(captured[key].astype(dtype) for key in keys),
            tokens=tokens,
            positions=new.lengths,
            counts=counts,
            has_ended=has_ended,
            is_active=jnp.ones_like(has_ended) if keys else ~has_ended,
            keys=random,
            completions=tokens[:, None],
        )
        return put(state, values, new.rows)

    def put(state: State, values: State, rows: Int32[Array, " R"]) -> State:
        """The new rows in their places, each device its own."""

        def of_one_device(state: State, values: State, rows: Array) -> State:
            def of_array(old: Array, new: Array) -> Array:
                return old.at[(rows, *(slice(size) for size in new.shape[1:]))].set(new, mode="drop")

            return jax.tree.map(of_array, state, values)

        specs = jax.tree.map(lambda sharding: sharding.spec, shardings)
        return jax.shard_map(
            of_one_device, mesh=mesh, in_specs=(specs, specs, PartitionSpec("data")), out_specs=specs, check_vma=False
        )(state, values, rows)

    def step(params: Params, state: State) -> State:
        layers = [CachedLayer(*cache, state.positions) for cache in state.caches]
        tokens, positions = state.tokens[:, None], state.positions[:, None]
        captured = model.apply(params, tokens, jnp.ones_like(tokens), positions, wanted, layers, partition)
        sampled = sample(logits(model.head, params, captured[FINAL][:, 0]), state.keys, state.counts, sampling)
        goes_on = state.is_active & ~state.has_ended
        counts = state.counts + goes_on
        sampled = jnp.where(goes_on, sampled, state.tokens)
        has_ended = is_last(sampled, counts) | state.has_ended
        place = jnp.arange(max_new_tokens) == state.counts[:, None]
        return State(
            caches=tuple((layer.keys, layer.values) for layer in layers),
            activations=tuple(
                _put_at(kept, captured[key].astype(dtype), state.positions)
                for kept, key in zip(state.activations, keys, strict=True)
            ),
            tokens=sampled,
            positions=state.positions + goes_on,
            counts=counts,
            has_ended=has_ended,
            # Whoever captures wants the last token's activations, too: it takes one more step.
            is_active=goes_on if keys else goes_on & ~has_ended,
            keys=state.keys,
            completions=jnp.where(place & goes_on[:, None], sampled[:, None], state.completions),
        )

    def segment(params: Params, state: State) -> tuple[State, Report]:
        def goes_on(carry: tuple[Array, State]) -> Bool[Array, ""]:
            return (carry[0] < segment_steps) & carry[1].is_active.any()

        steps, state = jax.lax.while_loop(
            goes_on, lambda carry: (carry[0] + 1, step(params, carry[1])), (jnp.int32(0), state)
        )
        return state, Report(state.is_active, state.counts, state.completions, steps)

    heads = NamedSharding(mesh, PartitionSpec("data", "tensor"))

    def shape(*sizes: int, dtype: object, sharding: NamedSharding = by_rows) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)

    a_cache = shape(rows, arch.num_kv_heads, length, arch.head_dim, dtype=compute_dtype, sharding=heads)
    of_state = State(
        caches=((a_cache, a_cache),) * arch.num_layers,
        activations=tuple(
            shape(rows, length, width, dtype=dtype, sharding=activation_sharding(mesh, width))
            for width in (model.width(key.site) for key in keys)
        ),
        **{name: shape(rows, dtype=jnp.int32) for name in ("tokens", "positions", "counts")},
        **{name: shape(rows, dtype=jnp.bool_) for name in ("has_ended", "is_active")},
        keys=shape(rows, 2, dtype=jnp.uint32),
        completions=shape(rows, max_new_tokens, dtype=jnp.int32),
    )
    new_rows = NewRows(
        prompts=shape(prefill_rows, max_prompt, dtype=jnp.int32),
        lengths=shape(prefill_rows, dtype=jnp.int32),
        numbers=shape(prefill_rows, 2, dtype=jnp.uint32),
        rows=shape(prefill_rows, dtype=jnp.int32),
    )
    shardings: PyTree[NamedSharding] = jax.tree.map(lambda leaf: leaf.sharding, of_state)
    report = Report(by_rows, by_rows, by_rows, replicated(mesh))
    jit = partial(jax.jit, donate_argnums=1)
    with jax.default_matmul_precision(matmul_precision(compute_dtype)):
        return Programs(
            mesh=mesh,
            attention=chosen,
            prefill=jit(prefill, out_shardings=shardings).lower(params, of_state, new_rows).compile(),
            segment=jit(segment, out_shardings=(shardings, report)).lower(params, of_state).compile(),
            new_rows=new_rows,
            empty=jax.jit(
                lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), of_state), out_shardings=shardings
            )
            .lower()
            .compile(),
        )


def _put_at(
    kept: Float[Array, "B S D"], new: Float[Array, "B 1 D"], positions: Int32[Array, " B"]
) -> Float[Array, "B S D"]:
    return jax.vmap(lambda kept, new, position: jax.lax.dynamic_update_slice(kept, new, (position, 0)))(
        kept, new, positions
    )
