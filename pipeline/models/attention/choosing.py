"""Attention behind one function, and which implementation of it a run uses."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from jax.sharding import Mesh
from jaxtyping import Array, Float, Int32

from pipeline.core.errors import ConfigError
from pipeline.models.architecture import Architecture
from pipeline.models.attention import cudnn, splash
from pipeline.models.attention.xla import attend_xla


class Attend(Protocol):
    """Softmax attention within each segment; q and k already rotated."""

    def __call__(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        segments: Int32[Array, "B T"],
        *,
        causal: bool,
        scale: float,
        softcap: float | None = None,
        window: int | None = None,
    ) -> Float[Array, "B T N H"]:
        """`segments` numbers the documents of a row from 1; 0 is padding, which sees only padding: no position is
        without keys, so none is NaN. Heads n of q with the same n // (N / K) share a key-value head. Scores and softmax
        are float32.

        `scale` multiplies the scores, then `softcap` bends them to softcap * tanh(scores / softcap), as Gemma 2 does
        (arXiv 2408.00118). `window`, of causal attention only, is how many positions back are seen, the own one
        included: documents lie in a row without gaps, so distances in the row are distances in the document.
        """


@dataclass(frozen=True)
class Attention:
    """An implementation. `note` says why it is not the platform's own, where it could have been."""

    name: str
    attend: Attend
    note: str | None = None

    def describe(self) -> str:
        return f"attention {self.name}" + (f": {self.note}" if self.note else "")


XLA = Attention("xla", attend_xla)

_Obstacle = Callable[[Architecture, Mesh, int, str], str | None]
_KERNELS: dict[str, tuple[str, _Obstacle, Callable[[Mesh], Attend]]] = {
    "splash": ("tpu", splash.obstacle, lambda mesh: partial(splash.attend_splash, mesh=mesh)),
    "cudnn": ("gpu", cudnn.obstacle, lambda mesh: cudnn.attend_cudnn),
}
"""Platform, what is in the way of a model's use of it, and the function for a mesh."""


def choose_attention(name: str, arch: Architecture, mesh: Mesh, length: int, dtype: str) -> Attention:
    """The implementation called `name` for rows of `length` in `dtype` on the mesh's devices.

    `auto` is the platform's own kernel, or `xla` where there is none or it cannot serve this model. Raises ConfigError
    for a kernel that is asked for by name and cannot.
    """
    if name not in ("auto", "xla", *_KERNELS):
        raise ConfigError(f"model.attention is {name!r}. Set it to one of auto, xla, {', '.join(_KERNELS)}.")
    platform = mesh.devices.flat[0].platform
    for kernel, (own_platform, obstacle, attend) in _KERNELS.items():
        if name not in ("auto", kernel) or (name == "auto" and platform != own_platform):
            continue
        found = (
            f"it needs a {own_platform.upper()} and the devices are of platform {platform}"
            if platform != own_platform
            else obstacle(arch, mesh, length, dtype)
        )
        if found is None:
            return Attention(kernel, attend(mesh))
        if name == kernel:
            raise ConfigError(f"model.attention={name} cannot be used: {found}. Set model.attention=auto.")
        return Attention("xla", attend_xla, note=f"not {kernel}, because {found}")
    return XLA
