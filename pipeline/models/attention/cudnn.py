"""Attention on an NVIDIA GPU: cuDNN's fused kernel, through `jax.nn.dot_product_attention`."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float

from pipeline.core.host import device_memory
from pipeline.models.architecture import Architecture
from pipeline.models.attention.spec import AttentionInputs, AttentionSpec

_HOPPER = 9.0  # compute capability
_MAX_BIAS_SHARE = 1 / 8  # of a device's memory, most of which weights and activations need


def obstacle(arch: Architecture, mesh: Mesh, rows: int, length: int, dtype: str) -> str | None:
    """Why the model cannot use the kernel, as a clause for messages; None if it can."""
    device = mesh.devices.flat[0]
    capability, memory = float(device.compute_capability), device_memory(device)
    bias_bytes = 2 * length**2 * rows // mesh.shape["data"]
    max_head_dim = 256 if capability >= _HOPPER else 128
    if dtype != "bfloat16":
        return f"it needs model.dtype=bfloat16, and model.dtype is {dtype}"
    if arch.softcap is not None:
        return f"it does not support softcaps, and the model has a softcap of {arch.softcap:g}"
    if arch.sinks:
        return "it does not support attention sinks, and the model has them"
    head_dims = [sizes.head_dim for sizes in arch.all_sizes]
    if any(head_dim % 8 for head_dim in head_dims) or max(head_dims) > max_head_dim:
        return (
            f"on this GPU it needs head sizes that are multiples of 8 and at most {max_head_dim}, and the model's are "
            f"{' and '.join(map(str, head_dims))}"
        )
    if arch.value_dim > arch.head_dim:
        return f"it needs values no wider than keys, and the model's are {arch.value_dim} and {arch.head_dim} wide"
    if capability < 8.0:
        return f"it needs compute capability 8.0 (Ampere) or later, and the GPU has {capability}"
    if memory is not None and bias_bytes > _MAX_BIAS_SHARE * memory:
        return (
            f"it needs {bias_bytes / 2**30:.1f} GiB for the bias that masks other documents (batch.rows per GPU, times "
            f"batch.length = {length} squared, times 2 bytes), and the GPU has {memory / 2**30:.1f} GiB, of which at "
            f"most {_MAX_BIAS_SHARE:.1%} are for it"
        )
    return None


@jax.named_scope("cudnn")
def attend_cudnn(inputs: AttentionInputs, spec: AttentionSpec) -> Float[Array, "B T N W"]:
    """`Attend` without softcap and sinks. JAX keeps the sharding of rows and heads.

    cuDNN gets segments as a bias [B, 1, T, T] in q's dtype, the same for all heads and layers. It needs values as wide
    as keys, so narrower ones are padded with zeros.
    """
    q, k, v, segments, _ = inputs
    value_dim, padding = v.shape[-1], q.shape[-1] - v.shape[-1]
    v = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, padding))) if padding else v
    visible = segments[:, None, :, None] == segments[:, None, None, :]
    if spec.window is not None:  # part of the bias, since cuDNN does not support a window with a bias
        order = jnp.arange(q.shape[1])
        visible &= order[:, None] - order < spec.window
    z = jax.nn.dot_product_attention(
        q, k, v, mask=visible, scale=spec.scale, is_causal=spec.causal, implementation="cudnn"
    )
    return z[..., :value_dim] if padding else z
