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
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int32, UInt32

from pipeline.cluster.sharding import activation_sharding, replicated, row_sharding
from pipeline.config.sampling import Sampling
from pipeline.core.sites import ActivationKey, Site
from pipeline.generation.cache import CachedLayer, put_at
from pipeline.generation.sampling import document_keys, sample
from pipeline.models.attention.choosing import Attend, Attention, choose_attention
from pipeline.models.decoder import Params
from pipeline.models.head import logits
from pipeline.models.partition import Partition
from pipeline.models.registry import Model
from pipeline.step.compiler import compiler_options, matmul_precision

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
class Decoding:
    """The two programs as functions, to be jitted. Activations of `keys` are kept, as `dtype`."""

    model: Model
    partition: Partition
    attend: Attend  # of the prefill
    max_prompt: int
    max_new_tokens: int
    end_tokens: tuple[int, ...]
    sampling: Sampling
    keys: tuple[ActivationKey, ...]
    dtype: str
    segment_steps: int

    def prefill(self, params: Params, state: State, new: NewRows) -> State:
        """Prompts go through the model, as in the extraction, and into their rows, each with its first token."""
        arch = self.model.arch
        order = jnp.broadcast_to(jnp.arange(self.max_prompt, dtype=jnp.int32), new.prompts.shape)
        segments = (order < new.lengths[:, None]).astype(jnp.int32)
        captured = self._apply(params, new.prompts, segments, order, self.attend)

        def cached(layer: int, site: Site) -> Float[Array, "R K S H"]:
            """Zeros behind the prompt: a former tenant's NaN, though masked, would be one in attention's sum."""
            heads = captured[ActivationKey(layer, site)].reshape(*order.shape, arch.num_kv_heads, arch.head_dim)
            return jnp.pad(jnp.einsum("RPKH->RKPH", heads), ((0, 0), (0, 0), (0, self.max_new_tokens), (0, 0)))

        last = jnp.take_along_axis(captured[FINAL], jnp.maximum(new.lengths - 1, 0)[:, None, None], axis=1)[:, 0]
        random = document_keys(self.sampling.seed, new.numbers[:, 0], new.numbers[:, 1])
        counts = jnp.ones_like(new.lengths)
        tokens = sample(logits(self.model.head, params, last), random, counts - 1, self.sampling)
        has_ended = self._is_last(tokens, counts)
        values = State(
            caches=tuple((cached(layer, Site.k), cached(layer, Site.v)) for layer in range(arch.num_layers)),
            activations=tuple(captured[key].astype(self.dtype) for key in self.keys),
            tokens=tokens,
            positions=new.lengths,
            counts=counts,
            has_ended=has_ended,
            is_active=jnp.ones_like(has_ended) if self.keys else ~has_ended,
            keys=random,
            completions=tokens[:, None],
        )
        return self._put(state, values, new.rows)

    def segment(self, params: Params, state: State) -> tuple[State, Report]:
        """Decoding steps, until there were `segment_steps` or no row of any device is active."""

        def goes_on(carry: tuple[Array, State]) -> Bool[Array, ""]:
            return (carry[0] < self.segment_steps) & carry[1].is_active.any()

        def body(carry: tuple[Array, State]) -> tuple[Array, State]:
            return carry[0] + 1, self.step(params, carry[1])

        steps, state = jax.lax.while_loop(goes_on, body, (jnp.int32(0), state))
        return state, Report(state.is_active, state.counts, state.completions, steps)

    def step(self, params: Params, state: State) -> State:
        """Each row's latest token goes through the model and gives the next. Rows that are not active stay as they are,
        but for their latest position, which is computed again."""
        layers = [CachedLayer(*cache, state.positions) for cache in state.caches]
        tokens = state.tokens[:, None]
        captured = self._apply(params, tokens, jnp.ones_like(tokens), state.positions[:, None], layers)
        sampled = sample(
            logits(self.model.head, params, captured[FINAL][:, 0]), state.keys, state.counts, self.sampling
        )
        goes_on = state.is_active & ~state.has_ended
        counts = state.counts + goes_on
        sampled = jnp.where(goes_on, sampled, state.tokens)
        has_ended = state.has_ended | self._is_last(sampled, counts)
        place = jnp.arange(self.max_new_tokens) == state.counts[:, None]
        return State(
            caches=tuple((layer.keys, layer.values) for layer in layers),
            activations=tuple(
                put_at(kept, captured[key].astype(self.dtype), state.positions, axis=0)
                for kept, key in zip(state.activations, self.keys, strict=True)
            ),
            tokens=sampled,
            positions=state.positions + goes_on,
            counts=counts,
            has_ended=has_ended,
            # Whoever captures wants the last token's activations, too: it takes one more step.
            is_active=goes_on if self.keys else goes_on & ~has_ended,
            keys=state.keys,
            completions=jnp.where(place & goes_on[:, None], sampled[:, None], state.completions),
        )

    def state_shapes(self, rows: int, dtype: jnp.dtype) -> State:
        """The state of `rows` rows (global), with caches of `dtype`, as shapes with shardings."""
        arch, mesh = self.model.arch, self.partition.mesh
        length = self.max_prompt + self.max_new_tokens
        shape = partial(_shape, row_sharding(mesh), rows)
        heads = NamedSharding(mesh, PartitionSpec("data", "tensor"))
        cache = _shape(heads, rows, arch.num_kv_heads, length, arch.head_dim, dtype=dtype)
        widths = [self.model.width(key.site) for key in self.keys]
        return State(
            caches=((cache, cache),) * arch.num_layers,
            activations=tuple(
                _shape(activation_sharding(mesh, width), rows, length, width, dtype=self.dtype) for width in widths
            ),
            **{name: shape(dtype=jnp.int32) for name in ("tokens", "positions", "counts")},
            **{name: shape(dtype=jnp.bool_) for name in ("has_ended", "is_active")},
            keys=shape(2, dtype=jnp.uint32),
            completions=shape(self.max_new_tokens, dtype=jnp.int32),
        )

    def new_row_shapes(self, rows: int) -> NewRows:
        """Of a prefill of `rows` rows (global)."""
        shape = partial(_shape, row_sharding(self.partition.mesh), rows)
        return NewRows(
            prompts=shape(self.max_prompt, dtype=jnp.int32),
            lengths=shape(dtype=jnp.int32),
            numbers=shape(2, dtype=jnp.uint32),
            rows=shape(dtype=jnp.int32),
        )

    def _apply(
        self, params: Params, tokens: Array, segments: Array, positions: Array, attend: Attend | Sequence[Attend]
    ) -> dict[ActivationKey, Array]:
        keys = self.model.generation.keys(self.keys)
        return self.model.apply(params, tokens, segments, positions, keys, attend, self.partition)

    def _is_last(self, tokens: Int32[Array, " B"], counts: Int32[Array, " B"]) -> Bool[Array, " B"]:
        return jnp.isin(tokens, jnp.array(self.end_tokens, jnp.int32)) | (counts == self.max_new_tokens)

    def _put(self, state: State, values: State, rows: Int32[Array, " R"]) -> State:
        """The new rows in their places, each device its own."""

        def of_one_device(state: State, values: State, rows: Array) -> State:
            def of_array(old: Array, new: Array) -> Array:
                return old.at[(rows, *(slice(size) for size in new.shape[1:]))].set(new, mode="drop")

            return jax.tree.map(of_array, state, values)

        shapes = self.state_shapes(state.tokens.shape[0], state.caches[0][0].dtype)
        specs = jax.tree.map(lambda shape: shape.sharding.spec, shapes)
        in_specs = (specs, specs, PartitionSpec("data"))
        put = jax.shard_map(of_one_device, mesh=self.partition.mesh, in_specs=in_specs, out_specs=specs)
        return put(state, values, rows)


