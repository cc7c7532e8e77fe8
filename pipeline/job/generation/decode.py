"""The two compiled programs of generation: prefill of new rows, and a segment of decoding steps.

Both are compiled once, and update caches in place. Prompts are left-aligned, with position p in slot p and padding
after them, so that a row's values do not depend on the lengths of other rows.

With `speculate`, a step also computes proposed next tokens, and keeps those that it would have sampled itself.

Letters: B rows, R prompts of one prefill, M samples of each, P prompt slots, C completion slots, S = P + C, D width of
a site, T = 1 + `speculate` positions of a step.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Float32, Int32, PyTree, UInt32

from pipeline.cluster.sharding import activation_sharding, replicated, row_sharding
from pipeline.core.sites import FINAL_NORM, ActivationKey
from pipeline.job.generation.beams import Beams, first_beams, next_beams, reordered, search
from pipeline.job.generation.cache import (
    CachedHistory,
    CachedLayer,
    History,
    PromptHistory,
    PromptLayer,
    Slots,
    StepSlots,
    put_at,
)
from pipeline.job.generation.next_tokens import propose, sample, sample_keys
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

    # Per layer: keys and values, or latents and rotary keys, or the history of what is in place of attention; None for
    # a layer that uses another layer's keys.
    caches: tuple[tuple[Slots, Slots] | History | None, ...]
    activations: tuple[Float[Array, "B S D"], ...]  # in the order of the captured keys
    tokens: Int32[Array, " B"]  # each row's last token, which the layers have not processed yet
    positions: Int32[Array, " B"]  # of these tokens
    counts: Int32[Array, " B"]  # tokens in the completion
    has_ended: Bool[Array, " B"]  # whether the completion is complete
    is_active: Bool[Array, " B"]  # whether the row needs more steps
    keys: UInt32[Array, "B 2"]  # PRNG key of each row's document
    steps: Int32[Array, " B"]  # decoding steps that added to the completion
    text: Int32[Array, "B S"]  # the tokens of prompt and completion
    beams: Beams | None = None  # of beam search, in which completions and `counts` are the best complete ones


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
        layers = [self._prompt_layer(layer, new.lengths) for layer in range(arch.num_layers)]
        captured = self._apply(params, new.prompts, segments, order, layers)

        def cache(layer: int) -> tuple[Slots, Slots] | History | None:
            computed = layers[layer]
            if isinstance(computed, PromptLayer):
                return computed.cache(new.lengths, spec.slots(arch, layer), spec.cache_is_int8)
            return computed.cache if isinstance(computed, PromptHistory) else None

        last = jnp.take_along_axis(captured[FINAL_NORM], jnp.maximum(new.lengths - 1, 0)[:, None, None], axis=1)[:, 0]
        scores = self._logits(params, last)
        random = sample_keys(spec.sampling.seed, new.numbers[:, 0], new.numbers[:, 1], spec.samples)
        first = partial(self._sample, scores, numbers=jnp.zeros_like(new.lengths))
        tokens = jax.vmap(first, in_axes=1, out_axes=1)(random)
        counts = jnp.ones_like(tokens)
        has_ended = self._is_last(tokens, counts)
        prompts = jnp.pad(new.prompts, ((0, 0), (0, spec.max_new_tokens)))[:, None]
        is_first = jnp.arange(spec.length) == new.lengths[:, None, None]
        state = State(
            caches=tuple(map(cache, range(arch.num_layers))),
            activations=tuple(captured[key].astype(spec.dtype) for key in spec.keys),
            tokens=tokens,
            positions=jnp.broadcast_to(new.lengths[:, None], tokens.shape),
            counts=counts,
            has_ended=has_ended,
            is_active=jnp.ones_like(has_ended) if spec.keys else ~has_ended,
            keys=random,
            steps=jnp.zeros_like(counts),
            text=jnp.where(is_first, tokens[..., None], prompts),
        )
        if not spec.is_beam_search:
            return state
        scores = jnp.repeat(scores[:, None], spec.samples, axis=1)
        found = self._by_rows(partial(search, spec=spec), scores, first_beams(len(new.lengths), spec))
        is_active = jnp.broadcast_to(found.is_active[:, None], tokens.shape)
        return _searched(state, found.beams, found.tokens, is_active)

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
        """Runs each row's last token and the proposed next ones through the model, and samples a token after each.

        Those after a token that was not sampled are dropped. In an inactive row, the last position is computed again.
        Without attention the results are dropped, since the layer's history already includes the position.
        """
        spec, order = self.spec, jnp.arange(1 + self.spec.speculate)
        proposed = propose(state.text, state.positions, spec.speculate)
        tokens, positions = jnp.column_stack([state.tokens, proposed]), state.positions[:, None] + order
        num_filled = jnp.max(jnp.where(state.is_active, state.positions, 0)) + 1 + spec.speculate
        step = StepSlots(positions, num_filled, spec.length, spec.block)
        layers = [self._cached(layer, state, step) for layer in range(self.model.num_layers)]
        keys_of = [self.model.arch.keys_of(layer) for layer in range(self.model.num_layers)]
        attend = [
            layer if source is None else layers[source].attend_again
            for layer, source in zip(layers, keys_of, strict=True)
        ]
        captured = self._apply(params, tokens, jnp.ones_like(tokens), positions, attend)
        if state.beams is not None:
            scores = self._logits(params, captured[FINAL_NORM][:, 0])
            found = self._by_rows(partial(next_beams, spec=spec), scores, state.beams, state.is_active)
            caches = self._reordered(tuple(layer and layer.cache for layer in layers), found.parents, state)
            after = {"positions": state.positions + state.is_active, "steps": state.steps + state.is_active}
            return _searched(state._replace(caches=caches, **after), found.beams, found.tokens, found.is_active)
        sampled = self._sample_after(params, captured[FINAL_NORM], state)
        is_continued = state.is_active & ~state.has_ended
        is_last = self._is_last(sampled, state.counts[:, None] + 1 + order)
        goes_on = (sampled[:, :-1] == proposed) & ~is_last[:, :-1]
        is_new = jnp.cumprod(jnp.column_stack([is_continued, goes_on]), axis=1) > 0
        num_new = is_new.sum(axis=1, dtype=jnp.int32)
        last = jnp.take_along_axis(sampled, jnp.maximum(num_new - 1, 0)[:, None], axis=1)[:, 0]
        has_ended = state.has_ended | (is_new & is_last).any(axis=1)
        # Positions out of range are not written. Those after the last token are written again later, or not read.
        kept_positions = jnp.where(state.is_active[:, None], positions, spec.length + order)
        return State(
            caches=tuple(layer and layer.cache for layer in layers),
            activations=tuple(
                put_at(kept, captured[key].astype(spec.dtype), kept_positions, axis=0)
                for kept, key in zip(state.activations, spec.keys, strict=True)
            ),
            tokens=jnp.where(is_continued, last, state.tokens),
            positions=state.positions + num_new,
            counts=state.counts + num_new,
            has_ended=has_ended,
            # The activations of the last token need one more step.
            is_active=is_continued if spec.keys else is_continued & ~has_ended,
            keys=state.keys,
            steps=state.steps + is_continued,
            text=put_at(state.text, sampled, jnp.where(is_new, positions + 1, spec.length + order), axis=0),
        )

    def _sample_after(self, params: Params, final: Float[Array, "B T D"], state: State) -> Int32[Array, "B T"]:
        """The token after each position, with the random numbers of its place in the completion: those that the row
        would use without proposals."""

        def sample_after(final: Array, number: Array) -> Array:
            return self._sample(self._logits(params, final), state.keys, state.counts + number)

        return jax.vmap(sample_after, in_axes=(1, 0), out_axes=1)(final, jnp.arange(final.shape[1]))

    def _sample(
        self, scores: Float32[Array, "B V"], keys: UInt32[Array, "B 2"], numbers: Int32[Array, " B"]
    ) -> Int32[Array, " B"]:
        compute = partial(sample, sampling=self.spec.sampling)
        if self.spec.sampling.ranks_tokens:
            compute = partial(self._by_rows, compute)
        return compute(scores, keys, numbers)

    def _logits(self, params: Params, final: Float[Array, "B D"]) -> Float32[Array, "B V"]:
        """Divided by vocabulary like the head. Otherwise XLA would gather the head for `top_k`."""
        scores, partition, mesh = logits(self.model.head, params, final), self.partition, self.partition.mesh
        vocabulary, group = partition.vocabulary(scores.shape[-1])
        if group > 1:  # fsdp divides the head, and each part stays where it is: XLA would gather it
            parts = partition.mesh_with(group, context=partition.context)
            scores = jax.lax.with_sharding_constraint(scores, NamedSharding(parts, PartitionSpec(None, vocabulary)))
        vocabulary = "tensor" if scores.shape[-1] % mesh.shape["tensor"] == 0 else None
        return jax.lax.with_sharding_constraint(scores, NamedSharding(mesh, PartitionSpec("data", vocabulary)))

    def _by_rows(self, compute: Callable[..., PyTree], *inputs: PyTree) -> PyTree:
        """`compute` on each device's rows. For `top_k`, for which XLA would gather all devices' rows."""
        rows = PartitionSpec("data")
        return jax.shard_map(compute, mesh=self.partition.mesh, in_specs=rows, out_specs=rows, check_vma=False)(*inputs)

    def _reordered(self, caches: PyTree, parents: Int32[Array, " B"], state: State) -> PyTree:
        """The caches of the beams that rows continue. Those of a prompt are on one device."""
        specs = self._state_specs(state).caches
        reorder = partial(reordered, num_beams=self.spec.samples)
        return jax.shard_map(
            reorder, mesh=self.partition.mesh, in_specs=(specs, PartitionSpec("data")), out_specs=specs
        )(caches, parents)

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
            return jax.tree.map(lambda _: rows if self.model.arch.latent else heads, cache)

        mesh, widths = self.partition.mesh, (kept.shape[-1] for kept in state.activations)
        return State(
            caches=tuple(map(cache_specs, state.caches)),
            activations=tuple(activation_sharding(mesh, width).spec for width in widths),
            **{name: jax.tree.map(lambda _: rows, getattr(state, name)) for name in State._fields[2:]},
        )

    def _prompt_layer(self, layer: int, lengths: Int32[Array, " R"]) -> Attend | PromptHistory:
        kind = self.model.arch.kind(layer)
        if Part.attention not in kind.parts:
            return PromptHistory(lengths)
        return PromptLayer(self.attend) if kind.keys_of is None else self.attend

    def _cached(self, layer: int, state: State, step: StepSlots) -> CachedLayer | CachedHistory | None:
        cache, arch = state.caches[layer], self.model.arch
        if cache is None:
            return None
        if isinstance(cache, dict):
            return CachedHistory(cache, state.is_active)
        return CachedLayer(cache, step, arch.local if arch.is_local(layer) else None)

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
    arrays = {name: getattr(new, name) for name in State._fields[2:]}
    return new._replace(**jax.tree.map(lambda array: array[:, number], arrays))


def _searched(state: State, beams: Beams, tokens: Array, is_active: Array) -> State:
    """The state after a step of beam search, with the best complete sequences after the prompts."""
    first = state.positions + 1 - beams.steps  # position of a completion
    slots = jnp.arange(state.text.shape[-1]) - first[..., None]
    length = beams.completions.shape[-1]
    completions = jnp.take_along_axis(beams.completions, jnp.clip(slots, 0, length - 1), axis=-1)
    return state._replace(
        beams=beams,
        tokens=tokens,
        counts=beams.counts,
        text=jnp.where((slots >= 0) & (slots < length), completions, state.text),
        is_active=is_active,
        has_ended=~is_active,
    )


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
    if mesh.devices.flat[0].platform == "gpu":  # where XLA would copy each block before it is read
        spec = replace(spec, block=spec.length)
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
            prefill=prefill.compile(compiler_options(mesh)),
            segment=segment.lower(params, state).compile(),
        )


def _shape(sharding: NamedSharding, *sizes: int, dtype: jnp.dtype | str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)
