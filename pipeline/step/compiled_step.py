"""The compiled step: token rows in, activations for the store out.

Letters: B rows, T positions, D width of the site, S slots of a row for activations (T, or K for selected tokens).
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int32, PyTree, Shaped

from pipeline.cluster.devices import describe
from pipeline.cluster.sharding import activation_sharding, replicated, row_sharding
from pipeline.core.sites import FINAL_NORM, ActivationKey, Site
from pipeline.models.attention.choosing import Attention, choose_attention
from pipeline.models.decoder import Finish, Params, TokenBatch, forward
from pipeline.models.exchange.context import context_axis
from pipeline.models.head import Head
from pipeline.models.partition import Partition
from pipeline.models.registry import Model
from pipeline.step.compiler import DeviceMemory, compiler_options, matmul_precision
from pipeline.step.outputs import StoredFeatures, StoredTokens, encode_features, head_outputs
from pipeline.step.spec import StepSpec
from pipeline.step.stored_values import RowStatistics, Stored, is_finite, row_statistics, to_stored

log = logging.getLogger("pipeline")

Captured = dict[ActivationKey, PyTree]


class StepOutputs(NamedTuple):
    """A step's outputs, on the devices."""

    arrays: tuple[Shaped[Array, "B S *k"], ...]  # the spec's `stored_arrays`; 0 in empty slots
    statistics: RowStatistics | None
    counts: Int32[Array, " 1+names"]  # over all processes: valid tokens, then non-finite tokens of each counted array

    @property
    def stored(self) -> PyTree:
        """Everything except the counts."""
        return self.arrays, self.statistics


class _Finished(NamedTuple):
    """The results for one captured activation: its stored form, the head's outputs (for the last norm), and the
    features of SAEs, by name."""

    stored: Stored | None
    outputs: PyTree | None
    features: dict[str, StoredFeatures]


@dataclass(frozen=True)
class CompiledStep:
    """The forward pass, compiled once for one shape. A different shape or sharding is an error; nothing recompiles."""

    mesh: Mesh
    spec: StepSpec
    attention: Attention | None  # None: no forward pass
    executable: jax.stages.Compiled

    @property
    def memory(self) -> DeviceMemory:
        return DeviceMemory.of(self.executable)

    def __call__(
        self,
        params: Params,
        tokens: Int32[Array, "B T"],
        segments: Int32[Array, "B T"],
        positions: Int32[Array, "B T"],
        *selected: Int32[Array, "B K"],
    ) -> StepOutputs:
        """Dispatches one step.

        Inputs and outputs are divided by rows along the mesh's `data` axis, except the counts, which are replicated.
        Slots of a row are divided along `context`, in the order of `exchange/context.py`. Activations may also be
        divided along `tensor` (`activation_sharding`). `selected` is passed if the spec has `selected`, and contains
        row positions, or -1.
        """
        return self.executable(params, tokens, segments, positions, *selected)


def compile_step(model: Model, spec: StepSpec, params: Params, partition: Partition) -> CompiledStep:
    """Lowers and compiles a step's forward pass.

    `params` may be shapes with shardings (`loading.abstract_params`), for devices that are not present. Raises
    ConfigError for an attention implementation or compiler options that cannot be used.
    """
    mesh, dtype = partition.mesh, params["embed"].dtype
    chosen = choose_attention(spec.attention, model.arch, mesh, spec.rows, spec.length, dtype.name)
    log.info("%s; %s", describe(mesh), chosen.describe())

    def capture(
        params: Params, finish: Finish, tokens: Array, segments: Array, positions: Array, *selected: Array
    ) -> Captured:
        batch = TokenBatch(tokens, segments, positions, *selected)
        return forward(model.arch, params, batch, spec.forward_keys, chosen.attend, partition, finish)

    with jax.default_matmul_precision(matmul_precision(dtype)):
        executable = _compile(capture, params, spec, partition, model.head)
    return CompiledStep(mesh, spec, chosen, executable)


def compile_storing(spec: StepSpec, mesh: Mesh, dtype: str) -> CompiledStep:
    """Compiles the step of a run whose activations, [B, T, D] in `dtype`, were already captured. It takes them by key,
    in place of the parameters, converts them to their stored dtype, and computes their statistics."""
    captured = {
        key: jax.ShapeDtypeStruct((spec.rows, spec.length, array.width), dtype, sharding=row_sharding(mesh))
        for key, array in spec.activations.items()
    }

    def capture(captured: Captured, finish: Finish, *inputs: Array) -> Captured:
        return {key: finish(key, activation) for key, activation in captured.items()}

    return CompiledStep(mesh, spec, None, _compile(capture, captured, spec, Partition(mesh)))


