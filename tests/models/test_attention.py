"""The choice of an attention implementation, and the messages when a kernel cannot be used."""

import sys
from dataclasses import dataclass, replace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from pipeline.core.errors import ConfigError
from pipeline.models.attention.choosing import choose_attention
from pipeline.models.attention.flash import runs_triton
from tests.specs import LLAMA

ROWS = 16  # over the four devices of a mesh
GEMMA = replace(LLAMA, head_dim=256, softcap=50.0)


@dataclass(frozen=True)
class Device:
    """The attributes of a device that the choice reads; no such device is needed."""

    platform: str
    compute_capability: str = "9.0"


@dataclass(frozen=True)
class Devices:
    """The attributes of a mesh that the choice reads."""

    platform: str
    tensor: int = 1
    compute_capability: str = "9.0"
    context: int = 1

    @property
    def devices(self) -> np.ndarray:
        return np.array([[Device(self.platform, self.compute_capability)]])

    @property
    def shape(self) -> dict[str, int]:
        return {"data": 4, "context": self.context, "tensor": self.tensor}


CHOSEN = {
    "cpu": (LLAMA, Devices("cpu"), 100, "float32", "xla", None),
    "tpu": (LLAMA, Devices("tpu"), 1024, "bfloat16", "splash", None),
    "tpu, float32": (LLAMA, Devices("tpu"), 1024, "float32", "splash", None),
    "tpu, capped": (GEMMA, Devices("tpu"), 1024, "bfloat16", "splash", None),
    "tpu, odd rows": (LLAMA, Devices("tpu"), 1000, "bfloat16", "splash", None),
    "tpu, too few heads": (
        LLAMA,
        Devices("tpu", tensor=4),
        1024,
        "bfloat16",
        "xla",
        "mesh.tensor=4.*2 key-value heads",
    ),
    "gpu, odd rows": (LLAMA, Devices("gpu"), 1000, "bfloat16", "flash", None),
    "gpu, divided positions": (LLAMA, Devices("gpu", context=2), 1000, "bfloat16", "flash", None),
    "gpu, divided positions of an encoder": (
        *(replace(LLAMA, causal=False), Devices("gpu", context=2), 1000, "bfloat16", "flash"),
        None,
    ),
    "gpu, float32": (LLAMA, Devices("gpu"), 1024, "float32", "flash", None),
    "gpu, capped": (GEMMA, Devices("gpu"), 1024, "bfloat16", "flash", None),
    "gpu, too large heads": (
        *(replace(LLAMA, head_dim=576), Devices("gpu"), 1024, "bfloat16", "xla"),
        "at most 512, and its keys have 576, its values 576",
    ),
    "old gpu": (LLAMA, Devices("gpu", compute_capability="7.5"), 1024, "bfloat16", "xla", r"8\.0 .* has 7\.5"),
}


@pytest.mark.parametrize(("arch", "mesh", "length", "dtype", "name", "note"), CHOSEN.values(), ids=CHOSEN.keys())
def test_auto_notes_why_no_kernel_is_used_and_the_kernel_itself_is_refused(
    arch, mesh, length, dtype, name, note
) -> None:
    chosen = choose_attention("auto", arch, mesh, ROWS, length, dtype)
    assert chosen.name == name
    assert (chosen.note is None) == (note is None)
    if note is not None:
        with pytest.raises(ConfigError, match=f"{note}.*Set model.attention=auto"):
            choose_attention("splash" if mesh.platform == "tpu" else "flash", arch, mesh, ROWS, length, dtype)


def test_a_jax_without_triton_uses_xla_on_gpus_and_says_so(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.triton", None)  # as Python marks a missing module
    assert not runs_triton(Device("gpu"))
    chosen = choose_attention("auto", LLAMA, Devices("gpu"), ROWS, 1024, "bfloat16")
    assert (chosen.name, "lacks Pallas's backend for Triton" in chosen.note) == ("xla", True)


@pytest.mark.parametrize(("name", "platform"), [("splash", "TPU"), ("flash", "GPU")])
def test_kernels_of_other_platforms_are_refused(name: str, platform: str) -> None:
    mesh = Mesh(np.array(jax.devices("cpu")[:1]).reshape(1, 1), ("data", "tensor"))
    with pytest.raises(ConfigError, match=f"model.attention={name} .* needs a {platform}, and the devices are cpu"):
        choose_attention(name, LLAMA, mesh, ROWS, 1024, "bfloat16")


def test_an_unknown_implementation_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.attention is 'cudnn'.*auto, xla, splash, flash\."):
        choose_attention("cudnn", LLAMA, Devices("cpu"), ROWS, 1024, "bfloat16")
