"""The choice of an implementation of attention."""

from collections.abc import Callable
from dataclasses import dataclass

from jax.sharding import Mesh

from pipeline.core.errors import ConfigError
from pipeline.models.architecture import Architecture
from pipeline.models.attention import flash, splash
from pipeline.models.attention.spec import Attend
from pipeline.models.attention.xla import attend_xla


@dataclass(frozen=True)
class Attention:
    """An implementation. `note` says why the platform's kernel, if there is one, is not used."""

    name: str
    attend: Attend
    note: str | None = None

    def describe(self) -> str:
        return f"attention {self.name}" + (f": {self.note}" if self.note else "")


XLA = Attention("xla", attend_xla)

_Obstacle = Callable[[Architecture, Mesh, int, int, str], str | None]
_KERNELS: dict[str, tuple[str, _Obstacle, Callable[[Mesh], Attend]]] = {
    "splash": ("tpu", splash.obstacle, splash.for_mesh),
    "flash": ("gpu", flash.obstacle, flash.for_mesh),
}
"""A kernel's platform, the function that says why a model cannot use the kernel, and the kernel for a mesh."""


def choose_attention(name: str, arch: Architecture, mesh: Mesh, rows: int, length: int, dtype: str) -> Attention:
    """The implementation called `name` for `rows` of `length`, divided over the mesh's devices, in `dtype`.

    `auto` is the platform's kernel, or `xla` if the platform has none or the model cannot use it. Raises ConfigError
    for an unknown name, and for a kernel that the model cannot use on these devices.
    """
    if name not in ("auto", "xla", *_KERNELS):
        raise ConfigError(f"model.attention is {name!r}. Set it to one of auto, xla, {', '.join(_KERNELS)}.")
    platform = mesh.devices.flat[0].platform
    of_platform = {kernel_platform: kernel for kernel, (kernel_platform, *_) in _KERNELS.items()}
    kernel = of_platform.get(platform, "xla") if name == "auto" else name
    if kernel == "xla":
        return XLA
    kernel_platform, obstacle, attend = _KERNELS[kernel]
    if kernel_platform != platform:
        reason = f"it needs a {kernel_platform.upper()}, and the devices are {platform}"
    else:
        reason = obstacle(arch, mesh, rows, length, dtype)
    if reason is None:
        return Attention(kernel, attend(mesh))
    if name == "auto":
        return Attention("xla", attend_xla, note=f"not {kernel}, because {reason}")
    raise ConfigError(f"model.attention={name} cannot be used: {reason}. Set model.attention=auto.")
