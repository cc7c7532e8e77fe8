"""Latent attention (DeepSeek-V2, arXiv 2405.04434) for caches, which keep one latent vector and one rotary key per
position instead of the keys and values of all heads.

Letters: B rows, T positions, N heads, H head dim, R rotary dims, h = H - R, W head dim of values, X = h + W, Z dims of
a latent.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float


class Latent(NamedTuple):
    """What the keys and values of some positions are computed from."""

    values: Float[Array, "B T Z"]
    rotary: Float[Array, "B T R"]  # rotated; the last dims of all heads' keys
    up: Float[Array, "N X Z"]  # projects a latent to the other dims of a head's key, then to its value

    @property
    def num_rotary(self) -> int:
        return self.rotary.shape[-1]

    def expanded(self, head_dim: int) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N W"]]:
        """All heads' keys and values."""
        projected = jnp.einsum("BTZ,NXZ->BTNX", self.values, self.up)
        k, v = jnp.split(projected, [head_dim - self.num_rotary], axis=-1)
        rotary = jnp.broadcast_to(self.rotary[:, :, None], (*k.shape[:-1], self.num_rotary))
        return jnp.concatenate([k, rotary], axis=-1), v

    def absorb(self, q: Float[Array, "B T N H"]) -> tuple[Float[Array, "B T N Z"], Float[Array, "B T N R"]]:
        """Queries whose products with latents and rotary keys add up to those of q with the heads' keys."""
        num_others = q.shape[-1] - self.num_rotary
        q, rotary = jnp.split(q, [num_others], axis=-1)
        return jnp.einsum("BTNh,NhZ->BTNZ", q, self.up[:, :num_others]), rotary

    def outputs(self, z: Float[Array, "B T N Z"], value_dim: int) -> Float[Array, "B T N W"]:
        """The heads' outputs, from their weighted sums of latents."""
        return jnp.einsum("BTNZ,NWZ->BTNW", z, self.up[:, -value_dim:])