@dataclass(frozen=True)
class Programs:
    """Compiled for one number of rows, room for prompts and completions, and way of sampling."""

    mesh: Mesh
    attention: Attention  # of the prefill
    new_rows: NewRows  # their shapes
    empty: jax.stages.Compiled  # () -> state without active rows
    prefill: jax.stages.Compiled  # (params, state, new rows) -> state
    segment: jax.stages.Compiled  # (params, state) -> state, report


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
    """Lowers and compiles. `rows` and `prefill_rows` are global.

    `params` are those of `model.generation.leaves(keys)`, or their shapes, on devices that are only described.
    """
    mesh, compute_dtype = partition.mesh, params["embed"].dtype
    chosen = choose_attention(attention, model.arch, mesh, max_prompt, compute_dtype.name)
    decoding = Decoding(
        model,
        partition,
        attend=chosen.attend,
        max_prompt=max_prompt,
        max_new_tokens=max_new_tokens,
        end_tokens=tuple(end_tokens),
        sampling=sampling,
        keys=tuple(keys),
        dtype=dtype,
        segment_steps=segment_steps,
    )
    state, new_rows = decoding.state_shapes(rows, compute_dtype), decoding.new_row_shapes(prefill_rows)
    of_state = jax.tree.map(lambda shape: shape.sharding, state)
    by_rows = row_sharding(mesh)
    of_report = Report(is_active=by_rows, counts=by_rows, completions=by_rows, steps=replicated(mesh))
    empty = jax.jit(
        lambda: jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), state), out_shardings=of_state
    )
    prefill = jax.jit(decoding.prefill, donate_argnums=1, out_shardings=of_state)
    segment = jax.jit(decoding.segment, donate_argnums=1, out_shardings=(of_state, of_report))
    prefill_options = compiler_options(mesh, prefill_rows * max_prompt)
    with jax.default_matmul_precision(matmul_precision(compute_dtype)):
        return Programs(
            mesh=mesh,
            attention=chosen,
            new_rows=new_rows,
            empty=empty.lower().compile(),
            prefill=prefill.lower(params, state, new_rows).compile(prefill_options),
            segment=segment.lower(params, state).compile(),
        )


def _shape(sharding: NamedSharding, *sizes: int, dtype: jnp.dtype | str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)
