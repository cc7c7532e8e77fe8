"""TPUs and GPUs: their published properties, and slices and machines with names such as v5e-64 and h100-8."""

import math
import re
from dataclasses import dataclass
from typing import Any

from pipeline.core.errors import ConfigError

GIB = 1 << 30
CHIPS_PER_HOST = 4  # in TPU slices with several hosts


@dataclass(frozen=True)
class Chip:
    """One kind of TPU or GPU. Rates and the shares of the host are per chip. A device is what JAX calls a device."""

    name: str
    flops_per_s: float  # peak in bfloat16
    hbm_bytes: int  # of a device, usable by a program: according to the compiler, or as JAX reserves them by default
    hbm_bytes_per_s: float
    host_bytes_per_s: float  # from the device to the host, over PCIe
    network_bytes_per_s: float
    link_bytes_per_s: float  # from one neighbour; a chip has two neighbours along each dimension of its slice
    usd_per_hour: float | None  # on-demand list price, in the cheapest region of the United States; None: unknown
    host_memory_bytes: float
    host_cores: float  # virtual
    mfu: float  # model FLOPs utilisation of dense models, without attention
    max_chips_per_host: int  # in a slice with a single host
    num_dims: int  # of a slice's shape
    torus_multiple: int  # dimensions form rings if all sizes are multiples of this
    cores_per_chip: int  # names like v4-32 count cores
    mxu_size: int = 128  # the head size from which attention reaches its utilisation: of TPUs, of a matrix unit
    attention_mfu: float = 0.26  # model FLOPs utilisation of attention with such heads
    devices_per_chip: int = 1
    platform: str = "tpu"


# Sources:
# * Peak, HBM bandwidth, chips, virtual cores and memory of a VM of four chips: docs.cloud.google.com/tpu/docs/v4, /v5e,
#   /v5p, /v6e, /tpu7x; the memory of v4 is assumed. H100 SXM: its data sheet, and a p5.48xlarge (192 cores, 2 TiB for
#   eight). RTX 4090: "NVIDIA Ada GPU Architecture", dense, with sums in float32; its host is assumed.
# * Usable HBM: the compiler's message when a program exceeds it. GPUs: 3/4 of what the driver reports, which JAX
#   reserves (docs.jax.dev, "GPU memory allocation"); XLA's own description of the H100, and 23.65 GiB for the RTX 4090.
# * PCIe and network per chip: "How to Scale Your Model", jax-ml.github.io/scaling-book/tpus: 16 and 6.25 GB/s; v6e 32
#   and 12.5 GB/s; network of v5e 3.125 GB/s (its pod's 6.4 Tbps / 256). TPU7x: 100 Gbit/s by its page, PCIe as v6e's is
#   assumed. GPUs: PCIe 5.0 and 4.0 with 16 lanes; a network of 200 Gbit/s for eight H100, 10 for an RTX 4090, assumed.
# * Links between chips: half of the same pages' bidirectional rate per chip, divided by its ports (v5e 400 GB/s by 4,
#   v6e 800 by 4, v5p and TPU7x 1200 by 6); v4: table 4 of arXiv 2304.01433. H100: NVLink's 450 GB/s, as two links. The
#   two devices of a TPU7x are assumed to share its links.
# * Slices form a torus if all dimensions are multiples of 4 (v4, v5p, TPU7x: the same pages), or for a whole pod of
#   16x16 (v5e, v6e: the same book).
# * MFU, published for training: v4 46 % (PaLM, arXiv 2204.02311, table 3); v5e 56 to 67 % (github.com/google/maxtext,
#   README of 2024); v5p 65 % and v6e 39 to 50 % (maxtext.readthedocs.io, "Optimized models tiering"); TPU7x 52 %
#   (Llama-3.1-70B, github.com/AI-Hypercomputer/tpu-recipes, training/ironwood); H100 38 to 43 % (Llama 3, arXiv
#   2407.21783, table 4). The RTX 4090 is assumed to be like the H100.
# * Attention: FLOPs under the causal mask per bundle of the compiled kernels, in docs/audit-tpu.json: an upper limit.
#   v4 and v5p are assumed to be like v5e, TPU7x like v6e. GPUs: 35 % of FlashAttention-2 on an H100 (arXiv 2407.08608).
# * Prices: cloud.google.com/tpu/pricing in 2025, assumed to hold; an eighth of a p5.48xlarge in us-east-1 in 2026.
#   plan.usd_per_chip_hour overrides them.
_TORUS_2D = {"max_chips_per_host": 8, "num_dims": 2, "torus_multiple": 16, "cores_per_chip": 1}
_TORUS_3D = {"max_chips_per_host": 4, "num_dims": 3, "torus_multiple": 4, "cores_per_chip": 2}
_MXU_256 = {"mxu_size": 256, "attention_mfu": 0.21}
_GPU = {"num_dims": 1, "torus_multiple": 1, "cores_per_chip": 1, "mxu_size": 64, "attention_mfu": 0.35}
_GPU |= {"platform": "gpu"}
_V7X = _TORUS_3D | _MXU_256 | {"devices_per_chip": 2}
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v4", 275e12, int(30.75 * GIB), 1200e9, 16e9, 6.25e9, 50e9, 3.22, 102e9, 60, 0.46, **_TORUS_3D),
        Chip("v5e", 197e12, int(15.75 * GIB), 819e9, 16e9, 3.125e9, 50e9, 1.20, 48e9, 28, 0.55, **_TORUS_2D),
        Chip("v5p", 459e12, int(95.73 * GIB), 2765e9, 16e9, 6.25e9, 100e9, 4.20, 112e9, 52, 0.65, **_TORUS_3D),
        Chip(
            *("v6e", 918e12, int(31.24 * GIB), 1638e9, 32e9, 12.5e9, 100e9, 2.70, 180e9, 45, 0.45),
            **_TORUS_2D,
            **_MXU_256,
        ),
        Chip("tpu7x", 2307e12, int(94.74 * GIB), 7380e9, 32e9, 12.5e9, 100e9, None, 240e9, 56, 0.52, **_V7X),
        Chip(
            *("h100", 989e12, 84_942_979_072 * 3 // 4, 3352e9, 64e9, 3.125e9, 225e9, 6.88, 275e9, 24, 0.41),
            max_chips_per_host=8,
            **_GPU,
        ),
        Chip(
            *("rtx4090", 165e12, int(23.65 * GIB) * 3 // 4, 1008e9, 32e9, 1.25e9, 0, None, 64e9, 16, 0.41),
            max_chips_per_host=1,
            **_GPU,
        ),
    )
}
_ALIASES = {"v5litepod": "v5e"}


