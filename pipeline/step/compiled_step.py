"""The compiled step: token rows in, activations ready for the store out.

Letters: B rows, T positions, D width of the site, S slots of a row for activations: T, or K for selected tokens.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float32, Int32, PyTree, Shaped

from pipeline.cluster.sharding import activation_sharding, make_mesh, replicated, row_sharding
from pipeline.config.choices import Weights
from pipeline.core.sites import ActivationKey
from pipeline.models.attention.choosing import Attention, choose_attention
from pipeline.models.decoder import Params
from pipeline.models.partition import Partition
from pipeline.models.registry import Model
from pipeline.planning.plan import Plan
from pipeline.step.storage_dtypes import Stored, as_stored, is_finite, numbers
from pipeline.store.format.int8 import DTYPE as INT8
from pipeline.store.format.layout import ITEM_BYTES

log = logging.getLogger("pipeline")

Captured = dict[ActivationKey, Array]
Finish = Callable[[Array], Stored]
CompilerOptions = dict[str, bool | str]

_ONEDNN_TOKENS = 512  # of a step, from which on its products are faster


class RowStatistics(NamedTuple):
    """Of each row's valid, finite tokens: the part of the statistics that the devices compute.

    The keys' features lie one after the other in W. In one array each, since every output costs the host time.
    """

    moments: Float32[Array, "B 2 W"]  # of each feature the mean, and the sum of squared deviations from it
    norms: Float32[Array, "B keys S"]  # of each token; 0 where there is none, NaN where a value is not finite
    squared_errors: Float32[Array, "B keys"] | None  # of dtypes of one byte: what storing changes


class StepOutputs(NamedTuple):
    """What a step leaves on the devices."""

    activations: tuple[Shaped[Array, "B S D"], ...]  # in the order of the keys; 0 where there is no token
    scales: tuple[Float32[Array, "B S G"], ...]  # of int8; else none
    statistics: RowStatistics | None
    counts: Int32[Array, " 1+keys"]  # over all processes: valid tokens, then of each key those that are not finite


@dataclass(frozen=True)
class CompiledStep:
    """The forward pass, compiled once for one shape. Another shape or sharding is an error, never a recompilation."""

    mesh: Mesh
    keys: tuple[ActivationKey, ...]
    attention: Attention | None  # None: there is no forward pass
    flops: int  # of one step, over all devices; analytic
    executable: jax.stages.Compiled

    def __call__(
        self,
        params: Params,
        tokens: Int32[Array, "B T"],
        segments: Int32[Array, "B T"],
        positions: Int32[Array, "B T"],
        *selected: Int32[Array, "B K"],
    ) -> StepOutputs:
        """Dispatches one step. Inputs are divided by rows along the mesh's `data` axis, and so is what comes out, but
        for the counts, which every device has. Activations may be divided along `tensor` too: `activation_sharding`.
        `selected`, of a step that was compiled with `num_selected`, are row positions, or -1."""
        return self.executable(params, tokens, segments, positions, *selected)

    @property
    def host_temp_bytes(self) -> int:
        """The temporary memory that each call takes of the host's, on CPUs. Elsewhere it is the devices': 0."""
        devices = self.mesh.local_devices
        memory = self.executable.memory_analysis() if devices[0].platform == "cpu" else None
        return 0 if memory is None else len(devices) * memory.temp_size_in_bytes


def planned_partition(plan: Plan, devices: Sequence[jax.Device] | None = None) -> Partition:
    """The plan's mesh and division of the weights, over all devices or over those that are given."""
    return Partition(make_mesh(plan.tensor, devices), fsdp=plan.weights is Weights.fsdp)


def compile_plan(plan: Plan, model: Model, params: Params, partition: Partition) -> CompiledStep:
    """The step of a run of this plan."""
    return compile_step(model, params, partition, attention=plan.attention, **_what_is_stored(plan))


def _what_is_stored(plan: Plan) -> dict[str, Any]:
    """Of a plan, what `compile_step` and `_compile` take by name."""
    return {
        "rows": plan.step_rows,
        "length": plan.length,
        "keys": plan.keys,
        "dtype": plan.dtype,
        "statistics": plan.statistics,
        "num_selected": plan.selected,
        "int8_group": plan.int8_group,
    }


def compile_step(
    model: Model,
    params: Params,
    partition: Partition,
    *,
    rows: int,
    length: int,
    keys: Sequence[ActivationKey],
    dtype: str,
    attention: str,
    statistics: bool = True,
    num_selected: int | None = None,
    int8_group: int | None = None,
) -> CompiledStep:
    """Lowers and compiles the step for `rows` (global) rows of `length` tokens; activations come out as `dtype`.

    With `num_selected` (K) they are those of the selected tokens of each row, which the step takes as a further input.
    `int8_group`: features that share a scale of int8; None for all of a token's.
    `params` may be shapes with shardings (`Model.abstract_params`), on devices that are only described.
    """
    keys = tuple(keys)
    chosen = choose_attention(attention, model.arch, partition.mesh, length, params["embed"].dtype.name)
    log.info("%s", chosen.describe())

    def capture(params: Params, tokens: Array, segments: Array, positions: Array, finish: Finish) -> Captured:
        return model.apply(params, tokens, segments, positions, keys, chosen.attend, partition, finish)

    with jax.default_matmul_precision(matmul_precision(params["embed"].dtype)):
        executable = _compile(
            capture,
            params,
            partition.mesh,
            model,
            rows=rows,
            length=length,
            keys=keys,
            dtype=dtype,
            statistics=statistics,
            num_selected=num_selected,
            int8_group=int8_group,
        )
    return CompiledStep(partition.mesh, keys, chosen, model.flops_per_token(keys, length) * rows * length, executable)


