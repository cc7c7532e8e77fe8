"""The choice of an attention implementation, and the messages when a kernel cannot be used."""

from dataclasses import dataclass, replace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from pipeline.core.errors import ConfigError
from pipeline.models.attention.choosing import choose_attention
from tests.specs import LLAMA

ROWS = 16  # over the four devices of a mesh
GEMMA = replace(LLAMA, head_dim=256, softcap=50.0)


@dataclass(frozen=True)
class Device:
    """The attributes of a device that the choice reads; no such device is needed."""

    platform: str
    compute_capability: str = "9.0"

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_limit": 60 << 30}


@dataclass(frozen=True)
class Devices:
    """The attributes of a mesh that the choice reads."""

    platform: str
    tensor: int = 1
    compute_capability: str = "9.0"

    @property
    def devices(self) -> np.ndarray:
        return np.array([[Device(self.platform, self.compute_capability)]])

    @property
    def shape(self) -> dict[str, int]:
        return {"data": 4, "tensor": self.tensor}


CHOSEN = {
    "cpu": (LLAMA, Devices("cpu"), 100, "float32", "xla", None),
    "tpu": (LLAMA, Devices("tpu"), 1024, "bfloat16", "splash", None),
    "tpu, float32": (LLAMA, Devices("tpu"), 1024, "float32", "splash", None),
    "tpu, capped": (GEMMA, Devices("tpu"), 1024, "bfloat16", "splash", None),
    "tpu, odd rows": (
        LLAMA,
        Devices("tpu"),
        1000,
        "bfloat16",
        "xla",
        "multiple of 128, and batch.length is 1000",
    ),
    "tpu, too few heads": (
        LLAMA,
        Devices("tpu", tensor=4),
        1024,
        "bfloat16",
        "xla",
        "mesh.tensor=4.*2 key-value heads",
    ),
    "gpu": (LLAMA, Devices("gpu"), 1000, "bfloat16", "cudnn", None),
    "gpu, float32": (LLAMA, Devices("gpu"), 1024, "float32", "xla", "bfloat16, and model.dtype is float32"),
    "gpu, capped": (GEMMA, Devices("gpu"), 1024, "bfloat16", "xla", "has a softcap of 50"),
    "gpu, long heads": (replace(LLAMA, head_dim=256), Devices("gpu"), 1024, "bfloat16", "cudnn", None),
    "gpu, a bias of 7.0 GiB": (LLAMA, Devices("gpu"), 30_720, "bfloat16", "cudnn", None),
    "gpu, a bias of 8 GiB": (LLAMA, Devices("gpu"), 32_768, "bfloat16", "xla", r"8\.0 GiB for the bias .* has 60\.0"),
    "gpu, very long rows": (LLAMA, Devices("gpu"), 131_072, "bfloat16", "xla", "128.0 GiB for the bias"),
    "older gpu, long heads": (
        *(replace(LLAMA, head_dim=256), Devices("gpu", compute_capability="8.6"), 1024, "bfloat16", "xla"),
        "at most 128, and the model's are 256",
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
            choose_attention("splash" if mesh.platform == "tpu" else "cudnn", arch, mesh, ROWS, length, dtype)


@pytest.mark.parametrize(("name", "platform"), [("splash", "TPU"), ("cudnn", "GPU")])
def test_kernels_of_other_platforms_are_refused(name: str, platform: str) -> None:
    mesh = Mesh(np.array(jax.devices("cpu")[:1]).reshape(1, 1), ("data", "tensor"))
    with pytest.raises(ConfigError, match=f"model.attention={name} .* needs a {platform}, and the devices are cpu"):
        choose_attention(name, LLAMA, mesh, ROWS, 1024, "bfloat16")


def test_an_unknown_implementation_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.attention is 'flash'.*auto, xla, splash, cudnn\."):
        choose_attention("flash", LLAMA, Devices("cpu"), ROWS, 1024, "bfloat16")