@dataclass(frozen=True)
class Slice:
    """Connected TPU chips, in a grid of `shape`, or the GPUs of a machine."""

    chip: Chip
    shape: tuple[int, ...]

    @property
    def num_chips(self) -> int:
        return math.prod(self.shape)

    @property
    def num_devices(self) -> int:
        return self.num_chips * self.chip.devices_per_chip

    @property
    def num_hosts(self) -> int:
        return 1 if self.num_chips <= self.chip.max_chips_per_host else math.ceil(self.num_chips / CHIPS_PER_HOST)

    @property
    def host_memory_bytes(self) -> float:
        return self.chip.host_memory_bytes * self.num_chips / self.num_hosts

    @property
    def host_cores(self) -> float:
        return self.chip.host_cores * self.num_chips / self.num_hosts

    @property
    def topology_options(self) -> dict[str, Any]:
        """The options with which libtpu describes this slice."""
        if self.num_hosts == 1 and self.num_chips > CHIPS_PER_HOST:
            return {"chips_per_host_bounds": [*self.shape, 1]}
        # One device per chip: on v4, libtpu's default is one per core.
        return {"chip_config_name": "megacore"} if self.chip.name == "v4" else {}

    @property
    def interconnect_bytes_per_s(self) -> float:
        """Bytes per second that each device receives in an all-gather: from two neighbours along a ring, otherwise from
        one, since the chips at the ends have only one."""
        is_torus = all(size % self.chip.torus_multiple == 0 for size in self.shape)
        num_links = sum(size > 1 for size in self.shape) * (1 + is_torus)
        return num_links * self.chip.link_bytes_per_s / self.chip.devices_per_chip

    @property
    def name(self) -> str:
        """The name that libtpu uses, e.g. v5e:8x8; of GPUs, e.g. h100-8."""
        separator = ":" if self.chip.num_dims > 1 else "-"
        return f"{self.chip.name}{separator}{'x'.join(map(str, self.shape))}"


def parse_slice(name: str) -> Slice:
    """Parses a name like `v5e-64`, `v5e:8x8` or `h100-8`.

    The first form is Cloud TPU's, where the numbers of v4, v5p and TPU7x count cores, two per chip. Raises ConfigError
    for an unknown kind of chip, for a number of chips that does not determine the shape, and for more GPUs than a
    machine has.
    """
    match = re.fullmatch(r"(\w+?)(?:-(\d+)|:(\d+(?:x\d+)+))", name)
    chip = CHIPS.get(_ALIASES.get(match[1], match[1])) if match else None
    if chip is None:
        raise ConfigError(
            f"topology is {name!r}. Set it to a TPU slice such as v5e-64 or v5e:8x8, or to the GPUs of a machine such "
            f"as h100-8. Kinds: {', '.join(CHIPS)}."
        )
    if match[3]:
        shape = tuple(map(int, match[3].split("x")))
        if len(shape) != chip.num_dims or 0 in shape:
            raise ConfigError(f"topology is {name!r}, but slices of {chip.name} have {chip.num_dims} dimensions.")
        return Slice(chip, shape)
    if chip.platform == "gpu" and int(match[2]) > chip.max_chips_per_host:
        raise ConfigError(f"topology is {name!r}, but a plan is for one machine, of at most {chip.max_chips_per_host}.")
    num_chips, rest = divmod(int(match[2]), chip.cores_per_chip)
    if rest or num_chips < 1 or num_chips & (num_chips - 1):
        raise ConfigError(
            f"topology is {name!r}, whose shape is unknown because its number of chips is not a power of two. "
            f"Give the shape, e.g. {chip.name}:{'x'.join(['4'] * chip.num_dims)}."
        )
    exponent = num_chips.bit_length() - 1
    shape = tuple(1 << ((exponent + dim) // chip.num_dims) for dim in range(chip.num_dims))
    return Slice(chip, shape if shape[0] > 1 else shape[::-1])  # four chips of v4 are 2x2x1