def compile_storing(plan: Plan, model: Model, mesh: Mesh, dtype: str) -> CompiledStep:
    """The step of a run whose activations, [B, T, D] as `dtype`, were captured before: it takes them, by key, in place
    of the parameters, and does what is left."""
    shapes = {
        key: jax.ShapeDtypeStruct((plan.step_rows, plan.length, width), dtype, sharding=row_sharding(mesh))
        for key, width in zip(plan.keys, plan.widths, strict=True)
    }

    def capture(captured: Captured, tokens: Array, segments: Array, positions: Array, finish: Finish) -> Captured:
        return {key: finish(activation) for key, activation in captured.items()}

    executable = _compile(capture, shapes, mesh, model, **_what_is_stored(plan))
    return CompiledStep(mesh, plan.keys, None, 0, executable)


def _compile(
    capture: Callable[..., Captured],
    params: PyTree,
    mesh: Mesh,
    model: Model,
    *,
    rows: int,
    length: int,
    keys: Sequence[ActivationKey],
    dtype: str,
    statistics: bool,
    num_selected: int | None,
    int8_group: int | None,
) -> jax.stages.Compiled:
    with_error = statistics and ITEM_BYTES[dtype] == 1

    def step(params: Params, tokens: Array, segments: Array, positions: Array, *selected: Array) -> StepOutputs:
        valid = segments != 0
        stored = selected[0] >= 0 if selected else valid

        @jax.named_scope("store")
        def finish(activation: Array) -> Stored:
            """As it is stored. Counted below, or a TPU would keep it in another layout until the step's end."""
            for places in selected:
                activation = jnp.take_along_axis(activation, jnp.maximum(places, 0)[:, :, None], axis=1)
            return as_stored(jnp.where(stored[:, :, None], activation, 0), dtype, int8_group, with_error)

        captured = capture(params, tokens, segments, positions, finish)
        finished = [captured[key] for key in keys]
        finite = [is_finite(each) for each in finished]
        counts = jnp.stack([jnp.sum(tokens, dtype=jnp.int32) for tokens in (valid, *(~each for each in finite))])
        with jax.named_scope("statistics"):
            of_rows = _row_statistics(finished, stored, finite) if statistics else None
        scales = tuple(each.scales for each in finished if each.scales is not None)
        return StepOutputs(tuple(each.values for each in finished), scales, of_rows, counts)

    by_rows = row_sharding(mesh)
    widths = [length] * 3 + ([] if num_selected is None else [num_selected])  # of tokens, segments, positions, selected
    inputs = [jax.ShapeDtypeStruct((rows, width), jnp.int32, sharding=by_rows) for width in widths]
    of_activations = tuple(activation_sharding(mesh, model.width(key.site)) for key in keys)
    of_scales = (by_rows,) * (len(keys) if dtype == INT8 else 0)
    of_statistics = RowStatistics(by_rows, by_rows, by_rows if with_error else None) if statistics else None
    jitted = jax.jit(step, out_shardings=StepOutputs(of_activations, of_scales, of_statistics, replicated(mesh)))
    return jitted.lower(params, *inputs).compile(compiler_options(mesh, rows * length))


def _row_statistics(
    finished: Sequence[Stored], stored: Bool[Array, "B S"], finite: Sequence[Bool[Array, "B S"]]
) -> RowStatistics:
    moments, norms = [], []
    for each, of_tokens in zip(finished, finite, strict=True):
        used = (stored & of_tokens)[:, :, None]
        x = jnp.where(used, numbers(each), 0)
        mean = jnp.sum(x, axis=1) / jnp.maximum(jnp.sum(used, axis=1), 1)
        m2 = jnp.sum(jnp.where(used, jnp.square(x - mean[:, None]), 0), axis=1)
        moments.append(jnp.stack([mean, m2], axis=1))
        norms.append(jnp.where(of_tokens, jnp.linalg.norm(x, axis=-1), jnp.nan))
    errors = [each.squared_error for each in finished if each.squared_error is not None]
    squared_errors = jnp.stack(errors, axis=1) if errors else None
    return RowStatistics(jnp.concatenate(moments, axis=-1), jnp.stack(norms, axis=1), squared_errors)


def matmul_precision(dtype: jnp.dtype | str) -> str:
    """What the user calls float32 is float32, also where the hardware would rather multiply in less."""
    return "highest" if dtype == jnp.float32 else "default"


def compiler_options(mesh: Mesh, tokens: int) -> CompilerOptions:
    """What a program that computes so many tokens (global) at once is compiled with: on CPUs oneDNN's matrix products.

    Of large matrices they are 1.05 to 1.2 times as fast as XLA's choice, YNNPACK, of small ones half as fast or less
    (docs/performance.md). The choice depends on the configuration alone: a row has the same bits whatever the number
    of devices that share the step.
    """
    is_large = mesh.devices.flat[0].platform == "cpu" and tokens >= _ONEDNN_TOKENS
    return _onednn_options() if is_large else {}


@cache
def _onednn_options() -> CompilerOptions:
    """Empty where this jaxlib does not know them. One that is built without oneDNN ignores them."""
    options: CompilerOptions = {
        "xla_cpu_use_onednn": True,
        "xla_cpu_experimental_onednn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT",
    }
    try:
        jax.jit(lambda: 0).lower().compile(options)
    except jax.errors.JaxRuntimeError as error:
        log.info("matrix products without oneDNN: %s", error)
        return {}
    return options