def _compile(
    capture: Callable[..., Captured], params: PyTree, spec: StepSpec, partition: Partition, head: Head | None = None
) -> jax.stages.Compiled:
    """`head` is the model's head, for a spec with outputs."""

    def step(params: Params, tokens: Array, segments: Array, positions: Array, *selected: Array) -> StepOutputs:
        stored = StoredTokens(tokens, segments, selected, partition.mesh)

        @jax.named_scope("store")
        def store(key: ActivationKey, activation: Array) -> Stored | None:
            """Converts an activation to its stored form, or to the model's dtype if it is needed for statistics only.

            Non-finite values are counted from the result: counting here would make a TPU keep the activation in a
            second layout until the end of the step.
            """
            is_kept = key in spec.activations
            if not is_kept and key not in spec.statistics_widths:
                return None
            taken = activation if key.site is Site.attn_pattern else stored.take(activation)  # patterns are selected
            masked = jnp.where(stored.exist[:, :, None], taken, 0)
            dtype = spec.activations[key].dtype if is_kept else str(activation.dtype)
            return to_stored(masked, dtype, spec.scale_group, spec.measures_error and is_kept)

        def finish(key: ActivationKey, activation: Array) -> _Finished:
            has_outputs = bool(spec.head_outputs) and key == FINAL_NORM
            return _Finished(
                store(key, activation),
                head_outputs(spec, head, params, activation, stored, partition) if has_outputs else None,
                encode_features(key, spec, params, activation, stored, partition.mesh),
            )

        captured = capture(params, finish, tokens, segments, positions, *selected)
        converted = {key: captured[key].stored for key in (*spec.keys, *spec.statistics_widths)}
        finite = {key: is_finite(values) for key, values in converted.items()}
        kept = [converted[key] for key in spec.keys]
        outputs, not_finite = captured[FINAL_NORM].outputs if spec.head_outputs else ((), ())
        sae_features = [captured[encoder.key].features[encoder.name] for encoder in spec.encoders]
        counted = (
            stored.valid,
            *(~finite[key] for key in spec.keys),
            *not_finite,
            *(features.not_finite for features in sae_features),
        )
        counts = jnp.stack([jnp.sum(tokens, dtype=jnp.int32) for tokens in counted])
        with jax.named_scope("statistics"):
            keys = tuple(spec.statistics_widths)
            parts = [converted[key] for key in keys], stored.exist, [finite[key] for key in keys]
            statistics = row_statistics(*parts) if keys else None
        scales = [activation.scales for activation in kept if activation.scales is not None]
        outputs = [*outputs, *(array for features in sae_features for array in features.arrays)]
        return StepOutputs((*(activation.values for activation in kept), *scales, *outputs), statistics, counts)

    # keep_unused: `memory` counts the weights of the last layer that no captured site needs, since they are loaded.
    jitted = jax.jit(step, out_shardings=_output_shardings(spec, partition.mesh), keep_unused=True)
    log.info("compiling the step for %d rows of %d tokens", spec.rows, spec.length)
    start = time.monotonic()
    lowered = jitted.lower(params, *_inputs(spec, partition.mesh))
    executable = lowered.compile(compiler_options(partition.mesh))
    log.info("compiled the step in %.1f s", time.monotonic() - start)
    return executable


def _inputs(spec: StepSpec, mesh: Mesh) -> list[jax.ShapeDtypeStruct]:
    """Tokens, segments and positions [B, T]; if the step selects tokens, also their positions [B, K]."""
    widths = [spec.length] * 3 + ([] if spec.selected is None else [spec.selected])
    return [jax.ShapeDtypeStruct((spec.rows, width), jnp.int32, sharding=row_sharding(mesh, width)) for width in widths]


def _output_shardings(spec: StepSpec, mesh: Mesh) -> StepOutputs:
    stored = spec.stored_arrays
    activations = (activation_sharding(mesh, array.width, spec.slots) for array in stored.activations)
    others = [row_sharding(mesh, spec.slots)] * (len(stored) - len(stored.activations))
    statistics = None
    if spec.statistics_shapes:
        by_name = dict.fromkeys(spec.statistics_shapes, row_sharding(mesh))
        axis = context_axis(mesh, spec.slots)
        by_slots = {"norms": NamedSharding(mesh, PartitionSpec("data", None, axis))} if axis else {}
        statistics = RowStatistics(**(by_name | by_slots))
    return StepOutputs((*activations, *others), statistics, replicated(mesh))
