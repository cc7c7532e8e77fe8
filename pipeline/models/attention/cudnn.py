"""Attention on an NVIDIA GPU: cuDNN's fused kernel, through `jax.nn.dot_product_attention`."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int32

from pipeline.models.architecture import Architecture
from pipeline.models.attention.spec import AttentionSpec

_HOPPER = 9.0  # compute capability


def obstacle(arch: Architecture, mesh: Mesh, length: int, dtype: str) -> str | None:
    """Why the model cannot use the kernel, and what would change that; None if it can."""
    capability = float(mesh.devices.flat[0].compute_capability)
    max_head_dim = 256 if capability >= _HOPPER else 128
    if dtype != "bfloat16":
        return f"it computes in bfloat16 and model.dtype is {dtype}"
    if arch.softcap is not None:
        return f"it cannot cap scores, and the model caps them at {arch.softcap:g}"
    if arch.sinks:
        return "it does not take attention sinks, and the model's heads have them"
    head_dims = [sizes.head_dim for sizes in arch.all_sizes]
    if any(head_dim % 8 for head_dim in head_dims) or max(head_dims) > max_head_dim:
        return (
            f"on this GPU it takes heads of a multiple of 8 up to {max_head_dim}, and the model's are "
            f"{' and '.join(map(str, head_dims))}"
        )
    if arch.value_dim > arch.head_dim:
        return f"it takes values as wide as keys, and the model's have {arch.value_dim} and {arch.head_dim} dimensions"
    if capability < 8.0:
        return f"it needs compute capability 8.0 (Ampere) and the GPU has {capability}"
    return None


@jax.named_scope("cudnn")
def attend_cudnn(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K W"],
    segments: Int32[Array, "B T"],
    spec: AttentionSpec,
) -> Float[Array, "B T N W"]:
    """`Attend` without a softcap and without sinks. JAX keeps rows and heads divided among devices as they are.

    cuDNN takes segments as a bias: [B, 1, T, T] numbers in q's dtype, the same for all heads and layers; and values as
    wide as keys: narrower ones get zeros.
    """
    value_dim, missing = v.shape[-1], q.shape[-1] - v.shape[-1]
    v = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, missing))) if missing else v
    visible = segments[:, None, :, None] == segments[:, None, None, :]
    if spec.window is not None:  # also in the bias: cuDNN does not take both
        order = jnp.arange(q.shape[1])
        visible &= order[:, None] - order < spec.window
    z = jax.nn.dot_product_attention(
        q, k, v, mask=visible, scale=spec.scale, is_causal=spec.causal, implementation="cudnn"
    )
    return z[..., :value_dim] if missing else z
