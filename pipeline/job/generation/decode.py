"""The two compiled programs of generation: prefill of new rows, and a segment of decoding steps.

Both are compiled once, and update caches in place. Prompts are left-aligned, with position p in slot p and padding
after them, so that a row's values do not depend on the lengths of other rows.

Letters: B rows, R prompts of one prefill, M samples of each, P prompt slots, C completion slots, S = P + C, D width of
a site, K key-value heads, H head dim, W head dim of values.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int32, PyTree, UInt32

from pipeline.cluster.sharding import activation_sharding, replicated, row_sharding
from pipeline.core.sites import FINAL_NORM, ActivationKey, Site
from pipeline.job.generation.cache import (
    CachedHistory,
    CachedLayer,
    History,
    Int8Slots,
    PromptHistory,
    Slots,
    put_at,
)
from pipeline.job.generation.sampling import sample, sample_keys
from pipeline.models.architecture import Part
from pipeline.models.attention.choosing import Attention, choose_attention
from pipeline.models.attention.spec import Attend
from pipeline.models.decoder import Params
from pipeline.models.head import logits
from pipeline.models.partition import Partition
from pipeline.models.recurrent.recur import Recur
from pipeline.models.registry import Model
from pipeline.planning.generation_plan import GenerationSpec
from pipeline.step.compiler import compiler_options, matmul_precision

log = logging.getLogger("pipeline")


class State(NamedTuple):
    """The state of all rows, on the devices. Rows are divided along `data`, key-value heads along `tensor`."""

    # Per layer: keys and values, or the history of what is in place of attention; None for a layer that uses another
    # layer's keys.
    caches: tuple[tuple[Slots, Slots] | History | None, ...]
    activations: tuple[Float[Array, "B S D"], ...]  # in the order of the captured keys
    tokens: Int32[Array, " B"]  # each row's last token, which the layers have not processed yet
    positions: Int32[Array, " B"]  # of these tokens
    counts: Int32[Array, " B"]  # tokens in the completion
    has_ended: Bool[Array, " B"]  # whether the completion is complete
    is_active: Bool[Array, " B"]  # whether the row needs more steps
    keys: UInt32[Array, "B 2"]  # PRNG key of each row's document
    completions: Int32[Array, "B C"]


class NewRows(NamedTuple):
    """Prompts for some rows, the same number for each device along `data`. `rows` are indices among the device's rows,
    one for each sample; an index out of range means that there is no prompt."""

    prompts: Int32[Array, "R P"]
    lengths: Int32[Array, " R"]
    numbers: UInt32[Array, "R 2"]  # document numbers, as high and low half
    rows: Int32[Array, "R M"]


@dataclass(frozen=True)
class Decoding:
    """The two programs as functions, to be jitted."""

    model: Model
    partition: Partition
    attend: Attend  # for the prefill
    spec: GenerationSpec

    def start(self, params: Params, new: NewRows) -> State:
        """Runs prompts through the model like extraction does, and samples their first tokens. Arrays that differ
        between the samples of a prompt are [R, M, ...]."""
        arch, spec = self.model.arch, self.spec
        order = jnp.broadcast_to(jnp.arange(spec.max_prompt, dtype=jnp.int32), new.prompts.shape)
        segments = (order < new.lengths[:, None]).astype(jnp.int32)
        layers = [
            self.attend if self._has_attention(layer) else PromptHistory(new.lengths)
            for layer in range(arch.num_layers)
        ]
        captured = self._apply(params, new.prompts, segments, order, layers)

        def cached(layer: int, site: Site) -> Slots:
            """Slots after the prompt are 0: a NaN from the row's previous completion would make sums NaN, even though
            it is masked."""
            num_kv_heads = arch.with_sizes_of(layer).num_kv_heads
            heads = captured[ActivationKey(layer, site)].reshape(*order.shape, num_kv_heads, -1)
            slots = jnp.pad(jnp.einsum("RPKH->RKPH", heads), ((0, 0), (0, 0), (0, spec.max_new_tokens), (0, 0)))
            return Int8Slots.of(slots) if spec.cache_is_int8 else slots

        def cache(layer: int) -> tuple[Slots, Slots] | History | None:
            if arch.keys_of(layer) is not None:
                return None
            if not self._has_attention(layer):
                return layers[layer].cache
            return cached(layer, Site.k), cached(layer, Site.v)

        last = jnp.take_along_axis(captured[FINAL_NORM], jnp.maximum(new.lengths - 1, 0)[:, None, None], axis=1)[:, 0]
        scores = logits(self.model.head, params, last)
        random = sample_keys(spec.sampling.seed, new.numbers[:, 0], new.numbers[:, 1], spec.samples)
        first = partial(sample, scores, numbers=jnp.zeros_like(new.lengths), sampling=spec.sampling)
        tokens = jax.vmap(first, in_axes=1, out_axes=1)(random)
        counts = jnp.ones_like(tokens)
        has_ended = self._is_last(tokens, counts)
        return State(
            caches=tuple(map(cache, range(arch.num_layers))),
            activations=tuple(captured[key].astype(spec.dtype) for key in spec.keys),
            tokens=tokens,
            positions=jnp.broadcast_to(new.lengths[:, None], tokens.shape),
            counts=counts,
            has_ended=has_ended,
            is_active=jnp.ones_like(has_ended) if spec.keys else ~has_ended,
            keys=random,
            completions=jnp.pad(tokens[..., None], ((0, 0), (0, 0), (0, spec.max_new_tokens - 1))),
        )

    def segment(self, params: Params, state: State) -> tuple[State, Int32[Array, ""]]:
        """Runs up to `segment_steps` decoding steps, fewer if no row on any device is active. Returns their number,
        too."""

        def needs_step(carry: tuple[Array, State]) -> Bool[Array, ""]:
            return (carry[0] < self.spec.segment_steps) & carry[1].is_active.any()

        def body(carry: tuple[Array, State]) -> tuple[Array, State]:
            return carry[0] + 1, self.step(params, carry[1])

        steps, state = jax.lax.while_loop(needs_step, body, (jnp.int32(0), state))
        return state, steps

    def step(self, params: Params, state: State) -> State:
        """Runs each row's last token through the model and samples the next.

        In an inactive row, the last position is computed again. Without attention the results are dropped, since
        the layer's history already includes the position.
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
        active_positions = jnp.where(state.is_active, state.positions, spec.length)  # out of range: not written
        is_new = jnp.arange(spec.max_new_tokens) == state.counts[:, None]
        return State(
            caches=tuple(layer and layer.cache for layer in layers),
            activations=tuple(
                put_at(kept, captured[key].astype(spec.dtype), active_positions, axis=0)
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

    def state_shapes(self, new: State) -> State:
        """The global shapes and shardings of the state. `new`: the shapes of new rows, from `start`."""
        rows, length = self.spec.rows, self.spec.length
        new = jax.eval_shape(partial(_of_sample, number=0), new)
        new = new._replace(
            activations=tuple(
                jax.ShapeDtypeStruct((rows, length, kept.shape[-1]), kept.dtype) for kept in new.activations
            )
        )
        mesh = self.partition.mesh
        return jax.tree.map(
            lambda array, spec: _shape(NamedSharding(mesh, spec), rows, *array.shape[1:], dtype=array.dtype),
            new,
            self._state_specs(new),
        )

    def _state_specs(self, state: State) -> State:
        """How each array of a state is divided over the mesh."""
        rows, heads, inputs = (PartitionSpec("data", *axes) for axes in ((), ("tensor",), (None, "tensor")))

        def cache_specs(cache: tuple[Slots, Slots] | History | None) -> PyTree:
            if isinstance(cache, dict):
                return {name: heads if name == "state" else inputs for name in cache}
            return jax.tree.map(lambda _: heads, cache)

        mesh, widths = self.partition.mesh, (kept.shape[-1] for kept in state.activations)
        return State(
            caches=tuple(map(cache_specs, state.caches)),
            activations=tuple(activation_sharding(mesh, width).spec for width in widths),
            **dict.fromkeys(State._fields[2:], rows),
        )

    def _cached(self, cache: tuple[Slots, Slots] | History | None, state: State) -> CachedLayer | CachedHistory | None:
        if cache is None:
            return None
        if isinstance(cache, dict):
            return CachedHistory(cache, state.is_active)
        return CachedLayer(*cache, state.positions)

    def _has_attention(self, layer: int) -> bool:
        return Part.attention in self.model.arch.kind(layer).parts

    def new_row_shapes(self) -> NewRows:
        """The global shapes and shardings of a prefill's inputs."""
        mesh = self.partition.mesh
        shape = partial(_shape, row_sharding(mesh), self.spec.prefill_rows(mesh.shape["data"]))
        return NewRows(
            prompts=shape(self.spec.max_prompt, dtype=jnp.int32),
            lengths=shape(dtype=jnp.int32),
            numbers=shape(2, dtype=jnp.uint32),
            rows=shape(self.spec.samples, dtype=jnp.int32),
        )

    def _apply(
        self, params: Params, tokens: Array, segments: Array, positions: Array, attend: Sequence[Attend | Recur]
    ) -> dict[ActivationKey, Array]:
        keys = self.model.generation.keys(self.spec.keys)
        return self.model.apply(params, tokens, segments, positions, keys, attend, self.partition)

    def _is_last(self, tokens: Int32[Array, "*B"], counts: Int32[Array, "*B"]) -> Bool[Array, "*B"]:
        return jnp.isin(tokens, jnp.array(self.spec.end_tokens, jnp.int32)) | (counts == self.spec.max_new_tokens)

    def put(self, state: State, new: State, rows: Int32[Array, "R M"]) -> State:
        """Writes the samples of new prompts into rows of the state. Each device writes its own rows."""

        def put_on_device(state: State, new: State, rows: Array) -> State:
            def put_array(old: Array, new: Array, rows: Array) -> Array:
                return old.at[(rows, *(slice(size) for size in new.shape[1:]))].set(new, mode="drop")

            for number in range(self.spec.samples):
                state = jax.tree.map(partial(put_array, rows=rows[:, number]), state, _of_sample(new, number))
            return state

        specs = self._state_specs(state)
        in_specs = (specs, specs, PartitionSpec("data"))
        return jax.shard_map(put_on_device, mesh=self.partition.mesh, in_specs=in_specs, out_specs=specs)(
            state, new, rows
        )


def _of_sample(new: State, number: int) -> State:
    """The state of one sample of each prompt, from that of all."""
    return new._replace(**{name: getattr(new, name)[:, number] for name in State._fields[2:]})


@dataclass(frozen=True)
class Programs:
    """The two programs, compiled for one spec."""

    mesh: Mesh
    spec: GenerationSpec
    attention: Attention  # for the prefill
    new_rows: NewRows  # shapes
    empty: jax.stages.Compiled  # () -> state without active rows
    prefill: jax.stages.Compiled  # (params, state, new rows) -> state
    segment: jax.stages.Compiled  # (params, state) -> state, number of steps


def compile_programs(model: Model, params: Params, partition: Partition, spec: GenerationSpec) -> Programs:
    """Lowers and compiles the programs. Raises ConfigError for an encoder.

    `params` are loaded from `model.generation.leaves(spec.keys)`, or are their shapes with shardings, for devices that
    are not present.
    """
    mesh, compute_dtype = partition.mesh, params["embed"].dtype
    rows = spec.prefill_rows(mesh.shape["data"])
    attention = choose_attention(spec.attention, model.arch, mesh, rows, spec.max_prompt, compute_dtype.name)
    log.info("prefill: %s", attention.describe())
    decoding = Decoding(model, partition, attention.attend, spec)
    start, new_rows = jax.jit(decoding.start), decoding.new_row_shapes()

    def prefill(params: Params, state: State, new: NewRows) -> State:
        return decoding.put(state, start(params, new), new.rows)

    with jax.default_matmul_precision(matmul_precision(compute_dtype)):
        state = decoding.state_shapes(start.eval_shape(params, new_rows))
        shardings = jax.tree.map(lambda shape: shape.sharding, state)
        zeros = jax.jit(lambda: jax.tree.map(jnp.zeros_like, state), out_shardings=shardings)
        prefill = jax.jit(prefill, donate_argnums=1, out_shardings=shardings).lower(params, state, new_rows)
        segment = jax.jit(decoding.segment, donate_argnums=1, out_shardings=(shardings, replicated(mesh)))
        return Programs(
            mesh=mesh,
            spec=spec,
            attention=attention,
            new_rows=new_rows,
            empty=zeros.lower().compile(),
            prefill=prefill.compile(compiler_options(mesh, new_rows.prompts.size)),
            segment=segment.lower(params, state).compile(),
        )


def _shape(sharding: NamedSharding, *sizes: int, dtype: jnp.dtype | str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)
