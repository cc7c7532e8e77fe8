"""TPU chips: their published properties, and the slices with names such as v5e-64."""

import math
import re
from dataclasses import dataclass
from typing import Any

from pipeline.core.errors import ConfigError

GIB = 1 << 30
CHIPS_PER_HOST = 4  # in slices with several hosts


@dataclass(frozen=True)
class Chip:
    """One kind of TPU. Rates are per chip; the network rate is the chip's share of its host's."""

    name: str
    flops_per_s: float  # peak in bfloat16
    hbm_bytes: int  # usable by a program, according to the compiler; a little less than published
    hbm_bytes_per_s: float
    host_bytes_per_s: float  # from the device to the host, over PCIe
    network_bytes_per_s: float
    link_bytes_per_s: float  # from one neighbour; a chip has two neighbours along each dimension of its slice
    usd_per_hour: float  # on-demand list price, in the cheapest region of the United States
    host_memory_bytes: float  # of a virtual machine with four chips
    mfu: float  # model FLOPs utilisation of dense models, without attention
    max_chips_per_host: int  # in a slice with a single host
    num_dims: int  # of a slice's shape
    torus_multiple: int  # dimensions form rings if all sizes are multiples of this
    cores_per_chip: int  # names like v4-32 count cores
    mxu_size: int = 128  # rows and columns of a matrix unit
    attention_mfu: float = 0.26  # model FLOPs utilisation of attention with heads that fill the matrix units

    @property
    def critical_tokens(self) -> float:
        """The number of tokens per step above which multiplying by a matrix takes longer than reading it."""
        return self.flops_per_s / self.hbm_bytes_per_s  # 2 operations per number of 2 bytes


# Sources:
# * Peak and HBM bandwidth: docs.cloud.google.com/tpu/docs/v4, /v5e, /v5p, /v6e.
# * Usable HBM: the compiler's message when a program exceeds it.
# * Chips and memory of a VM: "VM types" on the same pages (ct5lp-hightpu-4t, -8t, ct6e-standard-4t, -8t); the memory of
#   v4 and v5p is assumed.
# * PCIe and network per chip: "How to Scale Your Model", jax-ml.github.io/scaling-book/tpus: 16 and 6.25 GB/s; v6e 32
#   and 12.5 GB/s; network of v5e 3.125 GB/s (its pod's 6.4 Tbps / 256).
# * Links between chips: half of the same pages' bidirectional rate per chip, divided by its ports (v5e 400 GB/s by 4,
#   v6e 800 by 4, v5p 1200 by 6); v4: table 4 of arXiv 2304.01433.
# * Slices form a torus if all dimensions are multiples of 4 (v4, v5p: the same pages), or for a whole pod of 16x16
#   (v5e, v6e: the same book).
# * MFU, published for training: v4 46 % (PaLM, arXiv 2204.02311, table 3); v5e 56 to 67 % (github.com/google/maxtext,
#   README of 2024); v5p 65 % and v6e 39 to 50 % (maxtext.readthedocs.io, "Optimized models tiering").
# * Attention: FLOPs under the causal mask per bundle of the compiled kernels, in docs/audit-tpu.json: an upper limit.
#   v4 and v5p are assumed to be like v5e.
# * Prices: cloud.google.com/tpu/pricing in 2025, assumed to hold; plan.usd_per_chip_hour overrides them.
_TORUS_2D = {"max_chips_per_host": 8, "num_dims": 2, "torus_multiple": 16, "cores_per_chip": 1}
_TORUS_3D = {"max_chips_per_host": 4, "num_dims": 3, "torus_multiple": 4, "cores_per_chip": 2}
_MXU_256 = {"mxu_size": 256, "attention_mfu": 0.21}
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v4", 275e12, int(30.75 * GIB), 1200e9, 16e9, 6.25e9, 50e9, 3.22, 407e9, 0.46, **_TORUS_3D),
        Chip("v5e", 197e12, int(15.75 * GIB), 819e9, 16e9, 3.125e9, 50e9, 1.20, 192e9, 0.55, **_TORUS_2D),
        Chip("v5p", 459e12, int(95.73 * GIB), 2765e9, 16e9, 6.25e9, 100e9, 4.20, 448e9, 0.65, **_TORUS_3D),
        Chip("v6e", 918e12, int(31.24 * GIB), 1638e9, 32e9, 12.5e9, 100e9, 2.70, 720e9, 0.45, **_TORUS_2D, **_MXU_256),
    )
}
_ALIASES = {"v5litepod": "v5e"}


@dataclass(frozen=True)
class Slice:
    """Connected chips, in a grid of `shape`."""

    chip: Chip
    shape: tuple[int, ...]

    @property
    def num_chips(self) -> int:
        return math.prod(self.shape)

    @property
    def num_hosts(self) -> int:
        return 1 if self.num_chips <= self.chip.max_chips_per_host else math.ceil(self.num_chips / CHIPS_PER_HOST)

    @property
    def host_memory_bytes(self) -> float:
        return self.chip.host_memory_bytes * max(1, self.num_chips / self.num_hosts / CHIPS_PER_HOST)

    @property
    def topology_options(self) -> dict[str, Any]:
        """The options with which libtpu describes this slice."""
        if self.num_hosts == 1 and self.num_chips > CHIPS_PER_HOST:
            return {"chips_per_host_bounds": [*self.shape, 1]}
        # One device per chip: on v4, libtpu's default is one per core.
        return {"chip_config_name": "megacore"} if self.chip.name == "v4" else {}

    @property
    def interconnect_bytes_per_s(self) -> float:
        """Bytes per second that each chip receives in an all-gather: from two neighbours along a ring, otherwise from
        one, since the chips at the ends have only one."""
        is_torus = all(size % self.chip.torus_multiple == 0 for size in self.shape)
        return sum(size > 1 for size in self.shape) * (1 + is_torus) * self.chip.link_bytes_per_s

    @property
    def name(self) -> str:
        """The name that libtpu uses, e.g. v5e:8x8."""
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"


def parse_slice(name: str) -> Slice:
    """Parses a name like `v5e-64` or `v5e:8x8`.

    The first form is Cloud TPU's, where the numbers of v4 and v5p count cores, two per chip. Raises ConfigError for an
    unknown kind of TPU, and for a number of chips that does not determine the shape.
    """
    match = re.fullmatch(r"(\w+?)(?:-(\d+)|:(\d+(?:x\d+)+))", name)
    chip = CHIPS.get(_ALIASES.get(match[1], match[1])) if match else None
    if chip is None:
        raise ConfigError(
            f"topology is {name!r}. Set it to a TPU slice such as v5e-64 or v5e:8x8. Kinds: {', '.join(CHIPS)}."
        )
    if match[3]:
        shape = tuple(map(int, match[3].split("x")))
        if len(shape) != chip.num_dims or 0 in shape:
            raise ConfigError(f"topology is {name!r}, but slices of {chip.name} have {chip.num_dims} dimensions.")
        return Slice(chip, shape)
    num_chips, rest = divmod(int(match[2]), chip.cores_per_chip)
    if rest or num_chips < 1 or num_chips & (num_chips - 1):
        raise ConfigError(
            f"topology is {name!r}, whose shape is unknown because its number of chips is not a power of two. "
            f"Give the shape, e.g. {chip.name}:{'x'.join(['4'] * chip.num_dims)}."
        )
    exponent = num_chips.bit_length() - 1
    shape = tuple(1 << ((exponent + dim) // chip.num_dims) for dim in range(chip.num_dims))
    return Slice(chip, shape if shape[0] > 1 else shape[::-1])  # four chips of v4 are 2x2x1
