"""The two compiled programs of generation: prefill of new rows, and a segment of decoding steps.

Both are compiled once, and update caches in place. Prompts are left-aligned, with position p in slot p and padding
after them, so that a row's values do not depend on the lengths of other rows.

Letters: B rows, R rows of one prefill, P prompt slots, C completion slots, S = P + C, D width of a site, K key-value
heads, H head dim, W head dim of values.
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
from pipeline.core.sites import FINAL_NORM, ActivationKey, Site
from pipeline.generation.cache import CachedDelta, CachedLayer, DeltaCache, Int8Slots, PromptDelta, Slots, put_at
from pipeline.generation.sampling import document_keys, sample
from pipeline.generation.spec import GenerationSpec
from pipeline.models.architecture import Part
from pipeline.models.attention.choosing import Attend, Attention, choose_attention
from pipeline.models.decoder import Params
from pipeline.models.delta_net import Recur
from pipeline.models.head import logits
from pipeline.models.partition import Partition
from pipeline.models.registry import Model
from pipeline.step.compiler import compiler_options, matmul_precision


class State(NamedTuple):
    """The state of all rows, on the devices. Rows are divided along `data`, key-value heads along `tensor`."""

    # Per layer: keys and values, or the cache of its DeltaNet; None for a layer that uses another layer's keys.
    caches: tuple[tuple[Slots, Slots] | DeltaCache | None, ...]
    activations: tuple[Float[Array, "B S D"], ...]  # in the order of the captured keys
    tokens: Int32[Array, " B"]  # each row's last token, which the layers have not processed yet
    positions: Int32[Array, " B"]  # of these tokens
    counts: Int32[Array, " B"]  # tokens in the completion
    has_ended: Bool[Array, " B"]  # whether the completion is complete
    is_active: Bool[Array, " B"]  # whether the row needs more steps
    keys: UInt32[Array, "B 2"]  # PRNG key of each row's document
    completions: Int32[Array, "B C"]


class Report(NamedTuple):
    """The results that the host reads after a segment."""

    is_active: Bool[Array, " B"]
    counts: Int32[Array, " B"]
    completions: Int32[Array, "B C"]
    steps: Int32[Array, ""]


class NewRows(NamedTuple):
    """Prompts for some rows, the same number for each device along `data`. `rows` are indices among the device's rows;
    an index out of range means that there is no prompt."""

    prompts: Int32[Array, "R P"]
    lengths: Int32[Array, " R"]
    numbers: UInt32[Array, "R 2"]  # document numbers, as high and low half
    rows: Int32[Array, " R"]


@dataclass(frozen=True)
class Decoding:
    """The two programs as functions, to be jitted."""

    model: Model
    partition: Partition
    attend: Attend  # for the prefill
    spec: GenerationSpec

    def prefill(self, params: Params, state: State, new: NewRows) -> State:
        """Runs prompts through the model like extraction does, samples their first tokens, and writes both into the
        state."""
        arch, spec = self.model.arch, self.spec
        order = jnp.broadcast_to(jnp.arange(spec.max_prompt, dtype=jnp.int32), new.prompts.shape)
        segments = (order < new.lengths[:, None]).astype(jnp.int32)
        layers = [
            PromptDelta(new.lengths) if self._is_delta(layer) else self.attend for layer in range(arch.num_layers)
        ]
        captured = self._apply(params, new.prompts, segments, order, layers)

        def cached(layer: int, site: Site) -> Slots:
            """Slots after the prompt are 0: a NaN from the row's previous completion would make sums NaN, even though
            it is masked."""
            num_kv_heads = arch.with_sizes_of(layer).num_kv_heads
            heads = captured[ActivationKey(layer, site)].reshape(*order.shape, num_kv_heads, -1)
            slots = jnp.pad(jnp.einsum("RPKH->RKPH", heads), ((0, 0), (0, 0), (0, spec.max_new_tokens), (0, 0)))
            return Int8Slots.of(slots) if spec.cache_is_int8 else slots

        def cache(layer: int) -> tuple[Slots, Slots] | DeltaCache | None:
            if arch.keys_of(layer) is not None:
                return None
            return layers[layer].cache if self._is_delta(layer) else (cached(layer, Site.k), cached(layer, Site.v))

        last = jnp.take_along_axis(captured[FINAL_NORM], jnp.maximum(new.lengths - 1, 0)[:, None, None], axis=1)[:, 0]
        random = document_keys(spec.sampling.seed, new.numbers[:, 0], new.numbers[:, 1])
        counts = jnp.ones_like(new.lengths)
        tokens = sample(logits(self.model.head, params, last), random, counts - 1, spec.sampling)
        has_ended = self._is_last(tokens, counts)
        values = State(
            caches=tuple(map(cache, range(arch.num_layers))),
            activations=tuple(captured[key].astype(spec.dtype) for key in spec.keys),
            tokens=tokens,
            positions=new.lengths,
            counts=counts,
            has_ended=has_ended,
            is_active=jnp.ones_like(has_ended) if spec.keys else ~has_ended,
            keys=random,
            completions=tokens[:, None],
        )
        return self._put(state, values, new.rows)

    def segment(self, params: Params, state: State) -> tuple[State, Report]:
        """Runs up to `segment_steps` decoding steps, fewer if no row on any device is active."""

        def needs_step(carry: tuple[Array, State]) -> Bool[Array, ""]:
            return (carry[0] < self.spec.segment_steps) & carry[1].is_active.any()

        def body(carry: tuple[Array, State]) -> tuple[Array, State]:
            return carry[0] + 1, self.step(params, carry[1])

        steps, state = jax.lax.while_loop(needs_step, body, (jnp.int32(0), state))
        return state, Report(state.is_active, state.counts, state.completions, steps)

    def step(self, params: Params, state: State) -> State:
        """Runs each row's last token through the model and samples the next.

        In an inactive row, the last position is computed again. With DeltaNets the results are dropped, since their
        states already include the position.
        """
        spec = self.spec
        layers = [self._cached(cache, state) for cache in state.caches]
        keys_of = [self.model.arch.keys_of(layer) for layer in range(self.model.num_layers)]
        attend = [
            layer if source is None else layers[source].attend_again
            for layer, source in zip(layers, keys_of, strict=True)
        ]
        tokens = state.tokens[:, None]
        captured = self._apply(params, tokens, jnp.ones_like(tokens), state.positions[:, None], attend)
        sampled = sample(
            logits(self.model.head, params, captured[FINAL_NORM][:, 0]), state.keys, state.counts, spec.sampling
        )
        is_continued = state.is_active & ~state.has_ended
        counts = state.counts + is_continued
        sampled = jnp.where(is_continued, sampled, state.tokens)
        has_ended = state.has_ended | self._is_last(sampled, counts)
        is_new = jnp.arange(spec.max_new_tokens) == state.counts[:, None]
        return State(
            caches=tuple(layer and layer.cache for layer in layers),
            activations=tuple(
                put_at(
                    kept, self._select_active(state, captured[key].astype(spec.dtype), kept), state.positions, axis=0
                )
                for kept, key in zip(state.activations, spec.keys, strict=True)
            ),
            tokens=sampled,
            positions=state.positions + is_continued,
            counts=counts,
            has_ended=has_ended,
            # The activations of the last token need one more step.
            is_active=is_continued if spec.keys else is_continued & ~has_ended,
            keys=state.keys,
            completions=jnp.where(is_new & is_continued[:, None], sampled[:, None], state.completions),
        )

    def state_shapes(self, dtype: jnp.dtype) -> State:
        """The global shapes and shardings of the state, with caches in `dtype`."""
        arch, mesh, spec = self.model.arch, self.partition.mesh, self.spec
        shape = partial(_shape, row_sharding(mesh), spec.rows)
        heads = NamedSharding(mesh, PartitionSpec("data", "tensor"))

        def slots(num_heads: int, width: int) -> Slots:
            shape = partial(_shape, heads, spec.rows, num_heads, spec.length)
            if spec.cache_is_int8:
                return Int8Slots(shape(width, dtype=jnp.int8), shape(dtype=jnp.float32))
            return shape(width, dtype=dtype)

        def cache(layer: int) -> tuple[Slots, Slots] | DeltaCache | None:
            if self._is_delta(layer):
                return self._delta_shapes(dtype)
            sizes = arch.with_sizes_of(layer)
            keys_and_values = tuple(slots(sizes.num_kv_heads, width) for width in (sizes.head_dim, sizes.value_dim))
            return keys_and_values if arch.keys_of(layer) is None else None

        widths = [self.model.width(key, spec.length) for key in spec.keys]
        return State(
            caches=tuple(map(cache, range(arch.num_layers))),
            activations=tuple(
                _shape(activation_sharding(mesh, width), spec.rows, spec.length, width, dtype=spec.dtype)
                for width in widths
            ),
            **{name: shape(dtype=jnp.int32) for name in ("tokens", "positions", "counts")},
            **{name: shape(dtype=jnp.bool_) for name in ("has_ended", "is_active")},
            keys=shape(2, dtype=jnp.uint32),
            completions=shape(spec.max_new_tokens, dtype=jnp.int32),
        )

    def _delta_shapes(self, dtype: jnp.dtype) -> DeltaCache:
        delta, mesh = self.model.arch.delta, self.partition.mesh
        shape = partial(_shape, NamedSharding(mesh, PartitionSpec("data", None, "tensor")), self.spec.rows)
        key = shape(delta.num_taps - 1, delta.num_heads, delta.key_dim, dtype=dtype)
        value_heads = delta.num_heads, delta.values_per_key
        return DeltaCache(
            q=key,
            k=key,
            v=shape(delta.num_taps - 1, *value_heads, delta.value_dim, dtype=dtype),
            state=_shape(
                NamedSharding(mesh, PartitionSpec("data", "tensor")),
                *(self.spec.rows, *value_heads, delta.key_dim, delta.value_dim),
                dtype=jnp.float32,
            ),
        )

    def _cached(self, cache: tuple[Slots, Slots] | DeltaCache | None, state: State) -> CachedLayer | CachedDelta | None:
        if cache is None:
            return None
        is_delta = isinstance(cache, DeltaCache)
        return CachedDelta(cache, state.is_active) if is_delta else CachedLayer(*cache, state.positions)

    def _is_delta(self, layer: int) -> bool:
        return Part.delta in self.model.arch.blocks(layer).parts

    def _select_active(
        self, state: State, new: Float[Array, "B 1 D"], kept: Float[Array, "B S D"]
    ) -> Float[Array, "B 1 D"]:
        """`new` for active rows and the kept values for others. Without DeltaNets, inactive rows compute the same
        values again, so `new` is used for all."""
        if self.model.arch.delta is None:
            return new
        old = jnp.take_along_axis(kept, state.positions[:, None, None], axis=1)
        return jnp.where(state.is_active[:, None, None], new, old)

    def new_row_shapes(self) -> NewRows:
        """The global shapes and shardings of a prefill's inputs."""
        mesh = self.partition.mesh
        shape = partial(_shape, row_sharding(mesh), self.spec.prefill_rows(mesh.shape["data"]))
        return NewRows(
            prompts=shape(self.spec.max_prompt, dtype=jnp.int32),
            lengths=shape(dtype=jnp.int32),
            numbers=shape(2, dtype=jnp.uint32),
            rows=shape(dtype=jnp.int32),
        )

    def _apply(
        self, params: Params, tokens: Array, segments: Array, positions: Array, attend: Sequence[Attend | Recur]
    ) -> dict[ActivationKey, Array]:
        keys = self.model.generation.keys(self.spec.keys)
        return self.model.apply(params, tokens, segments, positions, keys, attend, self.partition)

    def _is_last(self, tokens: Int32[Array, " B"], counts: Int32[Array, " B"]) -> Bool[Array, " B"]:
        return jnp.isin(tokens, jnp.array(self.spec.end_tokens, jnp.int32)) | (counts == self.spec.max_new_tokens)

    def _put(self, state: State, values: State, rows: Int32[Array, " R"]) -> State:
        """Writes the new rows into the state. Each device writes its own rows."""

        def put_on_device(state: State, values: State, rows: Array) -> State:
            def put_array(old: Array, new: Array) -> Array:
                return old.at[(rows, *(slice(size) for size in new.shape[1:]))].set(new, mode="drop")

            return jax.tree.map(put_array, state, values)

        shapes = self.state_shapes(jnp.float32)  # the dtype does not matter
        specs = jax.tree.map(lambda shape: shape.sharding.spec, shapes)
        in_specs = (specs, specs, PartitionSpec("data"))
        put = jax.shard_map(put_on_device, mesh=self.partition.mesh, in_specs=in_specs, out_specs=specs)
        return put(state, values, rows)


