"""The compiled step: token rows in, activations ready for the store out.

Letters: B rows, T positions, D width of the site.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int32

from pipeline.distributed import activation_sharding, replicated, row_sharding
from pipeline.models.attention import choose_attention
from pipeline.models.decoder import Params
from pipeline.models.partition import Partition
from pipeline.models.registry import Model
from pipeline.sites import ActivationKey

log = logging.getLogger("pipeline")


@dataclass(frozen=True)
class CompiledStep:
    """The forward pass, compiled once for one shape. Another shape or sharding is an error, never a recompilation."""

    mesh: Mesh
    keys: tuple[ActivationKey, ...]
    flops: int  # of one step, over all devices; analytic
    executable: jax.stages.Compiled

    def __call__(
        self,
        params: Params,
        tokens: Int32[Array, "B T"],
        segments: Int32[Array, "B T"],
        positions: Int32[Array, "B T"],
    ) -> tuple[tuple[Float[Array, "B T D"], ...], Int32[Array, " 1+keys"]]:
        """Dispatches one step. Inputs are divided by rows along the mesh's `data` axis.

        Returns the activations in the order of `keys`, divided as `activation_sharding` says and 0 at padding, and
        counts over all processes, the same on every device: of the valid tokens, then for each key of the tokens with a
        value that is not finite in the stored dtype.
        """
        return self.executable(params, tokens, segments, positions)


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
) -> CompiledStep:
    """Lowers and compiles the step for `rows` (global) rows of `length` tokens; activations come out as `dtype`."""
    keys = tuple(keys)
    mesh = partition.mesh
    chosen = choose_attention(attention, model.arch, mesh, length, params["embed"].dtype.name)
    log.info("%s", chosen.describe())

    def step(params: Params, tokens: Array, segments: Array, positions: Array) -> tuple[tuple[Array, ...], Array]:
        captured = model.apply(params, tokens, segments, positions, keys, chosen.attend, partition)
        valid = segments != 0
        with jax.named_scope("store"):
            activations = tuple(jnp.where(valid[:, :, None], captured[key], 0).astype(dtype) for key in keys)
            not_finite = [~jnp.isfinite(values).all(axis=-1) for values in activations]
            counts = jnp.stack([jnp.sum(tokens, dtype=jnp.int32) for tokens in (valid, *not_finite)])
        return activations, counts

    by_rows = row_sharding(mesh)
    batch = jax.ShapeDtypeStruct((rows, length), jnp.int32, sharding=by_rows)
    of_activations = tuple(activation_sharding(mesh, model.width(key.site)) for key in keys)
    jitted = jax.jit(step, out_shardings=(of_activations, replicated(mesh)))
    with jax.default_matmul_precision(matmul_precision(params["embed"].dtype)):
        executable = jitted.lower(params, batch, batch, batch).compile()
    return CompiledStep(mesh, keys, model.flops_per_token(keys, length) * rows * length, executable)


def matmul_precision(dtype: jnp.dtype | str) -> str:
    """What the user calls float32 is float32, also where the hardware would rather multiply in less."""
    return "highest" if dtype == jnp.float32 else "default"