@dataclass(frozen=True)
class Programs:
    """The two programs, compiled for one spec."""

    mesh: Mesh
    attention: Attention  # for the prefill
    new_rows: NewRows  # shapes
    empty: jax.stages.Compiled  # () -> state without active rows
    prefill: jax.stages.Compiled  # (params, state, new rows) -> state
    segment: jax.stages.Compiled  # (params, state) -> state, report


def compile_programs(model: Model, params: Params, partition: Partition, spec: GenerationSpec) -> Programs:
    """Lowers and compiles the programs.

    `params` are loaded from `model.generation.leaves(spec.keys)`, or are their shapes with shardings, for devices that
    are not present.
    """
    mesh, compute_dtype = partition.mesh, params["embed"].dtype
    rows = spec.prefill_rows(mesh.shape["data"])
    attention = choose_attention(spec.attention, model.arch, mesh, rows, spec.max_prompt, compute_dtype.name)
    decoding = Decoding(model, partition, attention.attend, spec)
    state, new_rows = decoding.state_shapes(compute_dtype), decoding.new_row_shapes()
    state_shardings = jax.tree.map(lambda shape: shape.sharding, state)
    by_rows = row_sharding(mesh)
    report_shardings = Report(is_active=by_rows, counts=by_rows, completions=by_rows, steps=replicated(mesh))
    empty = jax.jit(
        lambda: jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), state), out_shardings=state_shardings
    )
    prefill = jax.jit(decoding.prefill, donate_argnums=1, out_shardings=state_shardings)
    segment = jax.jit(decoding.segment, donate_argnums=1, out_shardings=(state_shardings, report_shardings))
    prefill_options = compiler_options(mesh, new_rows.prompts.size)
    with jax.default_matmul_precision(matmul_precision(compute_dtype)):
        return Programs(
            mesh=mesh,
            attention=attention,
            new_rows=new_rows,
            empty=empty.lower().compile(),
            prefill=prefill.lower(params, state, new_rows).compile(prefill_options),
            segment=segment.lower(params, state).compile(),
        )


def _shape(sharding: NamedSharding, *sizes: int, dtype: jnp.dtype | str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)
